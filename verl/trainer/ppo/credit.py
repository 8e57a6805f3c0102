"""Small columns between the sampler and the update: reward parts, estimator parameters, rollout correction."""

from __future__ import annotations

from typing import Any

import torch

from verl.algorithms.correction import rejection_mask, rollout_correction_metrics, rollout_gap_metrics, rollout_is_weights
from verl.config import AlgorithmConfig, RolloutCorrectionConfig
from verl.data_proto.metrics import Metric
from verl.data_proto.proto import DataProto
from verl.errors import RewardError


def advantage_params(config: AlgorithmConfig) -> dict[str, Any]:
    """What estimators may ask for beside columns."""
    return {
        "gamma": config.gamma,
        "lam": config.lam,
        "norm_adv_by_std_in_grpo": config.norm_adv_by_std_in_grpo,
        "gdpo_reward_weights": config.gdpo_reward_weights,
    }


def reward_part_columns(batch: DataProto, keys: list[str] | None) -> dict[str, torch.Tensor] | None:
    """{key: [batch]} for the parts that the estimator combines (GDPO); raises RewardError when a row lacks one."""
    if not keys:
        return None
    parts = batch.non_tensor_batch["reward_parts"]
    for row, found in enumerate(parts):
        missing = [k for k in keys if k not in found]
        if missing:
            raise RewardError(
                f"The reward function returned no {missing[0]!r} for sample {batch.non_tensor_batch['sample_key'][row]}, but "
                f"algorithm.gdpo_reward_keys asks for it; it returned {sorted(found) or 'only a score'}."
            )
    return {k: torch.tensor([float(found[k]) for found in parts]) for k in keys}
