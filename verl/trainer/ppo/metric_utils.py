"""Door: the metric functions that recipes import; they live in verl.tracking."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from verl.compat.metrics import compute_response_info as _compute_response_info
from verl.compat.metrics import reduce_metrics
from verl.data_proto.proto import DataProto
from verl.tracking.batch_metrics import data_metrics, throughput_metrics, timing_metrics
from verl.tracking.validation import SEED, Metrics, metrics_per_source

__all__ = [
    "_compute_response_info",
    "compute_data_metrics",
    "compute_throughout_metrics",
    "compute_timing_metrics",
    "process_validation_metrics",
    "reduce_metrics",
]


def compute_data_metrics(batch: DataProto, use_critic: bool = True) -> dict[str, float]:
    """See `data_metrics`; the limits are the widths of the padded columns."""
    width = batch.batch["responses"].shape[-1]
    return data_metrics(
        batch,
        max_prompt_length=batch.batch["attention_mask"].shape[-1] - width,
        max_response_length=width,
        use_critic=use_critic,
    )


def compute_timing_metrics(batch: DataProto, timing_raw: Mapping[str, float]) -> dict[str, float]:
    """See `timing_metrics`."""
    return timing_metrics(batch, timing_raw)


def compute_throughout_metrics(batch: DataProto, timing_raw: Mapping[str, float], n_gpus: int) -> dict[str, float]:
    """See `throughput_metrics`; the step's seconds are `timing_raw["step"]`. (The name is spelt as recipes spell it.)"""
    return throughput_metrics(batch, timing_raw["step"], n_gpus)


def process_validation_metrics(
    data_sources: Sequence[str], sample_uids: Sequence[str], infos_dict: Mapping[str, Sequence[Any]], seed: int = SEED
) -> dict[str, dict[str, Metrics]]:
    """data source -> variable -> metric -> mean over prompts. `infos_dict` has one list per variable; lists of text are
    not averaged, and the one named `pred` gives maj@k."""
    values = {name: list(column) for name, column in infos_dict.items() if not any(isinstance(v, str) for v in column)}
    return metrics_per_source(data_sources, sample_uids, values, infos_dict.get("pred"), seed)
