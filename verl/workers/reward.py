"""The reward role: scores arrive from the reward manager's processes while generation goes on."""

from __future__ import annotations

import numpy as np
import torch

from verl.data_proto.proto import DataProto
from verl.data_proto.samples import ScoreRequest
from verl.rewards.managers import RewardManager


class RewardWorker:
    def __init__(self, manager: RewardManager):
        self.manager = manager

    def submit(self, request: ScoreRequest) -> None:
        """Begin to score one sample; returns at once."""
        self.manager.submit(request)

    def collect(self, batch: DataProto) -> DataProto:
        """Waits (with the manager's deadline) for the scores of the rows of `batch`, which were submitted by their sample_key.

        Columns token_level_scores [batch, response] with the score on the last response token, reward_parts, reward_error.
        """
        keys = list(batch.non_tensor_batch["sample_key"])
        found = self.manager.collect(keys)
        scores = [found[k] for k in keys]
        mask = batch.batch["response_mask"]
        lengths = batch.batch["attention_mask"][:, -mask.shape[1] :].sum(dim=1)
        token_scores = torch.zeros(mask.shape, dtype=torch.float32)
        token_scores[torch.arange(len(scores)), lengths - 1] = torch.tensor(
            [s.score for s in scores], dtype=torch.float32
        )
        parts = np.empty(len(scores), dtype=object)
        errors = np.empty(len(scores), dtype=object)
        for i, score in enumerate(scores):
            parts[i], errors[i] = score.parts, score.error
        return DataProto.from_dict(
            {"token_level_scores": token_scores}, {"reward_parts": parts, "reward_error": errors}
        )

    @property
    def num_defaulted(self) -> int:
        """Samples of this run that got the default score because their scorer failed."""
        return self.manager.num_defaulted

    def close(self) -> None:
        self.manager.close()
