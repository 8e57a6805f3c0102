"""Losses of reward models on pairs of completions, and measures of how far their scores can be trusted."""

from collections.abc import Callable

import torch
import torch.nn.functional as F
from torch import Tensor

from verl.errors import ConfigError


def bradley_terry(chosen: Tensor, rejected: Tensor, margin: Tensor) -> Tensor:
    """-log sigmoid(r_w - r_l - m) of each pair (InstructGPT, 2203.02155, eq. 1; with margins Llama 2, 2307.09288, eq. 2).

    `chosen`, `rejected` and `margin` are [pairs]; a pair without a margin has margin 0.
    """
    return -F.logsigmoid(chosen - rejected - margin)


def logexp(chosen: Tensor, rejected: Tensor, margin: Tensor) -> Tensor:
    """log(1 + exp(r_l - r_w)) of each pair, for any margin (2204.05862, section 3.1). Arguments as for `bradley_terry`."""
    return F.softplus(rejected - chosen)


PAIR_LOSSES: dict[str, Callable[[Tensor, Tensor, Tensor], Tensor]] = {"sigmoid": bradley_terry, "logexp": logexp}


def pair_loss(name: str, chosen: Tensor, rejected: Tensor, margin: Tensor, center: float = 0.0) -> Tensor:
    """The loss `name` of PAIR_LOSSES, [pairs], plus `center` * (r_w + r_l)^2 to keep scores around 0 (2312.09244, section 2).
    Raises ConfigError for another name."""
    if name not in PAIR_LOSSES:
        raise ConfigError(f"There is no loss of pairs {name!r}; there are {', '.join(PAIR_LOSSES)}.")
    return PAIR_LOSSES[name](chosen, rejected, margin) + center * (chosen + rejected) ** 2


def calibration_error(logits: Tensor, correct: Tensor, num_bins: int = 10) -> float:
    """Expected calibration error: the mean distance of confidence and accuracy over equal bins of confidence, weighted by
    their size (1706.04599, eq. 3).

    `logits` [n] are log-odds of a prediction, with a confidence sigmoid(|logit|) of at least 0.5; `correct` [n] is 1 if the
    prediction holds, 0.5 for a tie. NaN without predictions.
    """
    confidence, correct = torch.sigmoid(logits.double().abs()), correct.double()
    bins = ((confidence - 0.5) * 2 * num_bins).long().clamp(max=num_bins - 1)
    gaps = [(confidence[bins == b].sum() - correct[bins == b].sum()).abs() for b in range(num_bins)]
    return float(torch.stack(gaps).sum() / len(confidence)) if len(confidence) else float("nan")


def correlation(x: Tensor, y: Tensor) -> float:
    """Pearson's correlation of two samples [n]; NaN if one of them does not vary."""
    x, y = (values.double() - values.double().mean() for values in (x, y))
    return float((x * y).sum() / (x.norm() * y.norm()))


def pair_measures(
    chosen: Tensor, rejected: Tensor, chosen_lengths: Tensor, rejected_lengths: Tensor
) -> dict[str, float]:
    """Measures of a reward model on held-out pairs; all arguments are [pairs], lengths in tokens of the completion.

    accuracy: share of pairs whose chosen completion scores higher, half for a tie; accuracy_chosen_{longer,shorter}: the same
    of the pairs whose chosen completion is longer or shorter, NaN without such pairs; margin: mean of r_w - r_l;
    calibration_error: of sigmoid(r_w - r_l) as a probability; length_correlation: of score and length over all completions;
    {mean,min,max}_reward.
    """
    margins, longer = (chosen - rejected).double(), chosen_lengths - rejected_lengths
    correct = (margins.sign() + 1) / 2
    scores, lengths = torch.cat([chosen, rejected]), torch.cat([chosen_lengths, rejected_lengths])
    return {
        "accuracy": float(correct.mean()),
        "accuracy_chosen_longer": float(correct[longer > 0].mean()),
        "accuracy_chosen_shorter": float(correct[longer < 0].mean()),
        "margin": float(margins.mean()),
        "calibration_error": calibration_error(margins, correct),
        "length_correlation": correlation(scores, lengths),
        **spread(scores),
    }


def spread(scores: Tensor) -> dict[str, float]:
    """{mean,min,max}_reward of scores [n]."""
    return {f"{name}_reward": float(getattr(scores.double(), name)()) for name in ("mean", "min", "max")}
