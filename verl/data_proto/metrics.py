"""Metrics that carry their own reduction, so that micro-batches, mini-batches and ranks merge to the global value.

merged = merge_metrics([{"loss": Metric.sum(a)}, {"loss": Metric.sum(b)}])
metric_values(merged)  # {"loss": a + b}
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from typing import Any, Literal

Reduction = Literal["mean", "sum", "max", "min", "last", "at_largest"]

# A number, or anything with `.item()`: a 0-d tensor stays on its device until `.value` is asked for.
Scalar = Any


def _number(value: Scalar) -> float:
    return float(value.item() if hasattr(value, "item") else value)


@dataclass(frozen=True)
class Metric:
    """Observations of one quantity and how they combine; built with `Metric.mean`, `.sum`, `.max`, `.min`, `.last` or
    `.at_largest`.

    Nothing is computed until `.value` is read, so building and merging never wait for a device. No graph is kept alive.

    >>> Metric.mean(2.0, weight=3).merge(Metric.mean(6.0, weight=1)).value
    3.0
    """

    reduction: Reduction
    observations: tuple[tuple[Scalar, Scalar], ...]  # (value, weight), in order of arrival

    @classmethod
    def _one(cls, reduction: Reduction, value: Scalar, weight: Scalar = 1.0) -> Metric:
        return cls(reduction, ((_detached(value), _detached(weight)),))

    @classmethod
    def mean(cls, value: Scalar, weight: Scalar = 1.0) -> Metric:
        """A mean over `weight` items; merging gives the mean over all items, NaN when all weights are 0."""
        return cls._one("mean", value, weight)

    @classmethod
    def sum(cls, value: Scalar) -> Metric:
        """A part of a total."""
        return cls._one("sum", value)

    @classmethod
    def max(cls, value: Scalar) -> Metric:
        """The largest so far."""
        return cls._one("max", value)

    @classmethod
    def min(cls, value: Scalar) -> Metric:
        """The smallest so far."""
        return cls._one("min", value)

    @classmethod
    def at_largest(cls, value: Scalar, size: Scalar) -> Metric:
        """The value with the largest `size` so far."""
        return cls._one("at_largest", value, size)

    @classmethod
    def last(cls, value: Scalar) -> Metric:
        """A setting; merging keeps the newest."""
        return cls._one("last", value)

    def merge(self, other: Metric) -> Metric:
        """Both sets of observations, `other` being the newer. Raises ValueError when the reductions differ."""
        if other.reduction != self.reduction:
            raise ValueError(f"A {self.reduction} metric cannot be merged with a {other.reduction} metric.")
        observations = other.observations if self.reduction == "last" else self.observations + other.observations
        return Metric(self.reduction, observations)

    @property
    def is_empty(self) -> bool:
        """Whether it is a mean over no items."""
        return self.reduction == "mean" and not any(_number(weight) for _, weight in self.observations)

    def of_step(self, is_count: bool) -> Metric:
        """The value as one of several steps'."""
        return self._one(
            self.reduction if self.reduction in ("max", "min") else "sum" if is_count else "mean", self.value
        )

    @property
    def value(self) -> float:
        """The reduced value; the only place that waits for a device."""
        values = [_number(v) for v, _ in self.observations]
        if self.reduction == "sum":
            return float(sum(values))
        if self.reduction == "last":
            return values[-1]
        if self.reduction in ("max", "min"):
            # Python's max() skips or keeps NaN by position; a NaN must not depend on the order of micro-batches
            broken = [v for v in values if v != v]
            return broken[0] if broken else (max(values) if self.reduction == "max" else min(values))
        weights = [_number(w) for _, w in self.observations]
        if self.reduction == "at_largest":
            return values[weights.index(max(weights))]
        total = sum(weights)
        if total == 0:
            return float("nan")
        # an empty micro-batch has weight 0 and often value NaN (0/0): it counts for nothing
        return float(sum(v * w for v, w in zip(values, weights, strict=True) if w != 0)) / total


def _detached(value: Scalar) -> Scalar:
    return value.detach() if hasattr(value, "detach") else value


def merge_metrics(parts: Iterable[Mapping[str, Metric]]) -> dict[str, Metric]:
    """Merge the metrics of micro-batches or ranks, in order; a name that some lack is merged from the parts that have it.

    Raises ValueError naming the metric when two parts reduce it differently.
    """
    merged: dict[str, Metric] = {}
    for part in parts:
        for name, metric in part.items():
            try:
                merged[name] = merged[name].merge(metric) if name in merged else metric
            except ValueError as error:
                raise ValueError(f"Metric {name!r}: {error}") from error
    return merged


def metric_values(metrics: Mapping[str, Metric]) -> dict[str, float]:
    """Plain values, ready to be logged."""
    return {name: metric.value for name, metric in metrics.items()}
