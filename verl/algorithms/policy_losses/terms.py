"""Terms shared by policy losses: probability ratio, importance weights, and the declaration for zero advantages."""

from collections.abc import Callable
from typing import TypeVar

from torch import Tensor

from verl.algorithms.masked import token_mean
from verl.data_proto.metrics import Metric

F = TypeVar("F", bound=Callable[..., object])

LOG_RATIO_LIMIT = 20.0  # e**20: keeps a ratio finite in float32 and its square too
_zero_without_advantage: set[Callable[..., object]] = set()


def zero_without_advantage(loss: F) -> F:
    """Decorator: rows with only advantages of exactly 0 add exactly 0 to loss and gradient, so that they are skipped."""
    _zero_without_advantage.add(loss)
    return loss


def is_zero_without_advantage(loss: Callable[..., object]) -> bool:
    """Whether `loss` itself has the declaration; a function that wraps a declared one may add terms."""
    return loss in _zero_without_advantage


def probability_ratio(log_prob: Tensor, old_log_prob: Tensor) -> Tensor:
    """exp(clamp(log_prob - old_log_prob, -20, 20)). [batch, response]"""
    return (log_prob - old_log_prob).clamp(-LOG_RATIO_LIMIT, LOG_RATIO_LIMIT).exp()


def weighted(loss_mat: Tensor, rollout_is_weights: Tensor | None) -> Tensor:
    """The loss matrix times the importance weights of trainer over sampler, if given."""
    return loss_mat if rollout_is_weights is None else loss_mat * rollout_is_weights


def old_policy_kl(log_prob: Tensor, old_log_prob: Tensor, response_mask: Tensor) -> Metric:
    """Mean of old_log_prob - log_prob over tokens: KL(old || current), estimated on samples of the old policy."""
    return token_mean(old_log_prob - log_prob, response_mask)


def clip_metrics(acts: Tensor, log_prob: Tensor, old_log_prob: Tensor, response_mask: Tensor) -> dict[str, Metric]:
    """pg_clipfrac, the share of tokens with a clip that `acts` [batch, response], and ppo_kl."""
    kl = old_policy_kl(log_prob, old_log_prob, response_mask)
    return {"pg_clipfrac": token_mean(acts, response_mask), "ppo_kl": kl}
