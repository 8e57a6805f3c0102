"""Metrics of batches as recipes compute them: `reduce_metrics`, `calculate_debug_metrics`, lengths of responses."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import numpy as np

from verl.data_proto.metrics import Metric, metric_values

if TYPE_CHECKING:
    from verl.data_proto.proto import DataProto


def reduce_metrics(metrics: dict[str, Any]) -> dict[str, Any]:
    """Replace each list by one number, in place, and return the dict: the maximum for names with "max", the minimum for
    names with "min", else the mean. A Metric gives its value."""
    for name, values in metrics.items():
        if isinstance(values, Metric):
            metrics[name] = values.value
        else:
            reduce: Any = np.max if "max" in name else np.min if "min" in name else np.mean
            metrics[name] = reduce(values)
    return metrics


def calculate_debug_metrics(data: DataProto) -> dict[str, float]:
    """training/rollout_probs_diff_{valid,max,mean,std} and training/rollout_actor_probs_pearson_corr: how far the trainer's
    probabilities (`old_log_probs`) are from the sampler's (`rollout_log_probs`) on the tokens of `response_mask`, or else of
    the response part of `attention_mask`."""
    from verl.algorithms.correction import rollout_gap_metrics

    columns = data.batch
    width = columns["responses"].shape[1]
    mask = columns["response_mask" if "response_mask" in columns.keys() else "attention_mask"][:, -width:]
    return metric_values(rollout_gap_metrics(columns["old_log_probs"], columns["rollout_log_probs"], mask))


def compute_response_info(batch: DataProto) -> dict[str, Any]:
    """`response_mask` [batch, response] of the attention mask, and `prompt_length` and `response_length` in tokens, float
    [batch]."""
    attention = batch.batch["attention_mask"]
    width = batch.batch["responses"].shape[-1]
    return {
        "response_mask": attention[:, -width:],
        "prompt_length": attention[:, :-width].sum(-1).float(),
        "response_length": attention[:, -width:].sum(-1).float(),
    }
