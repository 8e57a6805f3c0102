"""Import path of verl.compat.roles."""

from verl.compat.roles import Role, WorkerType, need_critic, need_reference_policy, need_reward_model

__all__ = ["Role", "WorkerType", "need_critic", "need_reference_policy", "need_reward_model"]
