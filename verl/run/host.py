"""The host of every program: from a loaded config to a finished run, at once or step by step.

The host reads the section `trainer` of the config, and `ray_kwargs` on Ray; everything else is the program's.
"""

import json
import logging
import weakref
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from dataclasses import asdict, replace
from pathlib import Path
from typing import Any, TypeVar

from verl.config import LoadedConfig, RunConfig
from verl.config.diff import changed_keys
from verl.config.sections.trainer import TrainerConfig
from verl.data.prompts import set_template_time
from verl.data_proto.tokenizer import Tokenizer
from verl.distributions import is_installed, load_part
from verl.errors import ConfigError, FewRowsError
from verl.parallel.torch_settings import run_settings
from verl.programs.api import PROGRAMS, Program, ProgramData, ProgramSpecs, RunContext, load_plugins
from verl.roles.api import Roles
from verl.run.facts import about_steps, num_rows_of, with_facts
from verl.run.inputs import inputs_of
from verl.run.loop import Loop, StopSignal
from verl.run.schedule import Phases, named_steps, scheduler_of, validation_times
from verl.run.state import (
    START_FILE,
    Resume,
    RunState,
    Store,
    digest_of_start,
    is_same_start,
    open_store,
    time_of_start,
)
from verl.runtime.api import Runtime, open_runtime
from verl.tracking import run_folder
from verl.tracking.console import Console, is_notebook
from verl.tracking.files import read_metrics, write_atomically
from verl.tracking.run_folder import RunFolder
from verl.tracking.summary import Summary
from verl.tracking.timeline import Spans, Timeline, expected_step_s
from verl.tracking.tracker import NullOutput, Tracker
from verl.tracking.trained import newest_model
from verl.user_objects import short_traceback

log = logging.getLogger(__name__)


def train(loaded: LoadedConfig[RunConfig], program: str = "ppo", *, restarted: bool = False) -> int:
    """Train a program of PROGRAMS with the config `loaded`; returns the exit code. `restarted`: after a crash of the same
    command. Raises VerlError with its message."""
    if loaded.config.trainer.val_only:
        return evaluate(_with_checkpoint(loaded), program)
    with run_settings(), open_run(loaded, program, restarted=restarted) as (loop, finish):
        loop.run()
        finish()
    return 0


class _OtherDefaults(Exception):
    """Other defaults fit the rows that were read. The run opens again with `loaded`."""

    def __init__(self, loaded: LoadedConfig[Any]):
        self.loaded = loaded


@contextmanager
def open_run(
    loaded: LoadedConfig[RunConfig], program: str = "ppo", *, restarted: bool = False
) -> Iterator[tuple[Loop, Callable[..., None]]]:
    """The loop of a run that is ready for its next step, and a function that ends it with its summary.

    Defaults of our commands fit the rows and the model: a batch has no more rows than train, and small models learn faster."""
    loaded = with_facts(loaded, None) or loaded
    with ExitStack() as stack:
        fitting = None
        try:
            run = stack.enter_context(_open_run(loaded, program, restarted))
        except _OtherDefaults as other:
            fitting = other.loaded
        except FewRowsError as error:
            if (fitting := with_facts(loaded, error.num_rows)) is None:
                raise
        if fitting is not None:
            run = stack.enter_context(_open_run(fitting, program, restarted))
        yield run


@contextmanager
def _open_run(
    loaded: LoadedConfig[RunConfig], program: str, restarted: bool
) -> Iterator[tuple[Loop, Callable[..., None]]]:
    config = loaded.absolute().config
    load_plugins(config)
    kind: type[Program[Any]] = PROGRAMS.get(program).select(config)
    with ExitStack() as stack:
        runtime = stack.enter_context(open_runtime(ProgramSpecs(kind, config)))
        folder = stack.enter_context(RunFolder(config.trainer.default_local_dir, runtime.rank, config.trainer.log_dir))
        folder.require_free_gb(config.trainer.min_free_disk_gb)
        console = stack.enter_context(_console(runtime, steps="console" in config.trainer.logger))
        started_at = runtime.broadcast(time_of_start(folder.root, config.trainer, restarted=restarted))
        set_template_time(started_at)
        data = kind.load_data(config)
        if (fitting := with_facts(loaded, num_rows_of(data))) is not None:
            raise _OtherDefaults(fitting)
        store, resume, state = _checkpoints(loaded, kind, data, runtime, folder, started_at)
        resume.find()
        scheduler = scheduler_of(config)
        stop = stack.enter_context(StopSignal(folder.root, config.trainer.stop_timeout_s))
        timeline = Timeline(folder.timeline, data.num_steps, spans=kind.span_phases) if runtime.is_rank_zero else None
        spans = Spans(folder.spans, on_enter=console.phase, timeline=timeline, heartbeat=folder.heartbeat)
        tracker = _tracker(stack, loaded, folder, runtime, data.tokenizer)
        if runtime.is_rank_zero and config.trainer.push_to_hub:
            _create_repository(config.trainer)
        roles = runtime.build_roles(total_steps=data.num_steps, data_sources=data.data_sources)
        stack.callback(roles.close)
        context = RunContext(
            folder.root, runtime.is_rank_zero, runtime.broadcast, stop.check, spans, tracker.samples, data.num_steps
        )
        running = kind(config, data, roles, context)
        stack.callback(running.close)
        # a second Ctrl-C waits for nothing
        stack.push(lambda kind, error, trace: None if kind is KeyboardInterrupt else store.close())
        start = {"started_at": started_at, "digest": digest_of_start(loaded, state.inputs)}
        continues = restarted or config.trainer.resume_mode == "auto"
        resume.start(roles, running, same_run=continues and is_same_start(folder.root, start["digest"]))
        if runtime.is_rank_zero:
            _warn_of_resumption(loaded, resume.source, folder, state, data.num_steps)
            folder.write_curves(running.curves)
            write_atomically(folder.root / START_FILE, json.dumps(start))
            loaded.write(folder.root)  # not before: a start that fails must leave what describes the run before it
        console.header(_facts(loaded, roles, running, data, folder, state))
        stop.share(runtime.any)
        expected_s = expected_step_s(folder.root) if runtime.is_rank_zero else None
        console.begin(state.step, data.num_steps, kind.console_metrics, expected_s)
        loop = Loop(
            config.trainer, program=running, data=data, roles=roles, state=state, folder=folder, write_config=loaded.write,
            store=store, tracker=tracker, console=console, spans=spans, stop=stop, broadcast=runtime.broadcast,
            is_rank_zero=runtime.is_rank_zero, resume=resume,
            phases=None if scheduler is None else Phases(scheduler, roles, runtime.broadcast),
        )  # fmt: skip

        def finish(*, ends: bool = True) -> None:
            if runtime.is_rank_zero:
                last = loop.last_validation or _last_validation(folder.metrics)
                _finish(config.trainer, folder, tracker, console, roles, running, state, last, ends)

        yield loop, finish


@run_settings()
def evaluate(loaded: LoadedConfig[RunConfig], program: str = "ppo") -> int:
    """Validate the model once (`trainer.val_only`, `verl eval`). Metrics and samples go to `eval/` in the run folder, next to
    the files of a training run."""
    loaded = _with_weights(loaded.absolute(), None)
    config = loaded.config
    load_plugins(config)
    kind: type[Program[Any]] = PROGRAMS.get(program).select(config)
    with ExitStack() as stack:
        runtime = stack.enter_context(open_runtime(ProgramSpecs(kind, config)))
        folder = stack.enter_context(RunFolder(Path(config.trainer.default_local_dir) / "eval", runtime.rank))
        console = stack.enter_context(_console(runtime))
        data = kind.load_data(config, train=False)
        if not data.has_validation:
            raise ConfigError("Evaluation needs data.val_files; it is empty.")
        tracker = _tracker(stack, loaded, folder, runtime, data.tokenizer)
        roles = runtime.build_roles(total_steps=1, data_sources=data.data_sources, train=False)
        stack.callback(roles.close)
        context = RunContext(
            folder.root, runtime.is_rank_zero, runtime.broadcast, lambda: None, Spans(), tracker.samples
        )
        metrics = kind(config, data, roles, context).validate(0)
        if not runtime.is_rank_zero:
            return 0
        tracker.log(metrics, 0)
        write_atomically(folder.root / "eval.json", json.dumps(metrics, indent=2, sort_keys=True))
        console.validation(None, metrics)
        log.info("All metrics are in %s, the samples are in %s.", folder.root / "eval.json", folder.samples)
    return 0


def _with_checkpoint(loaded: LoadedConfig[RunConfig]) -> LoadedConfig[RunConfig]:
    """`loaded` with the weights from which its run would resume: a validation of existing releases has them."""
    loaded = loaded.absolute()
    trainer = loaded.config.trainer
    source = trainer.resume_from_path if trainer.resume_mode == "resume_path" else trainer.default_local_dir
    saved = None if trainer.resume_mode == "disable" else newest_model(Path(str(source)))
    if saved is not None:
        log.info("This validates %s. trainer.resume_mode=disable validates the model that the config names.", saved)
    return _with_weights(loaded, saved)


def _with_weights(loaded: LoadedConfig[Any], saved: Path | None) -> LoadedConfig[Any]:
    """`loaded` with the model folder `saved`, whose weights have the adapters; None: of the checkpoint if the model is one."""
    config = loaded.config
    owner = getattr(config, "actor_rollout_ref", config)
    saved = saved or newest_model(Path(owner.model.path).expanduser())
    if saved is None:
        return loaded
    if getattr(config, "ref", None) is not None and config.ref.model_path is None:  # the run compares with its start
        config = replace(config, ref=replace(config.ref, model_path=owner.model.path))
    model = replace(owner.model, path=str(saved), lora_adapter_path=None)
    changes = {"model": model} if owner is loaded.config else {"actor_rollout_ref": replace(owner, model=model)}
    return replace(loaded, config=replace(config, **changes))


def _checkpoints(
    loaded: LoadedConfig[RunConfig], kind: type[Program[Any]], data: ProgramData, runtime: Runtime, folder: RunFolder,
    started_at: str,
) -> tuple[Store, Resume, RunState]:  # fmt: skip
    """The checkpoints of the run folder, the choice of one, and the state of a run that is not resumed."""
    trainer = loaded.config.trainer
    specs = kind.roles(loaded.config).models
    store = open_store(folder.root, specs, timeout_s=trainer.call_timeout_s, is_rank_zero=runtime.is_rank_zero)
    inputs = inputs_of(loaded, kind) | getattr(data, "inputs", {}) if runtime.is_rank_zero else {}
    state = RunState(command=loaded.schema.command, inputs=inputs, started_at=started_at)
    schema, share = kind.state_schema, runtime.broadcast
    resume = Resume(trainer, folder=folder, broadcast=share, state_schema=schema, specs=specs, state=state, store=store)
    return store, resume, state


def _create_repository(trainer: TrainerConfig) -> None:
    """Fail before the hours of work that are to be uploaded, not after them."""
    from verl.checkpoint.export import create_repository

    create_repository(str(trainer.hub_model_id), trainer.hub_private_repo)


def _console(runtime: Runtime, steps: bool = True) -> Any:
    if not runtime.is_rank_zero:
        return NullOutput()
    if is_notebook() and is_installed("verl-page"):
        return load_part("verl.tracking.console_notebook").NotebookConsole(steps=steps)
    return Console(steps=steps)


def _tracker(
    stack: ExitStack, loaded: LoadedConfig[RunConfig], folder: RunFolder, runtime: Runtime, tokenizer: Tokenizer
) -> Any:
    if not runtime.is_rank_zero:
        return NullOutput()
    loaded.require_outputs()
    trainer = loaded.config.trainer
    return stack.enter_context(
        Tracker(
            folder,
            trainer.logger,
            trainer.project_name,
            trainer.experiment_name,
            asdict(loaded.config),
            rollout_data_dir=trainer.rollout_data_dir,
            validation_data_dir=trainer.validation_data_dir,
            log_val_generations=trainer.log_val_generations,
            tokenizer=tokenizer,
        )
    )


def _facts(
    loaded: LoadedConfig[RunConfig],
    roles: Roles,
    program: Program[Any],
    data: ProgramData,
    folder: RunFolder,
    state: RunState,
) -> dict[str, object]:
    total, model = data.num_steps, next((spec.model.path for spec in roles.specs if spec.trains), None)
    rest = about_steps(total, num_rows_of(data), loaded.config)
    return {
        "model": model,
        **roles.facts,
        **program.header(),
        "steps": f"{state.step + 1} to {total}{rest}" if 0 < state.step < total else f"{total}{rest}",
        "validation": validation_times(loaded.config.trainer, state.step, program.schedule.get("validation", ""))
        if data.has_validation
        else "none: data.val_files is empty",
        "checkpoints": named_steps(loaded.config.trainer.save_freq)
        or program.schedule.get("checkpoints")
        or "none on schedule, one when interrupted; trainer.save_freq=after_each_epoch keeps the trained model",
        "run folder": str(folder.root),
        **({"page": run_folder.address_of_page} if run_folder.address_of_page else {}),
        "notices": loaded.notices,
    }


def _warn_of_resumption(
    loaded: LoadedConfig[RunConfig], source: Path | None, folder: RunFolder, state: RunState, steps: int
) -> None:
    """Warn of settings of a resumed run that differ from the run in `source`, and of a run that has ended already."""
    changed = changed_keys(loaded, source) if source is not None else []
    if changed:
        log.warning("The run resumes with changed settings: %s.", "; ".join(changed))
    if state.step >= steps:
        log.warning(
            "The run in %s has taken all of its %d steps: nothing is left to do. To continue, raise trainer.total_epochs or "
            "trainer.total_training_steps; for a new run, choose another trainer.experiment_name or "
            "trainer.default_local_dir, or set trainer.resume_mode=disable.",
            folder.root,
            steps,
        )


def _last_validation(metrics_file: Path) -> dict[str, float]:
    """The metrics of the last validation after a step: for a run that has nothing left to do."""
    rows = [row for row in read_metrics(metrics_file) if row["step"] > 0 and any(k.startswith("val") for k in row)]
    return rows[-1] if rows else {}


def _finish(
    trainer: TrainerConfig, folder: RunFolder, tracker: Tracker, console: Console, roles: Roles, program: Program[Any],
    state: RunState, last: dict[str, float], ends: bool,
) -> None:  # fmt: skip
    """Summary, and if the run `ends`, closing table and upload."""
    summary = Summary.of_run(
        results=program.results(state.first_validation, last),
        steps=state.step,
        seconds=state.seconds,
        num_tokens=state.num_tokens,
        device=roles.facts["device"],
        batch_invariant=roles.facts.get("batch_invariant"),
        metrics_file=folder.metrics,
    )
    tracker.finish(summary)
    if not ends:
        return
    console.final(summary)
    for name in list(roles.trained())[:1]:
        trained = folder.root / f"global_step_{state.step}" / name / "huggingface"
        if trained.is_dir():
            log.info("The trained model is %s; `verl view %s` opens the page of the run.", trained, folder.root)
        if trainer.push_to_hub:
            from verl.checkpoint.export import push_result

            push_result(trained.parents[1], name, str(trainer.hub_model_id), trainer.hub_private_repo)


T = TypeVar("T", bound="SteppedRun")


class SteppedRun:
    """The run of `loaded` by `program`, a name of PROGRAMS. Use it as a context manager, or call `close` at the end."""

    def __init__(self, loaded: LoadedConfig[RunConfig], program: str = "ppo"):
        self.loaded, self.program_name = loaded.absolute(), program
        self._stack = ExitStack()
        weakref.finalize(
            self, self._stack.close
        )  # of a run that is never closed, while the interpreter has its modules
        self._running: tuple[Loop, Callable[[], None]] | None = None
        self._closed = False

    @short_traceback
    @run_settings()
    def step(self) -> dict[str, float] | None:
        """Take the next step, with validation and checkpoints when due; returns its metrics, or None after the last step. The
        first call loads models and starts processes. Raises InterruptedRun after saving on Ctrl-C and SIGTERM."""
        loop, finish = self._started()
        if not loop.advance():
            return None
        if loop.state.step >= loop.data.num_steps:
            loop.store.finish()
            finish()
        return dict(loop.metrics)

    def close(self) -> None:
        """End the processes of the run. The steps after the newest checkpoint are lost."""
        self._running, self._closed = None, True
        self._stack.close()

    def __enter__(self: T) -> T:
        return self

    def __exit__(self, *error: object) -> None:
        self.close()

    @run_settings()
    def _started(self) -> tuple[Loop, Callable[[], None]]:
        """The loop of the run, and the function that ends the run. Raises ConfigError after `close`."""
        if self._closed:
            raise ConfigError(
                f"The {type(self).__name__} is closed. Make another with the same run folder to resume from its checkpoint."
            )
        if self._running is None:
            self._running = self._stack.enter_context(open_run(self.loaded, self.program_name))
        return self._running
