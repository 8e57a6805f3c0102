"""The function is called once with lists over all samples that are collected together.

For scorers that compare samples or call a model with a batch. One call has the time limit of one sample, and what
goes wrong in it costs all its samples: they share their fate in one call.
"""

from __future__ import annotations

from typing import ClassVar

from verl.data_proto.samples import Score, ScoreRequest
from verl.rewards.managers.naive import NaiveRewardManager


class BatchRewardManager(NaiveRewardManager):
    batched: ClassVar[bool] = True

    def _send(self, request: ScoreRequest) -> None:
        """Nothing yet: the batch is complete when it is collected."""

    def _receive(self, requests: list[ScoreRequest]) -> list[Score]:
        return self.pool.score_all(requests)
