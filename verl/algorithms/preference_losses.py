"""Losses of preference optimization: pure functions of the log-probabilities of completions.

A loss has one element per pair, or one element per completion for labelled completions. Training minimises the mean over the
batch. A function is called with the arguments that it names:

    chosen_ratio, rejected_ratio   c, r = log pi(y) - log pi_ref(y), summed over the completion
    delta                          D = f(c) - f(r), with the f-divergence's score f (`divergence_score`)
    mean_delta                     f(c) / n_c - f(r) / n_r, with n tokens of the completion
    chosen_logp, rejected_logp     log pi(y)
    chosen_mean, rejected_mean     log pi(y) / n
    nll                            -log pi of the chosen completion; its mean over pairs is the mean over tokens of the batch
    matched_*                      values of other pairs of the batch that have the same rank, without gradient (`match_ranks`)
    ratio, desirable, shift        of labelled completions: c or r, bool, and a statistic of the batch or the run

beta scales rewards, label_smoothing (e) is the probability that a pair is labelled the wrong way round. sg is logsigmoid.
"""

import inspect
import math
from collections.abc import Mapping
from functools import cache

import torch
from torch import Tensor
from torch.nn.functional import logsigmoid, softplus

from verl.errors import ConfigError
from verl.families import PREFERENCE_LOSSES, REFERENCE_COLUMNS

MAX_EXPONENT = 80.0  # of the alpha divergence: exp() of it is finite in float32


def conservative(logits: Tensor, label_smoothing: float) -> Tensor:
    """Cross-entropy of a label that is wrong with probability e: -(1 - e) sg(x) - e sg(-x) (cDPO, Mitchell 2023)."""
    return -(1 - label_smoothing) * logsigmoid(logits) - label_smoothing * logsigmoid(-logits)


# -- pairs, with a reference -----------------------------------------------------------------------------------------


def sigmoid(delta: Tensor, beta: float, label_smoothing: float = 0.0) -> Tensor:
    """DPO, -sg(beta D) (2305.18290 eq. 7); with label smoothing cDPO."""
    return conservative(beta * delta, label_smoothing)


def sigmoid_norm(mean_delta: Tensor, beta: float) -> Tensor:
    """DPO on ratios per token, -sg(beta d) (Tulu 3, 2411.15124)."""
    return -logsigmoid(beta * mean_delta)


def hinge(delta: Tensor, beta: float) -> Tensor:
    """relu(1 - beta D) (SLiC, 2305.10425; RSO, 2309.06657)."""
    return torch.relu(1 - beta * delta)


def ipo(mean_delta: Tensor, beta: float) -> Tensor:
    """(d - 1 / (2 beta))^2 on ratios per token (2310.12036 eq. 17; the authors confirmed the division by length)."""
    return (mean_delta - 1 / (2 * beta)).square()


def exo_pair(delta: Tensor, beta: float, label_smoothing: float) -> Tensor:
    """KL of (sig(x), sig(-x)), x = beta D, from (1 - e, e) (2402.00856 eq. 16); e > 0."""
    x = beta * delta
    keeps, flips = math.log1p(-label_smoothing), math.log(label_smoothing)
    return torch.sigmoid(x) * (logsigmoid(x) - keeps) + torch.sigmoid(-x) * (logsigmoid(-x) - flips)


def nca_pair(chosen_ratio: Tensor, rejected_ratio: Tensor, beta: float) -> Tensor:
    """-sg(beta c) - sg(-beta c) / 2 - sg(-beta r) / 2 (NCA, 2402.05369)."""
    c, r = beta * chosen_ratio, beta * rejected_ratio
    return -logsigmoid(c) - 0.5 * logsigmoid(-c) - 0.5 * logsigmoid(-r)


def robust(delta: Tensor, beta: float, label_smoothing: float) -> Tensor:
    """Unbiased under flipped labels: (-(1 - e) sg(beta D) + e sg(-beta D)) / (1 - 2 e) (2403.00409); e < 1/2."""
    e, x = label_smoothing, beta * delta
    return (-(1 - e) * logsigmoid(x) + e * logsigmoid(-x)) / (1 - 2 * e)


def bco_pair(chosen_ratio: Tensor, rejected_ratio: Tensor, beta: float) -> Tensor:
    """Binary classifier without a shift: -sg(beta c) - sg(-beta r) (BCO, 2404.04656)."""
    return -logsigmoid(beta * chosen_ratio) - logsigmoid(-beta * rejected_ratio)


def sppo_hard(chosen_ratio: Tensor, rejected_ratio: Tensor, beta: float) -> Tensor:
    """(c - 1/(2 beta))^2 + (r + 1/(2 beta))^2: the winner wins surely (2405.00675 eq. 4.7)."""
    return (chosen_ratio - 0.5 / beta).square() + (rejected_ratio + 0.5 / beta).square()


def aot(
    chosen_logp: Tensor, rejected_logp: Tensor, matched_margin: Tensor, beta: float, label_smoothing: float = 0.0
) -> Tensor:
    """Stochastic dominance of the policy's margins over the reference's (2406.05882): cDPO on the difference of each
    pair's log pi(y_w) - log pi(y_l) to the reference's margin of the same rank in the batch, `matched_margin`."""
    return conservative(beta * (chosen_logp - rejected_logp - matched_margin), label_smoothing)


def aot_unpaired(
    chosen_ratio: Tensor,
    rejected_ratio: Tensor,
    matched_chosen: Tensor,
    matched_rejected: Tensor,
    beta: float,
    label_smoothing: float = 0.0,
) -> Tensor:
    """Stochastic dominance of chosen over rejected ratios (2406.05882): cDPO on differences of equal rank.

    A difference belongs to two pairs: the pair of its chosen and the pair of its rejected completion. Each pair has half of
    the value and, since the other pair's ratio is a constant there, the gradient of its ratio.
    """
    halves = conservative(beta * (chosen_ratio - matched_rejected), label_smoothing)
    halves = halves + conservative(beta * (matched_chosen - rejected_ratio), label_smoothing)
    return halves - 0.5 * halves.detach()


def apo_zero(chosen_ratio: Tensor, rejected_ratio: Tensor, beta: float) -> Tensor:
    """1 - sig(beta c) + sig(beta r): where chosen completions are better than the policy's (2408.06266 eq. 7)."""
    return torch.sigmoid(-beta * chosen_ratio) + torch.sigmoid(beta * rejected_ratio)


def apo_down(chosen_ratio: Tensor, rejected_ratio: Tensor, beta: float) -> Tensor:
    """sig(beta c) + 1 - sig(beta (c - r)): where they are worse than the policy's (2408.06266 eq. 8)."""
    return torch.sigmoid(beta * chosen_ratio) + torch.sigmoid(-beta * (chosen_ratio - rejected_ratio))


def discopop(delta: Tensor, beta: float, discopop_tau: float = 0.05) -> Tensor:
    """-sg(x) (1 - m) + exp(-x) m with x = beta D, m = sig(x / tau) (2406.08414 eq. 5)."""
    x = beta * delta
    weight = torch.sigmoid(x / discopop_tau)
    return -logsigmoid(x) * (1 - weight) + torch.exp(-x) * weight


def sft(nll: Tensor) -> Tensor:
    """Negative log-likelihood of the chosen completions, a mean over tokens; with another loss RPO (2404.19733) or MPO."""
    return nll


# -- pairs, without a reference --------------------------------------------------------------------------------------


def alpha_reward(log_prob: Tensor, alpha: float) -> Tensor:
    """AlphaPO's reward (1 - p^-alpha) / alpha of a log-probability, log p for alpha = 0 (2501.03884)."""
    return -torch.expm1(-alpha * log_prob) / alpha if alpha else log_prob


def cpo(
    chosen_logp: Tensor,
    rejected_logp: Tensor,
    nll: Tensor,
    beta: float,
    label_smoothing: float = 0.0,
    cpo_alpha: float = 1.0,
    alpha: float = 0.0,
) -> Tensor:
    """-sg(beta (log pi(y_w) - log pi(y_l))) + cpo_alpha NLL (2401.08417)."""
    x = alpha_reward(chosen_logp, alpha) - alpha_reward(rejected_logp, alpha)
    return conservative(beta * x, label_smoothing) + cpo_alpha * nll


def cpo_hinge(
    chosen_logp: Tensor, rejected_logp: Tensor, nll: Tensor, beta: float, cpo_alpha: float = 1.0, alpha: float = 0.0
) -> Tensor:
    """CPO with relu(1 - beta x) in place of the sigmoid (SLiC, 2305.10425)."""
    x = alpha_reward(chosen_logp, alpha) - alpha_reward(rejected_logp, alpha)
    return torch.relu(1 - beta * x) + cpo_alpha * nll


def cpo_ipo(
    chosen_mean: Tensor, rejected_mean: Tensor, nll: Tensor, beta: float, cpo_alpha: float = 1.0, alpha: float = 0.0
) -> Tensor:
    """CPO with (x - 1 / (2 beta))^2 on log-probs per token (2310.12036 eq. 17)."""
    x = alpha_reward(chosen_mean, alpha) - alpha_reward(rejected_mean, alpha)
    return (x - 1 / (2 * beta)).square() + cpo_alpha * nll


def simpo(
    chosen_mean: Tensor,
    rejected_mean: Tensor,
    beta: float,
    simpo_gamma: float = 0.5,
    label_smoothing: float = 0.0,
    alpha: float = 0.0,
) -> Tensor:
    """-sg(beta (log pi(y_w) / n_w - log pi(y_l) / n_l) - gamma) (2405.14734 eq. 6); AlphaPO with alpha."""
    x = alpha_reward(chosen_mean, alpha) - alpha_reward(rejected_mean, alpha)
    return conservative(beta * x - simpo_gamma, label_smoothing)


def log_odds(log_prob: Tensor) -> Tensor:
    """log(p / (1 - p)) of log p < 0, without losing digits near p = 0 or p = 1."""
    near_one = log_prob > -math.log(2)
    log1mexp = torch.where(
        near_one,
        torch.log(-torch.expm1(log_prob.where(near_one, log_prob.new_tensor(-1.0)))),
        torch.log1p(-log_prob.exp()),
    )
    return log_prob - log1mexp


def orpo(chosen_mean: Tensor, rejected_mean: Tensor, nll: Tensor, beta: float) -> Tensor:
    """NLL - beta sg(log odds(y_w) - log odds(y_l)), odds of the probability per token (2403.07691 eq. 4 and 7)."""
    return nll - beta * logsigmoid(log_odds(chosen_mean) - log_odds(rejected_mean))


# -- labelled completions --------------------------------------------------------------------------------------------


def kto(
    ratio: Tensor,
    desirable: Tensor,
    shift: Tensor,
    beta: float,
    desirable_weight: float = 1.0,
    undesirable_weight: float = 1.0,
) -> Tensor:
    """w (1 - sig(+-beta (ratio - z))), + for desirable completions (2402.01306 eq. 7). `shift` is z, the estimate of
    KL(pi || pi_ref) from completions of other prompts, not below 0."""
    sign, weight = _signs(desirable, ratio, desirable_weight, undesirable_weight)
    return weight * torch.sigmoid(-sign * beta * (ratio - shift))


def apo_zero_unpaired(
    ratio: Tensor, desirable: Tensor, beta: float, desirable_weight: float = 1.0, undesirable_weight: float = 1.0
) -> Tensor:
    """APO-zero of single completions: w sig(-+beta ratio), - for desirable ones (2408.06266 eq. 7)."""
    sign, weight = _signs(desirable, ratio, desirable_weight, undesirable_weight)
    return weight * torch.sigmoid(-sign * beta * ratio)


def bco(
    ratio: Tensor,
    desirable: Tensor,
    shift: Tensor,
    beta: float,
    desirable_weight: float = 1.0,
    undesirable_weight: float = 1.0,
) -> Tensor:
    """Binary classifier with reward shift: -w sg(+-(beta ratio - delta)), + for desirable ones (BCO, 2404.04656). `shift` is
    delta, the running mean of rewards beta ratio."""
    sign, weight = _signs(desirable, ratio, desirable_weight, undesirable_weight)
    return weight * softplus(-sign * (beta * ratio - shift))


def _signs(desirable: Tensor, like: Tensor, yes: float, no: float) -> tuple[Tensor, Tensor]:
    """(+1 or -1, weight) of each completion."""
    one = torch.ones_like(like)
    return torch.where(desirable, one, -one), torch.where(desirable, one * yes, one * no)


@cache
def reads(name: str) -> frozenset[str]:
    """The arguments of the loss `name`. Raises ConfigError for an unknown loss, and for an argument that no term has."""
    arguments = inspect.signature(PREFERENCE_LOSSES.get(name)).parameters
    if not PREFERENCE_LOSSES.is_built_in(name):
        terms = frozenset().union(*map(reads, filter(PREFERENCE_LOSSES.is_built_in, PREFERENCE_LOSSES)))
        needed = {a.name for a in arguments.values() if a.default is a.empty and a.kind is not a.VAR_KEYWORD}
        if unknown := sorted(needed - terms):
            raise ConfigError(
                f"The preference loss '{name}' has the argument {unknown[0]}, which is no term. The terms are "
                f"{', '.join(sorted(terms))}."
            )
    return frozenset(arguments)


def preference_loss(name: str, terms: Mapping[str, object]) -> Tensor:
    """The loss `name` of each pair or completion; `terms` has tensors and settings by argument, more than it reads."""
    names = reads(name)
    loss: Tensor = PREFERENCE_LOSSES.get(name)(**{key: value for key, value in terms.items() if key in names})
    return loss


def is_paired(name: str) -> bool:
    """Whether the loss is of pairs, and not of single completions."""
    return "desirable" not in reads(name)


def needs_reference(name: str) -> bool:
    """Whether the loss compares with a reference policy."""
    return not reads(name).isdisjoint(REFERENCE_COLUMNS)


# -- terms -----------------------------------------------------------------------------------------------------------


def divergence_score(ratio: Tensor, kind: str, alpha: float = 0.5) -> Tensor:
    """f'(t) at t = pi / pi_ref, given log t, for DPO under an f-divergence (2309.16240): log t (reverse_kl),
    1 - 1/t (forward_kl), log 2t / (1 + t) (js_divergence), (t^(alpha - 1) - 1) / (alpha - 1) (alpha_divergence)."""
    if kind == "forward_kl":
        return -torch.expm1(-ratio)
    if kind == "js_divergence":
        return math.log(2) + logsigmoid(ratio)
    if kind == "alpha_divergence" and abs(alpha - 1) >= 1e-6:  # its limit at 1 is the reverse KL
        return torch.expm1(((alpha - 1) * ratio).clamp(max=MAX_EXPONENT)) / (alpha - 1)
    return ratio


def completion_sums(
    log_probs: Tensor, mask: Tensor, shared: Tensor | None = None, ld_alpha: float | None = None
) -> Tensor:
    """log pi(y) [batch] of log_probs [batch, response] where `mask` is true. LD-DPO (2409.06411): tokens beyond the
    first `shared` [batch] ones, the length of the pair's shorter completion, have the weight `ld_alpha`."""
    if ld_alpha is None:
        return (log_probs * mask).sum(1)
    assert shared is not None
    beyond = mask.long().cumsum(1) > shared.unsqueeze(1)
    return (log_probs * mask * torch.ones_like(log_probs).masked_fill_(beyond, ld_alpha)).sum(1)


def shared_lengths(mask: Tensor, chosen: Tensor) -> Tensor:
    """Tokens of the shorter completion of each row's pair [batch]; `chosen` [batch] is true on one row of each pair, and the
    rows of both kinds are in the same order."""
    lengths = mask.sum(1)
    shorter = torch.minimum(lengths[chosen], lengths[~chosen])
    return torch.empty_like(lengths).masked_scatter_(chosen, shorter).masked_scatter_(~chosen, shorter)


def wpo_weights(log_probs: Tensor, sum_pi_squared: Tensor, mask: Tensor) -> Tensor:
    """exp(mean over tokens of log p - log sum_v p_v^2) [batch], without gradient: how likely the policy is to write the
    completion itself (2406.11827 eq. 2)."""
    aligned = torch.where(mask, log_probs.detach() - sum_pi_squared.detach().log(), 0.0)
    return (aligned.sum(1) / mask.sum(1).clamp(min=1)).exp()


def match_ranks(values: Tensor, targets: Tensor) -> Tensor:
    """For each of `values` [pairs], the one of `targets` [pairs] that has the same rank."""
    matched = torch.empty_like(targets)
    matched[values.argsort(stable=True)] = targets.sort().values
    return matched
