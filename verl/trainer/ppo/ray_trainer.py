"""Import path of the trainer that runs our program, and of functions over a batch."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from verl.compat.advantages import apply_kl_penalty, compute_advantage, compute_response_mask
from verl.compat.roles import Role, WorkerType, need_critic, need_reference_policy, need_reward_model
from verl.compat.trainer import RayPPOTrainer
from verl.trainer.ppo.core_algos import AdvantageEstimator, agg_loss

if TYPE_CHECKING:
    from verl.runtime.ray_worker_group import ResourcePoolManager

__all__ = [
    "AdvantageEstimator",
    "RayPPOTrainer",
    "ResourcePoolManager",
    "Role",
    "WorkerType",
    "agg_loss",
    "apply_kl_penalty",
    "compute_advantage",
    "compute_response_mask",
    "need_critic",
    "need_reference_policy",
    "need_reward_model",
]


def __getattr__(name: str) -> Any:
    if name == "ResourcePoolManager":  # it needs Ray, which the rest does not
        from verl.runtime.ray_worker_group import ResourcePoolManager

        return ResourcePoolManager
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
