"""Guards of a step whose values go wrong: warn, skip the batch, go back to the newest checkpoint, or stop the run.

Columns are checked before any weight changes (`check_samples`, `check_credit`). Optimizer steps are checked inside the engines,
on all ranks alike, and their findings are judged here (`check_updates`). Decisions follow from columns and metrics that every
process running the program has, so all of them decide the same. In both places a StepGuard finds the values beyond a limit.

Each alarm is written to guards.jsonl in the run folder, with the samples:

    {"step": 12, "guard": "nonfinite", "what": "token_level_scores", "value": "nan", "action": "skip", "done": "skip",
     "samples": [{"uid": "93", "ordinal": 93, "sample": 2, "score": "nan", "value": "nan"}], "num_samples": 1, ...}

`action` is the configured action of this guard, `done` the action that was taken.
"""

from __future__ import annotations

import logging
import math
import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch

from verl.algorithms.monitors import MEANINGS, NONFINITE
from verl.config import StepGuardsConfig
from verl.config.sections.guards import ACTIONS
from verl.data_proto.batch_metrics import any_true, scored_rows
from verl.data_proto.metrics import Metric
from verl.data_proto.proto import DataProto
from verl.errors import NumericsError
from verl.programs.api import RollBack
from verl.roles.step_guard import Finding, StepGuard, names_of_rows
from verl.roles.updates import Updates
from verl.tracking.files import append_rows

log = logging.getLogger(__name__)

_OF_SAMPLES = (
    "token_level_scores", "rollout_log_probs", "old_log_probs", "entropys", "ref_log_prob", "values", "teacher_log_prob",
)  # fmt: skip
_OF_CREDIT = ("token_level_rewards", "advantages", "returns", "rollout_is_weights")
_INPUTS = {
    "log_prob": "old_log_probs", "reference": "ref_log_prob", "sampler": "rollout_log_probs", "entropy": "entropys",
}  # fmt: skip


class SkipBatch(Exception):
    """The batch of this step must not train."""


class RollBackPrompts(RollBack):
    """The run goes back to its newest checkpoint and continues with the prompts from `next_ordinal` on."""

    next_ordinal = 0


@dataclass
class StepBatch:
    """The rows of a step under way, with every column that was made for them, and its metrics. `skipped` is the reason why
    nothing of them has trained. `observed` are values of tokens for the samples files (`add_observed`)."""

    batch: DataProto
    metrics: dict[str, Metric] = field(default_factory=dict)
    skipped: str = ""
    observed: Sequence[torch.Tensor] = ()


@dataclass(frozen=True)
class Alarm:
    """A finding with the rows of its samples for guards.jsonl. `place` completes "in ..."."""

    finding: Finding
    samples: list[dict[str, Any]]
    place: str
    mini_batch: int | None

    def describe(self) -> str:
        """ "KL to the old policy is 0.31, beyond trainer.guards.policy_kl.limit=0.1, in mini-batch 2 of the actor (prompt 7
        sample 1: 2.4)"."""
        guard, value, count = self.finding.guard, self.finding.value, self.finding.num_samples
        if guard == NONFINITE:
            sentence = f"{self.finding.what} is not finite ({value})"
        else:
            sentence = f"{MEANINGS[guard]} is {value:.4g}, beyond trainer.guards.{guard}.limit={self.finding.limit:g}"
        sentence += f" in {self.place}"
        named = "; ".join(f"prompt {s['uid']} sample {s['sample']}: {s['value']:.4g}" for s in self.samples[:3])
        return f"{sentence}, {count} sample{'s' if count != 1 else ''} ({named})" if named else sentence

    def row(self) -> dict[str, object]:
        """Entries of guards.jsonl. JSON has no NaN and no infinity: they are there as text."""
        facts = {name: getattr(self.finding, name) for name in ("guard", "what", "value", "limit", "num_samples")}
        facts |= {"samples": [{k: _written(v) for k, v in sample.items()} for sample in self.samples]}
        facts |= {"place": self.place, "mini_batch": self.mini_batch}
        return {name: _written(value) for name, value in facts.items() if value is not None}


class Guards:
    """The guards of a run; `file` is its guards.jsonl, or None on a process that writes nothing."""

    def __init__(self, config: StepGuardsConfig, file: Path | None = None):
        self.config = config
        self.file = file
        self.num_skips_in_row = 0
        self.num_rollbacks = 0
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
        except RollBackPrompts as back:
            back.next_ordinal = next_ordinal
            raise
        self.num_skips_in_row = self.num_skips_in_row + 1 if self._skips else 0

    def check_samples(self, result: StepBatch, *, needs_scores: bool = True) -> None:
        """Scores, log-probs and values. Raises SkipBatch, RollBackPrompts or NumericsError as the config says, and SkipBatch
        for a batch that `needs_scores` and has none."""
        batch, columns = result.batch, result.batch.batch
        if needs_scores and not scored_rows(batch).any():
            sentence = f"Step {self._step}: no sample of the batch could be scored"
            log.warning("%s. The batch is left out.", sentence)
            raise SkipBatch(sentence)
        mask, guard = columns["response_mask"], StepGuard(self.config)  # as on the ranks, for the whole batch
        if guard.check_finite(columns, _OF_SAMPLES) and any_true(mask).any():
            inputs = {name: columns[column] for name, column in _INPUTS.items() if column in columns.keys()}
            guard({name: metric.value for name, metric in guard.observe(columns, mask, {}, inputs).items()})
        self._act_on(guard, batch)

    def check_credit(self, result: StepBatch) -> None:
        """Rewards, advantages, returns and importance weights. Raises as `check_samples`."""
        guard = StepGuard(self.config)
        guard.check_finite(result.batch.batch, _OF_CREDIT)
        self._act_on(guard, result.batch)

    def record(self, updates: Updates) -> Updates:
        """A training call of this step has ended."""
        self._updates.append(updates)
        return updates

    def check_updates(self, result: StepBatch) -> None:
        """Check the findings of the engines in their optimizer steps. Steps that a guard refuses were not taken. Raises
        RollBackPrompts or NumericsError as the config says."""
        alarms = [
            _alarm(
                finding,
                result.batch,
                f"mini-batch {finding.mini_batch + 1} of the {update.role} ({finding.num_rows} samples)",
                finding.mini_batch,
            )
            for update in self._updates
            for finding in update.findings
        ]
        self._act(alarms, some_trained=any(_has_trained(update) for update in self._updates))

    def _act_on(self, guard: StepGuard, batch: DataProto) -> None:
        self._act([_alarm(finding, batch, "the batch") for finding in guard.pop_findings()])

    def _act(self, alarms: Sequence[Alarm], some_trained: bool = False) -> None:
        """Record all alarms, and take the strongest of their actions. `some_trained`: some optimizer steps of the batch were
        taken, in addition to the refused steps."""
        if not alarms:
            return
        actions = [self.config[alarm.finding.guard].action for alarm in alarms]
        action = max(actions, key=ACTIONS.index)
        if action == "skip" and not self._skips and self.num_skips_in_row >= self.config.max_skips_in_row:
            action, key = "stop", "max_skips_in_row"
        elif action == "rollback" and self.num_rollbacks >= self.config.max_rollbacks:
            action, key = "stop", "max_rollbacks"
        else:
            key = f"{alarms[actions.index(action)].finding.guard}.action"
        self._record(alarms, actions, action)
        sentence = f"Step {self._step}: {'; '.join(alarm.describe() for alarm in alarms)}"
        if action == "stop":
            raise NumericsError(f"{sentence}. {self._ending(key)}")
        if action == "rollback":
            self.num_rollbacks += 1
            raise RollBackPrompts(sentence)
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
        return (
            f"The run stops because {why}{place}. Lower the learning rate, look at those samples, or use float32 "
            "(actor.fsdp_config.dtype=float32), and run the same command again to resume from the newest checkpoint."
        )

    def _record(self, alarms: Sequence[Alarm], actions: Sequence[str], action: str) -> None:
        if self.file is None:
            return
        head = {"step": self._step, "time": round(time.time(), 3)}
        pairs = zip(alarms, actions, strict=True)
        append_rows(self.file, [{**head, **alarm.row(), "action": own, "done": action} for alarm, own in pairs])


def _alarm(finding: Finding, batch: DataProto, place: str, mini_batch: int | None = None) -> Alarm:
    """The alarm of a finding, with the rows of its samples."""
    rows = {name: row for row, name in enumerate(names_of_rows(batch.batch))}
    samples = [_sample(batch, rows.get((o, s)), value, (o, s)) for o, s, value in finding.samples]
    return Alarm(finding, samples, place, mini_batch)


def _has_trained(update: Updates) -> bool:
    return len({finding.mini_batch for finding in update.findings if finding.refused}) < len(update.steps)


def _written(value: object) -> object:
    return repr(value) if isinstance(value, float) and not math.isfinite(value) else value


def _sample(batch: DataProto, row: int | None, value: float, name: tuple[int, int]) -> dict[str, object]:
    """A row of `batch` for guards.jsonl; a sample that is not in `batch` has only its name and `value`."""
    columns, objects = batch.batch, batch.non_tensor_batch
    if row is None:
        return {"uid": str(name[0]), "ordinal": name[0], "sample": name[1], "value": value}
    scores = (
        columns["token_level_scores"][row] if "token_level_scores" in columns.keys() else torch.full((1,), torch.nan)
    )
    return {
        "uid": str(objects["uid"][row]) if "uid" in objects else str(row),
        "ordinal": int(columns["ordinal"][row]) if "ordinal" in columns.keys() else None,
        "sample": int(columns["sample_index"][row]) if "sample_index" in columns.keys() else row,
        "score": float(scores.sum()),
        "value": value,
    }
