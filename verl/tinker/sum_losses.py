"""Losses that are plain sums over tokens and sequences, as training services define them: no mean, no KL term.

lp are the log-probs of the target tokens, q the sampler's (`logprobs`), A the `advantages`, r = exp(lp - q):

    cross_entropy         sum(-lp * weights)
    importance_sampling   -sum(r * A)
    ppo                   -sum(min(r * A, clamp(r, low, high) * A))
    cispo                 -sum(stopgrad(clamp(r, low, high)) * lp * A)
    dro                   -sum(lp * A - beta / 2 * (lp - q)^2)
    custom_from_config    the policy loss of the server's config (actor.policy_loss), summed over tokens with A != 0

All tensors are [...] of one shape. A token that does not count has a weight or an advantage of 0, and lp = q for dro. The
source is the documentation of Thinking Machines' Tinker, where the thresholds are ratios with the defaults 0.8 and 1.2.
"""

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field

import torch


def _cross_entropy(log_probs: torch.Tensor, *, weights: torch.Tensor) -> torch.Tensor:
    """The negative log-likelihood, weighted."""
    return -(log_probs * weights).sum()


def _importance_sampling(log_probs: torch.Tensor, *, logprobs: torch.Tensor, advantages: torch.Tensor) -> torch.Tensor:
    """The policy gradient, corrected for the policy that sampled."""
    return -((log_probs - logprobs).exp() * advantages).sum()


def _ppo(
    log_probs: torch.Tensor,
    *,
    logprobs: torch.Tensor,
    advantages: torch.Tensor,
    clip_low_threshold: float,
    clip_high_threshold: float,
) -> torch.Tensor:
    """The clipped surrogate of Schulman et al. 2017, arXiv:1707.06347, equation 7."""
    ratio = (log_probs - logprobs).exp()
    clipped = ratio.clamp(clip_low_threshold, clip_high_threshold)
    return -torch.minimum(ratio * advantages, clipped * advantages).sum()


def _cispo(
    log_probs: torch.Tensor,
    *,
    logprobs: torch.Tensor,
    advantages: torch.Tensor,
    clip_low_threshold: float,
    clip_high_threshold: float,
) -> torch.Tensor:
    """REINFORCE with clipped importance weights: MiniMax 2025, arXiv:2506.13585, equation 4."""
    weight = (log_probs.detach() - logprobs).exp().clamp(clip_low_threshold, clip_high_threshold)
    return -(weight * log_probs * advantages).sum()


def _dro(log_probs: torch.Tensor, *, logprobs: torch.Tensor, advantages: torch.Tensor, beta: float) -> torch.Tensor:
    """The policy loss of Richemond et al. 2024, arXiv:2405.19107, with a quadratic penalty in place of a KL term."""
    return -(log_probs * advantages - 0.5 * beta * (log_probs - logprobs).square()).sum()


def _from_config(log_probs: torch.Tensor, **inputs: torch.Tensor) -> torch.Tensor:
    """Losses over sequences read rows: the workbench computes it."""
    raise NotImplementedError


@dataclass(frozen=True)
class SumLoss:
    """A loss, the tensors that it reads in addition to the log-probs, and its settings with their defaults (None: required)."""

    function: Callable[..., torch.Tensor]
    inputs: tuple[str, ...]
    settings: Mapping[str, float | None] = field(default_factory=dict)


FROM_CONFIG = "custom_from_config"  # as verl-recipe's server calls it
_CLIP = {"clip_low_threshold": 0.8, "clip_high_threshold": 1.2}
_POLICY = ("logprobs", "advantages")
SUM_LOSSES = {
    "cross_entropy": SumLoss(_cross_entropy, ("weights",)),
    "importance_sampling": SumLoss(_importance_sampling, _POLICY),
    "ppo": SumLoss(_ppo, _POLICY, _CLIP),
    "cispo": SumLoss(_cispo, _POLICY, _CLIP),
    "dro": SumLoss(_dro, _POLICY, {"beta": None}),
    FROM_CONFIG: SumLoss(_from_config, _POLICY),
}
