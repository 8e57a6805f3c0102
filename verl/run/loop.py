"""Around a program: resume, the schedule of steps, validation, checkpoints, what is shown and written, and stopping."""

from __future__ import annotations

import logging
import time
from typing import Any, Protocol

from verl.config import VerlConfig
from verl.data_proto.metrics import metric_values
from verl.errors import CheckpointError, InterruptedRun
from verl.parallel.memory import give_back_holes
from verl.programs.guards import RollBack
from verl.programs.ppo import StepResult
from verl.programs.state import TrainerState
from verl.programs.validation import Validator
from verl.run.interrupt import StopRequested, StopSignal
from verl.run.learning_signal import SignalWatch
from verl.run.resuming import Resume
from verl.run.samples import open_samples
from verl.run.saving import BackgroundRoleWriter, FromLeader, RoleWriter, Store, saves_in_background
from verl.run.schedule import Phases
from verl.runtime.roles import Roles
from verl.tracking.batch_metrics import data_metrics, throughput_metrics, timing_metrics
from verl.tracking.console import Console
from verl.tracking.ledger.tracker import SampleTracker
from verl.tracking.records import sample_rows
from verl.tracking.spans import Spans
from verl.tracking.tracker import Tracker

log = logging.getLogger(__name__)


class Program(Protocol):
    samples: SampleTracker

    def step(self, state: TrainerState) -> StepResult: ...

    def settle(self) -> None: ...


class Loop:
    """Runs `program` from `state` to `total_steps`."""

    def __init__(
        self,
        config: VerlConfig,
        *,
        program: Program,
        roles: Roles,
        state: TrainerState,
        total_steps: int,
        store: Store,
        validator: Validator | None,
        tracker: Tracker,
        console: Console,
        spans: Spans,
        tokenizer: Any,
        stop: StopSignal,
        from_leader: FromLeader,
        resume: Resume,
        phases: Phases | None = None,
    ):
        self.config = config
        self.program = program
        self.roles = roles
        self.state = state
        self.total_steps = total_steps
        self.store = store
        self.validator = validator
        self.tracker = tracker
        self.console = console
        self.spans = spans
        self.tokenizer = tokenizer
        self.stop = stop
        self.from_leader = from_leader
        self.resume = resume
        self.phases = phases
        self.signal = SignalWatch(config.data.max_response_length, config.actor_rollout_ref.rollout.n)
        self.last_validation: dict[str, float] = {}  # of a step: the one before training is in the state
        self.saved_step = state.step

    def run(self) -> dict[str, float]:
        """Train to the end; returns the metrics of the last validation. Raises InterruptedRun after saving when stopped."""
        try:
            if self.state.step == 0 and self.config.trainer.val_before_train:
                self.state.first_validation = self._validate()
            while self.state.step < self.total_steps:
                self.store.check()
                try:
                    self._step(self.state.step + 1)
                except RollBack as back:
                    self._go_back(back)
                self.stop.check()
            self.store.finish()
        except StopRequested:
            self._hear_of_last_save()
            self._save()
            self.store.finish()
            kept = f"saved to {self.store.root}" if self.state.step else "nothing had been trained yet"
            raise InterruptedRun(
                f"Stopped on request after step {self.state.step} of {self.total_steps}; {kept}. "
                "Run the same command again to go on from there."
            ) from None
        return self.last_validation

    def _step(self, step: int) -> None:
        started = time.perf_counter()
        if self.phases is not None:
            self.phases.begin(step)
        before = self.state.to_json()
        self.state.step = step
        self.spans.begin_step(step)
        try:
            result = self.program.step(self.state)
        except BaseException:
            self.state.load_json(before)  # the step did not happen: what is saved now describes the one before
            raise
        seconds = time.perf_counter() - started
        self.state.seconds += seconds
        metrics = self._metrics(result, seconds)
        if self._due(self.config.trainer.test_freq, step):
            metrics.update(self._validate())
        metrics.update({f"timing_s/{k}": v for k, v in self.spans.take().items() if f"timing_s/{k}" not in metrics})
        self.tracker.samples("train", step, sample_rows(result.batch, self.tokenizer))
        self.tracker.log(metrics, step)
        if self._due(self.config.trainer.save_freq, step):
            self._save()  # after the rows: a run killed here resumes behind this step and would not write them again
        self.spans.write(step)
        self.console.step(step, metrics)
        self.signal.note(step, metrics)
        give_back_holes(step)

    def _go_back(self, back: RollBack) -> None:
        self.spans.take()
        self.spans.write(self.state.step + 1)  # they go with the rows of the steps that are taken again
        self.resume.go_back(back, self.saved_step)
        self.saved_step = self.state.step

    def _metrics(self, result: StepResult, seconds: float) -> dict[str, float]:
        metrics = metric_values(result.metrics)
        limits = self.config.data
        metrics.update(
            data_metrics(
                result.batch,
                max_prompt_length=limits.max_prompt_length,
                max_response_length=limits.max_response_length,
            )
        )
        spans = {**self.spans.take(), "step": seconds}
        metrics.update(timing_metrics(result.batch, spans))
        metrics.update(throughput_metrics(result.batch, seconds, num_devices=self.roles.num_devices))
        self.state.num_tokens += int(metrics["perf/total_num_tokens"])
        metrics["training/global_step"] = self.state.step
        metrics["training/weight_version"] = self.state.weight_version
        metrics["training/next_ordinal"] = self.program.samples.cursor
        metrics.update(self.phases.figures() if self.phases is not None else {})
        metrics["reward/num_defaulted"] = self.roles.reward.num_defaulted()
        return metrics

    def _validate(self) -> dict[str, float]:
        if self.validator is None:
            return {}
        with self.spans("testing"):
            found = self.validator.run(self.state.step)
        if self.state.step == 0:
            self.tracker.log(found, 0)
        else:
            self.last_validation = found
        self.console.validation(self.state.step, found)
        return found

    def _save(self) -> None:
        if self.saved_step == self.state.step:
            return
        with self.spans("save_checkpoint"):
            writer = BackgroundRoleWriter if saves_in_background(self.config) else RoleWriter
            writers: dict[str, Any] = {
                name: writer(role, self.from_leader) for name, role in self.roles.trained().items()
            }
            self.program.settle()
            # the ledger is on the disk before the checkpoint is: one that exists never knows more than the ledger
            state = {**self.state.to_json(), "samples": self.program.samples.commit()}
            writers.update(open_samples(self.program.samples))
            self.store.save(self.state.step, writers, state)
        self.saved_step = self.state.step

    def _hear_of_last_save(self) -> None:
        """A save that went on in the background and failed is said, and does not keep the run from saving where it stops."""
        failure = ""
        try:
            self.store.finish()
        except CheckpointError as error:
            failure = str(error)
        if failure := self.from_leader(failure):  # all processes have to save again, or none
            log.error("%s", failure)
            self.saved_step = -1

    def _due(self, every: int, step: int) -> bool:
        return every > 0 and (step % every == 0 or step == self.total_steps)
