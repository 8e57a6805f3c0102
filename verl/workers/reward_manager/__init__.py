"""Import path of reward managers: a recipe's own, and those of the older contract.

from verl.workers.reward_manager import register
from verl.rewards.managers.naive import NaiveRewardManager

@register("shorter")
class Shorter(NaiveRewardManager):
    def shape(self, request, score):
        return replace(score, score=score.score - 0.001 * request.response_length)
"""

from verl.compat.reward_managers import (
    AbstractRewardManager,
    BatchRewardManager,
    DAPORewardManager,
    NaiveRewardManager,
    get_reward_manager_cls,
    register,
)

__all__ = [
    "AbstractRewardManager",
    "BatchRewardManager",
    "DAPORewardManager",
    "NaiveRewardManager",
    "get_reward_manager_cls",
    "register",
]
