"""The loop of a run around its program: steps, validation, checkpoints, metrics on disk and on the console, and stopping."""

from __future__ import annotations

import contextlib
import logging
import os
import signal
import threading
import time
from collections.abc import Callable, Mapping
from dataclasses import KW_ONLY, dataclass
from pathlib import Path
from types import FrameType
from typing import Any

from verl.config import TrainerConfig
from verl.errors import CheckpointError, DeadlineError, FolderLostError, InterruptedRun, NumericsError, VerlError
from verl.parallel.child_processes import in_forks
from verl.parallel.process_settings import give_back_holes
from verl.parallel.stack_dump import all_stacks
from verl.programs.api import Program, ProgramData, StepResult
from verl.roles.api import Broadcast, Roles, RoleSpec
from verl.roles.guards import RollBack
from verl.run.schedule import Phases
from verl.run.state import (
    BackgroundRoleWriter,
    Resume,
    RoleWriter,
    RunState,
    Store,
    open_store,
    rescue_folder,
    saves_in_background,
)
from verl.tracking.console import Console
from verl.tracking.heartbeat import read_beat
from verl.tracking.learning import LEAST_VISIBLE, StillWatch, TrainedRole
from verl.tracking.run_folder import RunFolder
from verl.tracking.timeline import Spans, span_metrics, throughput
from verl.tracking.tracker import Tracker

log = logging.getLogger(__name__)

_SAME_S = 0.1  # two signals within that time are one Ctrl-C that came by two ways (the terminal's group, and a parent)


class StopRequested(Exception):
    """Raised by `StopSignal.check`; no weight of the step under way has changed yet."""


class StopSignal:
    """While entered, SIGINT and SIGTERM ask for an orderly end between two phases, after saving; a second Ctrl-C ends at once.

    A run that has not left `timeout_s` after the request (0: no limit) is ended as it is, during any wait, with the step and
    phase of `root`/heartbeat.json in the message."""

    def __init__(self, root: Path, timeout_s: float) -> None:
        self.requested = False
        self._root, self._timeout_s = root, timeout_s
        self._requested_at = 0.0
        self._left = threading.Event()
        self._previous: dict[int, Any] = {}
        self._any_process: Callable[[bool], bool] = bool

    def __enter__(self) -> StopSignal:
        if threading.current_thread() is threading.main_thread():
            for number in (signal.SIGINT, signal.SIGTERM):
                self._previous[number] = signal.signal(number, self._on_signal)
            in_forks.append(self.restore)
        return self

    def __exit__(self, *error: object) -> None:
        self._left.set()
        self.restore()
        if self.restore in in_forks:
            in_forks.remove(self.restore)

    def restore(self) -> None:
        """Handle signals as before the run."""
        for number, handler in self._previous.items():
            signal.signal(number, handler)
        self._previous = {}

    def _on_signal(self, number: int, frame: FrameType | None) -> None:
        if self.requested:
            if number == signal.SIGINT and time.monotonic() - self._requested_at > _SAME_S:
                raise KeyboardInterrupt
            return
        self.requested, self._requested_at = True, time.monotonic()
        limit = f", within {self._timeout_s:g} s" if self._timeout_s else ""
        log.warning("Stopping after this phase and saving%s; Ctrl-C again stops at once, without saving.", limit)
        if self._timeout_s:
            threading.Thread(target=self._end_late, name="stop-deadline", daemon=True).start()

    def _end_late(self) -> None:
        if self._left.wait(self._timeout_s):
            return
        beat = read_beat(self._root)
        place = f"step {beat.step} ({beat.phase})" if beat is not None else "its start"
        log.info("The stacks of a run that did not stop:\n%s", all_stacks())
        log.error(
            "The run was asked to stop %g s ago (trainer.stop_timeout_s) and is still in %s. It ends now, without saving: run "
            "the same command again to resume from the last checkpoint, and raise that key if the phase was only slow.",
            self._timeout_s,
            place,
        )
        os._exit(DeadlineError.exit_code)  # the wait of the main thread may never end

    def share(self, any_process: Callable[[bool], bool]) -> None:
        """From now on all processes of the run stop at the same `check`, whichever got the signal; `any_process(flag)` returns
        whether one of them did."""
        self._any_process = any_process

    def check(self) -> None:
        """Raise StopRequested if a stop was asked for."""
        if self._any_process(self.requested):
            raise StopRequested


@dataclass(eq=False)
class Loop:
    """Runs `program` from `state` to the last step of `data`. `trainer` is the config section; `write_config` writes the config
    to a folder."""

    trainer: TrainerConfig
    _: KW_ONLY
    program: Program[Any]
    data: ProgramData
    roles: Roles
    state: RunState
    folder: RunFolder
    write_config: Callable[[Path], object]
    store: Store
    tracker: Tracker
    console: Console
    spans: Spans
    stop: StopSignal
    broadcast: Broadcast
    is_rank_zero: bool
    resume: Resume
    phases: Phases | None = None

    def __post_init__(self) -> None:
        self.metrics: dict[str, float] = {}  # of the newest step
        self.last_validation: dict[str, float] = {}  # after a step: the one before training is in the state
        self.saved_step = self.state.step
        self._hidden: set[str] = set()  # roles that were warned of
        self._num_trained, self._left_out = self.state.step, ""  # steps, and why the last batch was left out
        self._still = StillWatch(
            next(map(_watched, filter(lambda spec: spec.optim is not None, self.roles.specs)), None)
        )

    def run(self) -> None:
        """Train to the end. Raises as `advance`."""
        while self.advance():
            pass
        self._require_folder()
        self.store.finish()

    def _require_training(self) -> None:
        """Raises NumericsError after the last step if the batch of every step was left out. Steps before a resume count as
        trained."""
        if self._left_out and not self._num_trained and self.state.step >= self.data.num_steps:
            raise NumericsError(
                f"Nothing has trained: the batch of every step was left out. The reason of the last one: {self._left_out}. "
                f"Warnings in {self.folder.root / 'logs'} have the others; repair the cause, and train in a new run folder."
            )

    def advance(self) -> bool:
        """Take the next step, the validation before the first one included; False when there is none left. Raises
        InterruptedRun after saving when a stop was requested, and FolderLostError after saving elsewhere when the run folder is
        lost."""
        if self.state.step >= self.data.num_steps:
            return False
        try:
            if self.state.step == 0 and self.trainer.val_before_train and not self.state.first_validation:
                self.state.first_validation = self._validated(0)
            self._require_folder()
            self.store.check()
            try:
                self._step(self.state.step + 1)
            except RollBack as back:
                self._go_back(back)
            self.stop.check()
            self._require_training()
        except StopRequested:
            raise self._stopped() from None
        return True

    def _stopped(self) -> InterruptedRun:
        """Save the last step; the error that ends the run."""
        self._require_folder()
        self._finish_last_save()
        self.save()
        self.store.finish()
        result = f"saved to {self.store.root}" if self.state.step else "nothing had been trained yet"
        return InterruptedRun(
            f"Stopped on request after step {self.state.step} of {self.data.num_steps}; {result}. {InterruptedRun.hint}"
        )

    def _step(self, step: int) -> None:
        started = time.perf_counter()
        if self.phases is not None:
            self.phases.start_step(step)
        self.spans.begin_step(step)
        result = self.program.step(step)
        seconds = time.perf_counter() - started
        self.state.step = step
        self._num_trained, self._left_out = self._num_trained + (not result.skipped), result.skipped
        self.state.seconds += seconds
        self.state.num_tokens += result.num_tokens
        self._require_folder()  # before anything is written
        metrics = self._metrics(result, seconds)
        self._still.trained(metrics)
        if self._due(self.trainer.test_freq) or "validation" in self.program.requests:
            metrics.update(self._validated(step))
        metrics.update({f"timing_s/{k}": v for k, v in self.spans.take().items() if f"timing_s/{k}" not in metrics})
        if self.is_rank_zero:
            self.tracker.samples("train", step, result.rows)
        self.tracker.log(metrics, step)
        self.metrics = metrics
        if self._due(self.trainer.save_freq) or "checkpoint" in self.program.requests:
            self.save()  # after the rows: a run killed here resumes behind this step and would not write them again
        self.spans.write(step)
        self.console.step(step, metrics)
        self._warn_of_hidden_updates(metrics)
        self.program.step_done(step, metrics)
        give_back_holes(step)

    def _validated(self, step: int) -> dict[str, float]:
        metrics = self.validate()
        if self.data.has_validation:
            self._still.validated(step, self.program.fingerprint(metrics))
        return metrics

    def _go_back(self, back: RollBack) -> None:
        self.tracker.flush()
        self.spans.take()
        self.spans.write(self.state.step + 1)  # they go with the rows of the steps that are taken again
        self.resume.go_back(back, self.saved_step)
        self.saved_step = self.state.step

    def _metrics(self, result: StepResult, seconds: float) -> dict[str, float]:
        return {
            **result.metrics,
            **span_metrics({**self.spans.take(), "step": seconds}, result.span_tokens),
            **throughput(result.num_tokens, seconds, self.roles.num_devices),
            "training/global_step": self.state.step,
            **(self.phases.metrics() if self.phases is not None else {}),
        }

    def _warn_of_hidden_updates(self, metrics: Mapping[str, float]) -> None:
        """Warn once for each role that loses most of its updates in rounding."""
        for spec in self.roles.specs:
            ratio = metrics.get(f"{spec.name}/visible_update_ratio", 1.0)
            if metrics.get(f"{spec.name}/grad_norm") == 0.0:  # only weight decay moved the weights
                continue
            if ratio < LEAST_VISIBLE and spec.name not in self._hidden:
                self._hidden.add(spec.name)
                section = spec.engine_keys[0] if spec.engine_keys else "its engine"
                log.warning(
                    "Only %.0f%% of the weight updates of the %s survive rounding (%s/visible_update_ratio). "
                    "Set %s.master_rounding=dithered, which acts on bfloat16, or %s.dtype=float32.",
                    100 * ratio, spec.name, spec.name, section, section,
                )  # fmt: skip

    def validate(self) -> dict[str, float]:
        """Metrics of the current weights on the held-out rows, also on the console; empty without such rows."""
        if not self.data.has_validation:
            return {}
        with self.spans("testing"):
            metrics = self.program.validate(self.state.step)
        if self.state.step == 0:
            self.tracker.log(metrics, 0)
        else:
            self.last_validation = metrics
        self.console.validation(self.state.step, metrics)
        return metrics

    def save(self) -> None:
        """Write a checkpoint of the last step, unless it has one."""
        if self.saved_step == self.state.step:
            return
        with self.spans("save_checkpoint"):
            writer = BackgroundRoleWriter if saves_in_background(self.roles.specs) else RoleWriter
            writers: dict[str, Any] = {
                name: writer(role, self.broadcast) for name, role in self.roles.trained().items()
            }
            self.program.drain()
            self.tracker.flush()  # the rows are on the disk before the checkpoint
            state = {**self.state.state_dict(), **self.program.state_dict()}
            writers.update(self.program.checkpoint_writers())
            self.store.save(self.state.step, writers, state)
        self.saved_step = self.state.step

    def _require_folder(self) -> None:
        """Raise FolderLostError when the run folder is lost, after saving the state in memory to another folder."""
        lost = self.broadcast(self.folder.lost())
        if not lost:
            return
        try:
            hint = "Nothing had been trained yet: set trainer.default_local_dir to another folder"
            if self.state.step:
                hint = f"The state after step {self.state.step} is in {self._rescue()}: set trainer.default_local_dir to it"
        except (OSError, VerlError) as error:
            hint = f"Its state could not be saved elsewhere ({error}): set trainer.default_local_dir to another folder"
        raise FolderLostError(f"{lost} {hint}, and run the same command again.")

    def _rescue(self) -> Path:
        """Save the last step to a new folder, so that the run can resume from there."""
        with contextlib.suppress(VerlError):
            self.store.finish()
        root = Path(self.broadcast(str(rescue_folder(self.folder.root)) if self.is_rank_zero else ""))
        self.program.move_records(root)
        self.store = open_store(
            root, self.roles.specs, timeout_s=self.trainer.call_timeout_s, is_rank_zero=self.is_rank_zero
        )
        self.saved_step = -1
        self.save()
        self.store.finish()
        if self.is_rank_zero:
            self.write_config(root)
        return root

    def _finish_last_save(self) -> None:
        """Wait for the background save. A failure is logged, and does not keep the run from saving at its stop."""
        failure = ""
        try:
            self.store.finish()
        except CheckpointError as error:
            failure = str(error)
        if failure := self.broadcast(failure):  # all processes have to save again, or none
            log.error("%s", failure)
            self.saved_step = -1

    def _due(self, every: int | str) -> bool:
        """Whether the step that has ended is the last one, or a multiple of `every` steps or of an epoch."""
        steps = self.data.num_steps_per_epoch if every == "after_each_epoch" else int(every)
        is_last = self.state.step == self.data.num_steps
        return (is_last and self.program.ends_with_checkpoint) or (
            steps > 0 and (self.state.step % steps == 0 or is_last)
        )


def _watched(spec: RoleSpec) -> TrainedRole:
    """A role that trains; the section of its optimizer lies next to its engine's."""
    assert spec.optim is not None
    sections = spec.engine_keys[0].split(".")[:-1] if spec.engine_keys else []
    return TrainedRole(spec.name, ".".join([*sections, "optim"]), spec.optim.lr, spec.model.lora_rank > 0)
