"""KL estimators on sampled tokens, the KL term of the reward, and controllers of its weight."""

from collections.abc import Callable

import torch
from torch import Tensor

from verl.algorithms.masked import masked_mean
from verl.errors import ConfigError, nearest


def _k2(d: Tensor) -> Tensor:
    return 0.5 * d.square()


def _k3(d: Tensor) -> Tensor:
    d = d.clamp(-20.0, 20.0)
    return ((-d).exp() + d - 1).clamp(-10.0, 10.0)


KL_ESTIMATORS: dict[str, Callable[[Tensor], Tensor]] = {
    "kl": lambda d: d,
    "k1": lambda d: d,
    "abs": torch.abs,
    "mse": _k2,
    "k2": _k2,
    "low_var_kl": _k3,
    "k3": _k3,
}


def kl_penalty(logprob: Tensor, ref_logprob: Tensor, kl_penalty: str) -> Tensor:
    """Estimate KL(policy || reference) token by token, d = logprob - ref_logprob [batch, response].

    kl, k1: d.  abs: |d|.  mse, k2: d^2 / 2.  low_var_kl, k3: exp(-d) + d - 1, with d within 20 and the result within
    10. A '+' after the name keeps that value and takes the gradient of k2: its expectation is the gradient of the KL. Source:
    Schulman, "Approximating KL divergence" (2020). Raises ConfigError on another name; `full` needs complete distributions, and
    those are never kept.
    """
    name = kl_penalty.removesuffix("+")
    if name not in KL_ESTIMATORS:
        hint = nearest(name, KL_ESTIMATORS) or "; there are " + ", ".join(KL_ESTIMATORS) + ", each also with a '+'"
        raise ConfigError(f"There is no KL estimator {kl_penalty!r}{hint}")
    d = logprob - ref_logprob
    value = KL_ESTIMATORS[name](d)
    if not kl_penalty.endswith("+"):
        return value
    surrogate = _k2(d)
    return surrogate - surrogate.detach() + value.detach()


class FixedKLController:
    """A constant weight of the KL term."""

    def __init__(self, kl_coef: float):
        self.value = float(kl_coef)

    def update(self, current_kl: float, n_steps: int) -> None:
        """Do nothing."""

    def state_dict(self) -> dict[str, float]:
        return {"value": self.value}

    def load_state_dict(self, state: dict[str, float]) -> None:
        """Keep the configured weight, so that a resumed run can change it."""


class AdaptiveKLController:
    """beta *= 1 + clip(kl / target - 1, -0.2, 0.2) n_steps / horizon (Ziegler et al., 1909.08593, section 2.2)."""

    def __init__(self, init_kl_coef: float, target_kl: float, horizon: float):
        if target_kl <= 0 or horizon <= 0:
            raise ConfigError(f"algorithm.kl_ctrl.target_kl={target_kl} and .horizon={horizon} must both be positive.")
        self.value = float(init_kl_coef)
        self.target = float(target_kl)
        self.horizon = float(horizon)

    def update(self, current_kl: float, n_steps: int) -> None:
        """`current_kl` in nats per token, `n_steps` the number of samples it was measured on."""
        error = min(max(float(current_kl) / self.target - 1, -0.2), 0.2)
        self.value *= 1 + error * n_steps / self.horizon

    def state_dict(self) -> dict[str, float]:
        return {"value": self.value}

    def load_state_dict(self, state: dict[str, float]) -> None:
        self.value = float(state["value"])


KLController = FixedKLController | AdaptiveKLController


def make_kl_controller(
    type: str = "fixed", kl_coef: float = 0.001, target_kl: float = 0.1, horizon: float = 10000
) -> KLController:
    """The controller of `algorithm.kl_ctrl`. Raises ConfigError on a type other than fixed and adaptive."""
    if type == "fixed":
        return FixedKLController(kl_coef)
    if type == "adaptive":
        return AdaptiveKLController(kl_coef, target_kl, horizon)
    raise ConfigError(f"There is no algorithm.kl_ctrl.type {type!r}; there are fixed, adaptive.")


@torch.no_grad()
def apply_kl_penalty(
    token_level_scores: Tensor,
    old_log_probs: Tensor,
    ref_log_prob: Tensor,
    response_mask: Tensor,
    *,
    beta: float,
    kind: str = "kl",
) -> tuple[Tensor, Tensor]:
    """(token_level_rewards [batch, response], mean KL): score_t - beta KL_t on trained tokens.

    The mean, a 0-d tensor for the controller, is taken over each row's tokens, then over the rows that have any.
    """
    kl = torch.where(response_mask.bool(), kl_penalty(old_log_probs, ref_log_prob, kind), 0.0)
    rows = masked_mean(kl, response_mask, -1)
    return token_level_scores - beta * kl, masked_mean(rows, response_mask.bool().any(-1))
