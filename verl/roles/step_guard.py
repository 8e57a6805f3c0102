"""Checks of a step's columns, and of an optimizer step before it is taken. They refuse wrong values, and name the samples."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace

import torch
from tensordict import TensorDict

from verl.algorithms.monitors import (
    GRAD_NORM,
    MONITORS,
    NONFINITE,
    NUM_NAMED,
    breaks,
    first_nonfinite,
    limits_of,
    monitor_metric,
    monitor_rows,
    monitor_tokens,
    nonfinite_rows,
    worst_rows,
)
from verl.config import StepGuardsConfig
from verl.data_proto.metrics import Metric
from verl.parallel.serialize import record

_PREFIX = "guard/"


@record
@dataclass
class Finding:
    """A guard that columns or an optimizer step have set off. `samples` are (prompt index, sample index, value), worst first,
    of `num_samples`. Where no single sample shows the cause, they are all samples that train, and `located` is False."""

    guard: str
    what: str
    value: float
    limit: float | None
    mini_batch: int
    num_rows: int
    refused: bool
    samples: list[tuple[int, int, float]]
    num_samples: int
    located: bool = True

    def merge(self, others: Sequence[Finding]) -> Finding:
        """Merge the same finding of all ranks, each with its own samples."""
        parts = [self, *others]
        located = [part for part in parts if part.located and part.samples] or parts
        lowest = self.guard in MONITORS and MONITORS[self.guard].lowest
        named = sorted((s for part in located for s in part.samples), key=lambda s: s[2] if lowest else -s[2])
        return replace(
            self,
            num_rows=sum(part.num_rows for part in parts),
            samples=named[:NUM_NAMED],
            num_samples=sum(part.num_samples for part in located),
        )


def merge_findings(of_ranks: Sequence[Sequence[Finding]]) -> list[Finding]:
    """Merge the findings of all ranks, which decide alike and know different samples."""
    groups: dict[tuple[int, str, str], list[Finding]] = {}
    for findings in of_ranks:
        for finding in findings:
            groups.setdefault((finding.mini_batch, finding.guard, finding.what), []).append(finding)
    return [parts[0].merge(parts[1:]) for parts in groups.values()]


@dataclass(frozen=True)
class _MicroBatch:
    """A micro-batch: names of its rows, model outputs, and token values of the signs."""

    names: torch.Tensor | None  # [batch, 2] ordinal and number of the sample
    mask: torch.Tensor
    outputs: dict[str, torch.Tensor]
    signs: dict[str, torch.Tensor]


class StepGuard:
    """The StepCheck of one role. An objective calls `observe` with every micro-batch; the role calls `start_mini_batch` before
    a mini-batch and `pop_findings` at the end of its update."""

    def __init__(self, config: StepGuardsConfig):
        self.limits = limits_of(config)
        self.refusing = {NONFINITE, *(name for name in self.limits if config[name].action != "warn")}
        # inputs that `observe` needs
        self.inputs = {i for name in self.limits if name in MONITORS for i in MONITORS[name].inputs}
        self._num_refused = 0  # mini-batches since the last `pop_findings`
        self._mini_batch, self._num_rows = 0, 0
        self._micro_batches: list[_MicroBatch] = []
        self._findings: list[Finding] = []

    @property
    def names(self) -> Mapping[str, str]:
        return {"loss": "sum", **{_PREFIX + name: MONITORS[name].over for name in self.limits if name in MONITORS}}

    def start_mini_batch(self, mini_batch: int, num_rows: int) -> None:
        """Optimizer step `mini_batch` of a call comes next, on `num_rows` rows of this rank."""
        self._mini_batch, self._num_rows = mini_batch, num_rows
        self._micro_batches = []

    def observe(
        self,
        columns: TensorDict,
        mask: torch.Tensor,
        outputs: dict[str, torch.Tensor],
        inputs: Mapping[str, torch.Tensor | None],
    ) -> dict[str, Metric]:
        """Record a micro-batch: `outputs` [batch, response] of the model, and the `inputs` of the signs (see
        verl/algorithms/monitors.py). Returns the metrics of the signs that have a limit. Nothing here waits for a device."""
        tensors = {name: tensor.detach() for name, tensor in inputs.items() if tensor is not None}
        if self._mini_batch:
            tensors.pop("sampler", None)  # the policy has moved since it sampled
        signs = monitor_tokens(self.limits, tensors)
        outputs = {name: tensor.detach() for name, tensor in outputs.items()}
        self._micro_batches.append(_MicroBatch(_names(columns), mask, outputs, signs))
        return {_PREFIX + name: monitor_metric(name, values, mask) for name, values in signs.items()}

    def check_finite(self, columns: TensorDict, names: Sequence[str]) -> bool:
        """Whether all columns of `names` are finite; else the first other one is a finding, and the rest follows from it."""
        for name in names:
            if name in columns.keys():
                # a score lies on a token that need not train
                everywhere, mask = name == "token_level_scores", columns["response_mask"]
                outputs = {name: columns[name].detach()}
                part = _MicroBatch(_names(columns), torch.ones_like(mask) if everywhere else mask, outputs, {})
                samples, count = _nonfinite_samples([part])
                if samples:
                    self._findings.append(self._finding(NONFINITE, name, samples[0][2], None, samples, count))
                    return False
        return True

    def __call__(self, figures: Mapping[str, float]) -> bool:
        findings = self._nonfinite(figures) or [
            self._finding(name, name, value, limit, *self._beyond(name, limit))
            for name, limit in self.limits.items()
            if (value := figures.get(name if name == GRAD_NORM else _PREFIX + name)) is not None
            and breaks(name, value, limit)
        ]
        self._findings += findings
        refused = any(finding.refused for finding in findings)
        self._num_refused += refused
        self._micro_batches = []
        return not refused

    def refused_all(self, num_mini_batches: int) -> bool:
        """Whether none of the mini-batches of this call has trained."""
        return 0 < num_mini_batches == self._num_refused

    def pop_findings(self) -> list[Finding]:
        """Findings since the last call."""
        findings, self._findings, self._num_refused = self._findings, [], 0
        return findings

    def _nonfinite(self, figures: Mapping[str, float]) -> list[Finding]:
        """The first of loss and gradient norm that is not finite; the other then follows from it."""
        for name in ("loss", GRAD_NORM):
            value = figures.get(name, 0.0)
            if not torch.isfinite(torch.tensor(value)):
                samples, count = _nonfinite_samples(self._micro_batches)
                finding = self._finding(NONFINITE, name, value, None, samples, count)
                return [finding if samples else self._not_located(finding)]
        return []

    def _not_located(self, finding: Finding) -> Finding:
        """The finding with all samples that train, since every output is finite; a user's loss may not be."""
        trained = [
            (part, row) for part in self._micro_batches for row in part.mask.any(-1).nonzero().flatten().tolist()
        ]
        named = [(*_name(*place), finding.value) for place in trained[:NUM_NAMED]]
        return replace(finding, samples=named, num_samples=len(trained), located=False)

    def _finding(
        self,
        guard: str,
        what: str,
        value: float,
        limit: float | None,
        samples: list[tuple[int, int, float]],
        count: int,
    ) -> Finding:
        return Finding(
            guard, what, value, limit, self._mini_batch, self._num_rows, guard in self.refusing, samples, count
        )  # fmt: skip

    def _beyond(self, name: str, limit: float) -> tuple[list[tuple[int, int, float]], int]:
        """Samples whose own value is beyond the limit, worst first."""
        parts = [
            (part, monitor_rows(name, part.signs[name], part.mask))
            for part in self._micro_batches
            if name in part.signs
        ]
        if not parts:
            return [], 0
        owners = [(part, row) for part, rows in parts for row in range(len(rows))]
        figures = torch.cat([rows.cpu() for _, rows in parts])
        chosen, count = worst_rows(name, figures, limit)
        return [(*_name(*owners[i]), float(figures[i])) for i in chosen], count


def _name(part: _MicroBatch, row: int) -> tuple[int, int]:
    if part.names is None:
        return -1, row
    ordinal, sample = part.names[row].tolist()
    return ordinal, sample


def _nonfinite_samples(parts: Sequence[_MicroBatch]) -> tuple[list[tuple[int, int, float]], int]:
    samples: list[tuple[int, int, float]] = []
    for part in parts:
        bad = torch.zeros(len(part.mask), dtype=torch.bool, device=part.mask.device)
        values: dict[int, float] = {}
        for output in part.outputs.values():
            rows = nonfinite_rows(output, part.mask)
            bad |= rows
            for row in rows.nonzero().flatten().tolist():
                values.setdefault(row, first_nonfinite(output[row], part.mask[row]))
        samples += [(*_name(part, row), values[row]) for row in bad.nonzero().flatten().tolist()]
    return samples[:NUM_NAMED], len(samples)


def _names(columns: TensorDict) -> torch.Tensor | None:
    """[batch, 2]: prompt index and number of the sample of each row, where both are known."""
    names = [columns.get(name, None) for name in ("ordinal", "sample_index")]
    return None if any(name is None for name in names) else torch.stack(names, dim=1)


def names_of_rows(columns: TensorDict) -> list[tuple[int, int]]:
    """(prompt index, number of the sample) of each row, as findings have them."""
    part = _MicroBatch(_names(columns), columns["response_mask"], {}, {})
    return [_name(part, row) for row in range(len(part.mask))]
