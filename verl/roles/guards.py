"""Guards of a step with wrong values: warn, skip the batch, go back to the newest checkpoint, or stop the run.

A StepGuard finds values beyond a limit: in the columns of a batch before any weight changes, and in the micro-batches of an
optimizer step, inside the engines and on all ranks alike. Guards judge both. Decisions follow from columns and metrics that
every process running the program has, so all of them decide the same.

Each alarm is written to guards.jsonl in the run folder, with the samples:

    {"step": 12, "guard": "nonfinite", "what": "token_level_scores", "value": "nan", "action": "skip", "done": "skip",
     "samples": [{"uid": "93", "ordinal": 93, "sample": 2, "score": "nan", "value": "nan"}], "num_samples": 1, ...}

`action` is the configured action of this guard, `done` the action that was taken.
"""

from __future__ import annotations

import logging
import math
import time
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch
from tensordict import TensorDict

from verl.algorithms import monitors
from verl.algorithms.monitors import GRAD_NORM, MONITORS, NONFINITE, NUM_NAMED
from verl.config import StepGuardsConfig, full_key
from verl.config.sections.trainer import ACTIONS
from verl.data_proto.batch_metrics import any_true, scored_rows
from verl.data_proto.metrics import Metric
from verl.data_proto.proto import DataProto
from verl.data_proto.stored_column import is_finite
from verl.errors import NumericsError
from verl.parallel.serialize import record
from verl.tracking.files import append_rows

if TYPE_CHECKING:
    from verl.roles.updates import Updates

log = logging.getLogger(__name__)

Named = list[tuple[int, int, float]]  # (prompt index, sample index, value)

_NAMES = ("ordinal", "sample_index")
_PREFIX = "guard/"
_OF_SAMPLES = (
    "token_level_scores", "rollout_log_probs", "old_log_probs", "entropys", "ref_log_prob", "values", "teacher_log_prob",
)  # fmt: skip
_OF_CREDIT = ("token_level_rewards", "advantages", "returns", "rollout_is_weights")
_INPUTS = {
    "log_prob": "old_log_probs", "reference": "ref_log_prob", "sampler": "rollout_log_probs", "entropy": "entropys",
}  # fmt: skip


@record
@dataclass
class Finding:
    """A guard that columns or an optimizer step have set off. `samples` are the worst of `num_samples`. If no single sample
    shows the cause, they are all samples that train, and `located` is False."""

    guard: str
    what: str
    value: float
    limit: float | None
    mini_batch: int
    num_rows: int
    refused: bool
    samples: Named
    num_samples: int
    located: bool = True

    def merge(self, more: Sequence[Finding]) -> Finding:
        """Merge the same finding of all ranks, each with its own samples."""
        parts = [self, *more]
        located = [part for part in parts if part.located and part.samples] or parts
        lowest = self.guard in MONITORS and MONITORS[self.guard].lowest
        named = sorted((s for part in located for s in part.samples), key=lambda s: s[2] if lowest else -s[2])
        return replace(
            self,
            num_rows=sum(part.num_rows for part in parts),
            samples=named[:NUM_NAMED],
            num_samples=sum(part.num_samples for part in located),
        )


def merge_findings(by_rank: Sequence[Sequence[Finding]]) -> list[Finding]:
    """Merge the findings of all ranks. Ranks decide alike and know different samples."""
    groups: dict[tuple[int, str, str], list[Finding]] = {}
    for findings in by_rank:
        for finding in findings:
            groups.setdefault((finding.mini_batch, finding.guard, finding.what), []).append(finding)
    return [parts[0].merge(parts[1:]) for parts in groups.values()]


@dataclass(frozen=True)
class _Part:
    """Rows of a batch, or a micro-batch: model outputs, and token values of the monitors with a limit."""

    names: TensorDict
    mask: torch.Tensor
    outputs: Mapping[str, torch.Tensor]
    signs: Mapping[str, torch.Tensor]

    def nonfinite(self) -> Iterator[tuple[int, int, float]]:
        """The rows with an output that is not finite, each with the first such value."""
        values: dict[int, float] = {}
        for output in self.outputs.values():
            for row in monitors.nonfinite_rows(output, self.mask).nonzero().flatten().tolist():
                values.setdefault(row, monitors.first_nonfinite(output[row], self.mask[row]))
        return ((*_name(self.names, row), values[row]) for row in sorted(values))


def _name(columns: TensorDict, row: int) -> tuple[int, int]:
    """(prompt index, number of the sample) of a row; (-1, row) if one is not known."""
    if not all(name in columns.keys() for name in _NAMES):
        return -1, row
    return int(columns[_NAMES[0]][row]), int(columns[_NAMES[1]][row])


class StepGuard:
    """The StepCheck of one role. An objective calls `observe` with every micro-batch; the role calls `start_mini_batch` before
    a mini-batch and `pop_findings` at the end of its update."""

    def __init__(self, config: StepGuardsConfig):
        self.limits = monitors.limits_of(config)
        self.refusing = {NONFINITE, *(name for name in self.limits if config[name].action != "warn")}
        # inputs that `observe` needs
        self.inputs = {i for name in self.limits if name in MONITORS for i in MONITORS[name].inputs}
        self._num_refused = 0  # mini-batches since the last `pop_findings`
        self._mini_batch, self._num_rows = 0, 0
        self._parts: list[_Part] = []
        self._findings: list[Finding] = []

    @property
    def names(self) -> Mapping[str, str]:
        return {"loss": "sum", **{_PREFIX + name: MONITORS[name].over for name in self.limits if name in MONITORS}}

    def start_mini_batch(self, mini_batch: int, num_rows: int) -> None:
        """Optimizer step `mini_batch` of a call comes next, on `num_rows` rows of this rank."""
        self._mini_batch, self._num_rows, self._parts = mini_batch, num_rows, []

    def observe(
        self,
        columns: TensorDict,
        mask: torch.Tensor,
        outputs: Mapping[str, torch.Tensor],
        inputs: Mapping[str, torch.Tensor | None],
    ) -> dict[str, Metric]:
        """Record a micro-batch: `outputs` [batch, response] of the model, and the `inputs` of the monitors (see
        verl/algorithms/monitors.py). Returns the metrics of the monitors that have a limit. Nothing here waits for a device."""
        tensors = {name: tensor.detach() for name, tensor in inputs.items() if tensor is not None}
        if self._mini_batch:
            tensors.pop("sampler", None)  # the policy has moved since it sampled
        signs = monitors.monitor_tokens(self.limits, tensors)
        outputs = {name: tensor.detach() for name, tensor in outputs.items()}
        self._parts.append(_Part(columns.select(*_NAMES, strict=False), mask, outputs, signs))
        return {_PREFIX + name: monitors.monitor_metric(name, values, mask) for name, values in signs.items()}

    def check_finite(self, columns: TensorDict, names: Sequence[str]) -> bool:
        """Whether all columns of `names` are finite. The first that is not is a finding, and explains later ones."""
        mask = columns["response_mask"]
        for name in (name for name in names if name in columns.keys() and not is_finite(columns[name])):
            # a score lies on a token that need not train
            where = torch.ones_like(mask) if name == "token_level_scores" else mask
            if samples := list(_Part(columns, where, {name: columns[name].detach()}, {}).nonfinite()):
                self._add(NONFINITE, name, samples[0][2], None, samples[:NUM_NAMED], len(samples))
                return False
        return True

    def __call__(self, figures: Mapping[str, float]) -> bool:
        num_before = len(self._findings)
        if not self._check_nonfinite(figures):
            for name, limit in self.limits.items():
                value = figures.get(name if name == GRAD_NORM else _PREFIX + name)
                if value is not None and monitors.breaks(name, value, limit):
                    self._add(name, name, value, limit, *self._beyond(name, limit))
        refused = any(finding.refused for finding in self._findings[num_before:])
        self._num_refused += refused
        self._parts = []
        return not refused

    def refused_all(self, num_mini_batches: int) -> bool:
        """Whether none of the mini-batches of this call has trained."""
        return 0 < num_mini_batches == self._num_refused

    def pop_findings(self) -> list[Finding]:
        """Findings since the last call."""
        findings, self._findings, self._num_refused = self._findings, [], 0
        return findings

    def _add(self, guard: str, what: str, value: float, limit: float | None, samples: Named, count: int) -> None:
        self._findings.append(
            Finding(guard, what, value, limit, self._mini_batch, self._num_rows, guard in self.refusing, samples, count)
        )

    def _check_nonfinite(self, figures: Mapping[str, float]) -> bool:
        """Whether loss or gradient norm is not finite. The first of them is a finding, and explains the second."""
        for name in ("loss", GRAD_NORM):
            value = figures.get(name, 0.0)
            if not torch.isfinite(torch.tensor(value)):  # of float32
                located = [sample for part in self._parts for sample in part.nonfinite()]
                # without one all samples that train: a user's loss may not be finite even if every output is
                samples = located or [
                    (*_name(part.names, row), value)
                    for part in self._parts
                    for row in part.mask.any(-1).nonzero().flatten().tolist()
                ]
                self._add(NONFINITE, name, value, None, samples[:NUM_NAMED], len(samples))
                self._findings[-1].located = bool(located)
                return True
        return False

    def _beyond(self, name: str, limit: float) -> tuple[Named, int]:
        """Samples with a value beyond the limit, worst first."""
        parts = [part for part in self._parts if name in part.signs]
        if not parts:
            return [], 0
        owners = [(part.names, row) for part in parts for row in range(len(part.mask))]
        figures = torch.cat([monitors.monitor_rows(name, part.signs[name], part.mask).cpu() for part in parts])
        chosen, count = monitors.worst_rows(name, figures, limit)
        return [(*_name(*owners[i]), float(figures[i])) for i in chosen], count


class SkipBatch(Exception):
    """The batch of this step must not train."""


class RollBack(Exception):
    """Raised by Program.step: the host loads the newest checkpoint, gives the exception to `load_state_dict`, and continues,
    with the prompts from `next_ordinal` on, if it is set."""

    next_ordinal: int | None = None


@dataclass
class StepBatch:
    """The rows of a step under way, with every column that was made for them, and its metrics. `skipped` is the reason why
    nothing of them has trained. `observed` are values of tokens for the samples files (`add_observed`)."""

    batch: DataProto
    metrics: dict[str, Metric] = field(default_factory=dict)
    skipped: str = ""
    observed: Sequence[torch.Tensor] = ()


class Guards:
    """The guards of a run; `file` is its guards.jsonl, or None on a process that writes nothing."""

    def __init__(self, config: StepGuardsConfig, file: Path | None = None):
        self.config = config
        self.file = file
        self.num_skips_in_row = self.num_rollbacks = 0
        self._step = 0
        self._skips = False
        self._updates: list[Updates] = []

    @contextmanager
    def step(self, step: int, result: StepBatch, next_ordinal: int) -> Iterator[None]:
        """Around a step's work on its samples. A batch that is skipped gets its reason in `result.skipped`."""
        self._step, self._skips, self._updates = step, False, []
        try:
            yield
        except SkipBatch as skipped:
            result.skipped = str(skipped)
            result.metrics["training/skipped_batches"] = Metric.last(1.0)
        except RollBack as back:
            back.next_ordinal = next_ordinal
            raise
        self.num_skips_in_row = self.num_skips_in_row + 1 if self._skips else 0

    def check_samples(self, result: StepBatch, *, needs_scores: bool = True) -> None:
        """Scores, log-probs and values. Raises SkipBatch, RollBack or NumericsError as the config says, and SkipBatch for a
        batch that `needs_scores` and has none."""
        batch, columns = result.batch, result.batch.batch
        if needs_scores and not scored_rows(batch).any():
            sentence = f"Step {self._step}: no sample of the batch could be scored"
            log.warning("%s. The batch is left out.", sentence)
            raise SkipBatch(sentence)
        mask, guard = columns["response_mask"], StepGuard(self.config)  # as on the ranks, for the full batch
        if guard.check_finite(columns, _OF_SAMPLES) and any_true(mask).any():
            inputs = {name: columns[column] for name, column in _INPUTS.items() if column in columns.keys()}
            guard({name: metric.value for name, metric in guard.observe(columns, mask, {}, inputs).items()})
        self._act(batch, [("", finding) for finding in guard.pop_findings()])

    def check_credit(self, result: StepBatch) -> None:
        """Rewards, advantages, returns and importance weights. Raises as `check_samples`."""
        guard = StepGuard(self.config)
        guard.check_finite(result.batch.batch, _OF_CREDIT)
        self._act(result.batch, [("", finding) for finding in guard.pop_findings()])

    def record(self, updates: Updates) -> Updates:
        """A training call of this step has ended."""
        self._updates.append(updates)
        return updates

    def check_updates(self, result: StepBatch) -> None:
        """Check the findings of the engines in their optimizer steps. Steps that a guard refuses were not taken. Raises as
        `check_samples`."""
        alarms = [(update.role, finding) for update in self._updates for finding in update.findings]
        refused = [{finding.mini_batch for finding in u.findings if finding.refused} for u in self._updates]
        trained = any(len(role_refused) < len(u.steps) for role_refused, u in zip(refused, self._updates, strict=True))
        self._act(result.batch, alarms, some_trained=trained)

    def _act(self, batch: DataProto, alarms: Sequence[tuple[str, Finding]], some_trained: bool = False) -> None:
        """Record all alarms, each with its role ("": the batch), and take the strongest of their actions. `some_trained`: some
        optimizer steps of the batch were taken, in addition to the refused steps."""
        if not alarms:
            return
        actions = [self.config[finding.guard].action for _, finding in alarms]
        action = max(actions, key=ACTIONS.index)
        if action == "skip" and not self._skips and self.num_skips_in_row >= self.config.max_skips_in_row:
            action, key = "stop", "max_skips_in_row"
        elif action == "rollback" and self.num_rollbacks >= self.config.max_rollbacks:
            action, key = "stop", "max_rollbacks"
        else:
            key = f"{alarms[actions.index(action)][1].guard}.action"
        rows = [_alarm(role, finding, batch) for role, finding in alarms]
        if self.file is not None:
            head = {"step": self._step, "time": round(time.time(), 3)}
            ends = [{"action": guard_action, "done": action} for guard_action in actions]
            append_rows(self.file, [head | _written(row) | end for row, end in zip(rows, ends, strict=True)])
        sentence = f"Step {self._step}: {'; '.join(map(_sentence, rows))}"
        if action == "stop":
            raise NumericsError(f"{sentence}. {self._ending(key)}")
        if action == "rollback":
            self.num_rollbacks += 1
            raise RollBack(sentence)
        if action == "warn":
            log.warning("%s.", sentence)
            return
        log.warning("%s. %s left out.", sentence, "The mini-batch is" if some_trained else "The batch is")
        self._skips = True
        if not some_trained:
            raise SkipBatch(sentence)

    def _ending(self, key: str) -> str:
        budget = self.config.get(key, None)
        why = f"trainer.guards.{key}={budget} is used up" if budget is not None else f"trainer.guards.{key} is stop"
        place = f"; {self.file} names the samples" if self.file is not None else ""
        fix = "Lower the learning rate, look at those samples, or use float32 (actor.fsdp_config.dtype=float32)"
        if key.startswith("sampler_kl"):
            fix = f"Set {full_key('rollout.quantization')}=null (and kv_cache_dtype=auto), or raise the limit"
        end = "and run the same command again to resume from the newest checkpoint."
        return f"The run stops because {why}{place}. {fix}, {end}"


def _alarm(role: str, finding: Finding, batch: DataProto) -> dict[str, object]:
    """A finding with the rows of its samples, as an entry of guards.jsonl. `place` completes "in ..."."""
    rows = {_name(batch.batch, row): row for row in range(len(batch))}
    entries = {name: getattr(finding, name) for name in ("guard", "what", "value", "limit", "num_samples")}
    samples = [_sample(batch, rows.get((o, s)), value, (o, s)) for o, s, value in finding.samples]
    place = f"mini-batch {finding.mini_batch + 1} of the {role} ({finding.num_rows} samples)" if role else "the batch"
    entries |= {"samples": samples, "place": place, "mini_batch": finding.mini_batch if role else None}
    return {name: value for name, value in entries.items() if value is not None}


def _sentence(alarm: Mapping[str, Any]) -> str:
    """ "KL to the old policy is 0.31, beyond trainer.guards.policy_kl.limit=0.1, in mini-batch 2 of the actor (prompt 7
    sample 1: 2.4)"."""
    guard, value, count = alarm["guard"], alarm["value"], alarm["num_samples"]
    if guard == NONFINITE:
        sentence = f"{alarm['what']} is not finite ({value}) in {alarm['place']}"
    else:
        limit = f"trainer.guards.{guard}.limit={alarm['limit']:g}"
        sentence = f"{monitors.MEANINGS[guard]} is {value:.4g}, beyond {limit} in {alarm['place']}"
    named = "; ".join(f"prompt {s['uid']} sample {s['sample']}: {s['value']:.4g}" for s in alarm["samples"][:3])
    return f"{sentence}, {count} sample{'s' if count != 1 else ''} ({named})" if named else sentence


def _written(value: Any) -> Any:
    """`value` with the numbers that JSON has not, NaN and infinities, as text."""
    if isinstance(value, dict):
        return {name: _written(entry) for name, entry in value.items()}
    if isinstance(value, list):
        return [_written(entry) for entry in value]
    return repr(value) if isinstance(value, float) and not math.isfinite(value) else value


def _sample(batch: DataProto, row: int | None, value: float, name: tuple[int, int]) -> dict[str, object]:
    """A row of `batch` for guards.jsonl; a sample that is not in `batch` has only its name and `value`."""
    columns, objects = batch.batch, batch.non_tensor_batch
    if row is None:
        return {"uid": str(name[0]), "ordinal": name[0], "sample": name[1], "value": value}
    scored = "token_level_scores" in columns.keys()
    return {
        "uid": str(objects["uid"][row]) if "uid" in objects else str(row),
        "ordinal": int(columns["ordinal"][row]) if "ordinal" in columns.keys() else None,
        "sample": int(columns["sample_index"][row]) if "sample_index" in columns.keys() else row,
        "score": float(columns["token_level_scores"][row].sum()) if scored else math.nan,
        "value": value,
    }
