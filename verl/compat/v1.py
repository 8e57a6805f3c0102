"""Metrics and advantages of the trainer's newer form: `verl.trainer.ppo.v1.utils`."""

from collections.abc import Mapping, Sequence
from typing import Any, TypeAlias

import torch

from verl.compat.batches import compute_advantage, compute_response_mask
from verl.data_proto.proto import DataProto

DAPO_FILTERED_REWARD_COUNTS_KEY = "training/filter_groups/filtered_reward_counts"
Value: TypeAlias = Any  # of a metric: a number, or counts by key
_LAST = ("training/global_step", "training/epoch", "_valid")
_SUMS = ("timing_s/", "/sum", "total", "evicted_samples", "discarded_surplus_samples")
_EVICTED = "training/off_policy/evicted_samples"


class MetricsAggregator:
    """One value of each metric for a step of several updates: sums of times, counts and totals, maxima, minima, the last of a
    counter or flag, and else means weighted by the samples of each update."""

    def __init__(self) -> None:
        self.reset()

    def reset(self) -> None:
        self.step_count = 0
        self._values: dict[str, list[tuple[Value, float]]] = {}

    def add_step_metrics(self, metrics: Mapping[str, Value], sample_count: float = 1) -> None:
        """Metrics of an update with `sample_count` samples. Only numbers, tensors of one number and counts by reward count."""
        self.step_count += 1
        for name, value in metrics.items():
            if isinstance(value, torch.Tensor):
                value = value.item() if value.numel() == 1 else None
            is_number = isinstance(value, (int, float)) or hasattr(value, "dtype")
            if isinstance(value, dict) or (is_number and not isinstance(value, bool)):
                weight = metrics.get(_EVICTED, sample_count) if name.startswith(f"{_EVICTED}_") else sample_count
                self._values.setdefault(name, []).append((value, float(weight)))

    def get_aggregated_metrics(self) -> dict[str, Value]:
        metrics = {name: _aggregated(name, pairs) for name, pairs in self._values.items()}
        longest, shortest = metrics.get("global_seqlen/max"), metrics.get("global_seqlen/min")
        if "global_seqlen/minmax_diff" in metrics and longest is not None and shortest is not None:
            metrics["global_seqlen/minmax_diff"] = longest - shortest
        return metrics


def _aggregated(name: str, pairs: Sequence[tuple[Value, float]]) -> Value:
    values = [value for value, _ in pairs]
    if isinstance(values[0], dict):
        return {
            key: sum(counts.get(key, 0) for counts in values) for key in {key: None for row in values for key in row}
        }
    if any(name.endswith(end) for end in _LAST):
        return values[-1]
    if any(part in name for part in _SUMS) and not name.endswith("/mean"):
        return sum(values)
    if "max" in name or "min" in name.rpartition("/")[2]:
        return (max if "max" in name else min)(values)
    total = sum(weight for _, weight in pairs)
    return sum(value * weight for value, weight in pairs) / total if total else values[-1]


def compute_advantage_for_multi_trajectories(
    data: DataProto, batch_keys: Sequence[str], **settings: Value
) -> DataProto:
    """The columns `advantages` and `returns` for samples of several rows. A key is "prompt_sample_row"; the last row of a
    sample has its reward, and the sample's first advantage is that of each trained token of its rows. `settings`: see
    `compute_advantage`, whose groups are equal values of `uid`."""
    samples: dict[str, list[int]] = {}
    for row, key in enumerate(batch_keys):
        samples.setdefault(key.rpartition("_")[0], []).append(row)
    last = [max(rows, key=lambda row: int(batch_keys[row].rpartition("_")[2])) for rows in samples.values()]
    credited = compute_advantage(data.select_idxs(last), **settings).batch
    if len(last) == len(data):  # one row a sample
        order = torch.tensor(last).argsort()
        data.batch["advantages"], data.batch["returns"] = credited["advantages"][order], credited["returns"][order]
        return data
    mask = data.batch["response_mask"] if "response_mask" in data.batch.keys() else compute_response_mask(data)
    for name in ("advantages", "returns"):
        column = torch.zeros(mask.shape, dtype=credited[name].dtype)
        for rows, values, valid in zip(samples.values(), credited[name], credited["response_mask"], strict=True):
            first = values[valid.bool()][:1]
            column[rows] = (first if len(first) else values[:1]) * mask[rows]
        data.batch[name] = column
    return data
