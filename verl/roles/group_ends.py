"""Ends of the groups of a generation: the prompt whose longest sample the others wait for."""

from __future__ import annotations

import time

from verl.data_proto.metrics import Metric
from verl.data_proto.trajectory import Trajectory


class GroupEnds:
    """Seconds from the construction until the last sample of each prompt has ended."""

    def __init__(self) -> None:
        self._began = time.perf_counter()
        self._ends: dict[int, float] = {}
        self._longest: dict[int, int] = {}

    def note(self, sample: Trajectory) -> None:
        """The sample has ended."""
        self._ends[sample.ordinal] = time.perf_counter() - self._began
        self._longest[sample.ordinal] = max(self._longest.get(sample.ordinal, 0), sample.num_response_tokens)

    def metrics(self) -> dict[str, Metric]:
        """The prompt that ended last, tokens of its longest response, seconds until its end, and until nine tenths of the
        groups had ended (mean over ranks). Nothing without samples."""
        if not self._ends:
            return {}
        ends = sorted(self._ends.values())
        last, num_most = max(self._ends, key=self._ends.__getitem__), max(9 * len(ends) // 10, 1)
        return {
            "last_group/prompt": Metric.at_largest(last, ends[-1]),
            "last_group/tokens": Metric.at_largest(self._longest[last], ends[-1]),
            "last_group/ended_s": Metric.max(ends[-1]),
            "last_group/others_ended_s": Metric.mean(ends[num_most - 1], len(ends)),
        }
