"""Metrics of batches: `verl.trainer.ppo.metric_utils`, `verl.utils.metric`, `verl.utils.debug.metrics`,
`verl.utils.flops_counter`."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from enum import Enum
from typing import TYPE_CHECKING, Any

import numpy as np
import torch

from verl.algorithms.validation_metrics import NUM_DRAWS, SEED, Metrics, metrics_per_source
from verl.data_proto.batch_metrics import data_metrics, span_tokens
from verl.data_proto.metrics import Metric, metric_values
from verl.data_proto.proto import DataProto
from verl.models.shapes import ModelShape
from verl.parallel.device import named_peak_flops
from verl.tracking.timeline import span_metrics, throughput

if TYPE_CHECKING:
    from transformers import PreTrainedConfig


def reduce_metrics(metrics: dict[str, object]) -> dict[str, Any]:
    """Replace each list by one number, in place, and return the dict: the maximum for names with "max", the minimum for
    names with "min", else the mean. A Metric gives its value."""
    for name, values in metrics.items():
        if isinstance(values, Metric):
            metrics[name] = values.value
        elif isinstance(values, MetricValues):
            metrics[name] = values.aggregate()
        else:
            reduce: Any = np.max if "max" in name else np.min if "min" in name else np.mean
            metrics[name] = reduce(values)
    return metrics


class AggregationType(Enum):
    """Ways to make one number of several."""

    MEAN = "mean"
    SUM = "sum"
    MIN = "min"
    MAX = "max"


class MetricValues:
    """Numbers of one quantity and their aggregation, `verl.utils.metric.Metric`. Raises ValueError for a value that is not one
    number, and for metrics of another aggregation."""

    def __init__(self, aggregation: str | AggregationType, value: object = None):
        self.aggregation = AggregationType(aggregation)
        self.values: list[float] = []
        if value is not None:
            self.append(value)

    def append(self, value: object) -> None:
        """Add a number, a tensor of one element, or the numbers of a metric."""
        if isinstance(value, MetricValues):
            self.extend(value)
            return
        if isinstance(value, torch.Tensor | np.ndarray) and len(value.reshape(-1)) != 1:
            raise ValueError(f"A metric takes one number at a time, and this has {len(value.reshape(-1))}.")
        number = value.item() if hasattr(value, "item") else value
        if not isinstance(number, int | float):
            raise ValueError(f"A metric takes numbers, and this is a {type(value).__name__}.")
        self.values.append(number)

    def extend(self, values: MetricValues | Sequence[object]) -> None:
        if isinstance(values, MetricValues):
            if values.aggregation != self.aggregation:
                raise ValueError(f"Metrics of {values.aggregation.value} and {self.aggregation.value} do not join.")
            values = values.values
        for value in list(values):
            self.append(value)

    def aggregate(self) -> float:
        return float(getattr(np, self.aggregation.value)(self.values))

    @classmethod
    def aggregate_dp(cls, metric_lists: Sequence[MetricValues]) -> float:
        """One number of the metrics of data-parallel ranks: sums and means are of the ranks' mean. Raises ValueError for none,
        and for ranks with different counts of numbers."""
        if len({len(metric.values) for metric in metric_lists}) != 1:
            raise ValueError("Metrics of ranks need the same count of numbers.")
        joined = cls(metric_lists[0].aggregation)
        ranks = np.array([metric.values for metric in metric_lists])
        averages = joined.aggregation in (AggregationType.MEAN, AggregationType.SUM)
        joined.extend((ranks.mean(axis=0) if averages else ranks.ravel()).tolist())
        return joined.aggregate()

    @classmethod
    def from_dict(cls, data: Mapping[str, object], aggregation: str | AggregationType) -> dict[str, MetricValues]:
        """A metric of each value."""
        return {name: cls(aggregation, value) for name, value in data.items()}

    def init_list(self) -> MetricValues:
        """A metric of the same aggregation without numbers."""
        return MetricValues(self.aggregation)


def calculate_debug_metrics(data: DataProto) -> dict[str, float]:
    """Distance of the trainer's probabilities (`old_log_probs`) from the sampler's (`rollout_log_probs`) on the tokens of
    `response_mask`: training/rollout_probs_diff_* and training/rollout_actor_probs_pearson_corr."""
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


def compute_data_metrics(batch: DataProto, use_critic: bool = True) -> dict[str, float]:
    """See `data_metrics`; the length limits are the widths of the padded columns."""
    width = batch.batch["responses"].shape[-1]
    return data_metrics(
        batch,
        max_prompt_length=batch.batch["attention_mask"].shape[-1] - width,
        max_response_length=width,
        use_critic=use_critic,
    )


def compute_timing_metrics(batch: DataProto, timing_raw: Mapping[str, float]) -> dict[str, float]:
    return span_metrics(timing_raw, span_tokens(batch))


def compute_throughout_metrics(batch: DataProto, timing_raw: Mapping[str, float], n_gpus: int) -> dict[str, float]:
    """See `throughput`; the step's seconds are `timing_raw["step"]`. Tokens: `global_token_num` of the batch's
    meta_info, a list with a number for each row, or of its attention mask. (Scripts spell the name so.)"""
    counts = batch.meta_info.get("global_token_num")
    num_tokens = int(batch.batch["attention_mask"].sum()) if counts is None else int(sum(counts))
    return throughput(num_tokens, timing_raw["step"], n_gpus)


def compute_spec_decode_metrics(
    spec_drafts: np.ndarray,
    spec_accepts: np.ndarray,
    spec_verifies: np.ndarray,
    non_padding_mask: np.ndarray | None = None,
) -> dict[str, float]:
    """rollout/spec_accept_rate, accepted tokens per drafted one, and rollout/spec_accept_length, tokens per pass of the model.
    Each argument has one number for each row: drafted and accepted tokens, and passes that verified drafts. {} without any."""
    rows = slice(None) if non_padding_mask is None else np.asarray(non_padding_mask, dtype=bool)
    drafts, accepts, verifies = (float(np.sum(column[rows])) for column in (spec_drafts, spec_accepts, spec_verifies))
    if not drafts or not verifies:
        return {}
    return {"rollout/spec_accept_rate": accepts / drafts, "rollout/spec_accept_length": 1.0 + accepts / verifies}


def process_validation_metrics(
    data_sources: Sequence[str], sample_uids: Sequence[str], infos_dict: Mapping[str, Sequence[Any]], seed: int = SEED
) -> dict[str, dict[str, Metrics]]:
    """data source -> variable -> metric -> mean over prompts. `infos_dict` has one list per variable; lists of strings are
    not averaged, and the one named `pred` gives maj@k."""
    values = {name: list(column) for name, column in infos_dict.items() if not any(isinstance(v, str) for v in column)}
    return metrics_per_source(data_sources, sample_uids, values, infos_dict.get("pred"), seed)


def bootstrap_metric(
    data: Sequence[object],
    subset_size: int,
    reduce_fns: Sequence[Callable[[list[object]], float]],
    n_bootstrap: int = NUM_DRAWS,
    seed: int = SEED,
) -> list[tuple[float, float]]:
    """(mean, standard deviation) of each function over `n_bootstrap` random choices of `subset_size` values, with replacement.
    Raises ValueError without values."""
    choices = np.random.RandomState(seed)
    draws = [[data[i] for i in choices.choice(len(data), size=subset_size)] for _ in range(n_bootstrap)]
    values = [[reduce(draw) for draw in draws] for reduce in reduce_fns]
    return [(float(np.mean(column)), float(np.std(column))) for column in values]


def calc_maj_val(data: Sequence[Mapping[str, Any]], vote_key: str, val_key: str) -> float:
    """The value of the most frequent vote; of equally frequent ones the first in `data`."""
    winner, _ = Counter(row[vote_key] for row in data).most_common(1)[0]
    return next(row[val_key] for row in data if row[vote_key] == winner)  # type: ignore[no-any-return]


_UNITS = {"B": 1e9, "K": 1e3, "M": 1e6, "G": 1e9, "T": 1e12, "P": 1e15}


def get_device_flops(unit: str = "T", device_name: str | None = None) -> float:
    """The peak of a device (default: this machine's) in `unit` operations per second; infinite for an unknown device, so
    that its utilisation is 0."""
    if device_name is None:
        device_name = torch.cuda.get_device_name() if torch.cuda.is_available() else "CPU"
    return (named_peak_flops(device_name) or float("inf")) / _UNITS[unit]


class FlopsCounter:
    """Operations from the shapes in a transformers `config` of a decoder: forward and backward, 6 per token and active weight
    (of the experts, the routed ones; the embedding too), and 6 s^2 per layer and attention dimension for s tokens."""

    def __init__(self, config: PreTrainedConfig):
        self.config = getattr(config, "text_config", config)

    def estimate_flops(self, batch_seqlens: Sequence[int], delta_time: float, **_: object) -> tuple[float, float]:
        """(achieved, peak) in units of 10^12 operations per second, for one pass over sequences of `batch_seqlens` tokens in
        `delta_time` seconds."""
        shape = ModelShape.from_config(self.config)
        per_token, per_square = shape.flops
        per_token += 2 * shape.vocab * shape.hidden
        total = 3 * sum(per_token * length + per_square * length * length for length in batch_seqlens)
        return total / delta_time / 1e12, get_device_flops("T")
