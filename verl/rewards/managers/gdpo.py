"""Several rewards per sample, normalised one by one by the estimator `gdpo` (arXiv:2601.05242)."""

from __future__ import annotations

from verl.data_proto.samples import Score, ScoreRequest
from verl.errors import RewardError
from verl.rewards.managers.naive import NaiveRewardManager


class GdpoRewardManager(NaiveRewardManager):
    """Like naive; raises RewardError when the function returns no numbers beside its score, for then there is nothing
    to normalise apart."""

    def shape(self, request: ScoreRequest, score: Score) -> Score:
        if not any(isinstance(v, (int, float)) for k, v in score.parts.items() if k != "acc"):
            raise RewardError(
                f"The reward manager gdpo needs one number per reward, but {self.pool.function.label} returned only a "
                f"score for sample {request.key}; return a dict such as {{'score': total, 'accuracy': a, 'format': f}}."
            )
        return score
