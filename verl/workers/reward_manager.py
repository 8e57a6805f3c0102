"""The name under which scripts register a reward manager of their own.

from verl.workers.reward_manager import register
from verl.rewards.managers.naive import NaiveRewardManager

@register("shorter")
class Shorter(NaiveRewardManager):
    def shape(self, request, score):
        return replace(score, score=score.score - 0.001 * request.response_length)
"""

from verl.rewards.managers import REWARD_MANAGERS

register = REWARD_MANAGERS.register

__all__ = ["register"]
