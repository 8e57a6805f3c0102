"""From a loaded config to a finished run: the only place where all rooms meet."""

from __future__ import annotations

import json
import logging
import os
from collections.abc import Iterator
from contextlib import ExitStack
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from verl.config import LoadedConfig, VerlConfig
from verl.config.diff import changed_keys
from verl.data.dataset import load_dataset
from verl.data.files import write_parquet
from verl.data.loader import PromptLoader, ValidationLoader
from verl.data.order import PromptOrder
from verl.data.prompts import PromptEncoder
from verl.errors import ConfigError
from verl.models.load import load_tokenizer
from verl.programs.ppo import PPO
from verl.programs.ppo_async import AsyncPPO
from verl.programs.state import TrainerState
from verl.programs.validation import VALIDATION_STEP, Validator
from verl.run.interrupt import StopSignal
from verl.run.loop import Loop
from verl.run.resuming import Resume
from verl.run.saving import open_store
from verl.run.schedule import Phases, scheduler_of
from verl.runtime.api import Runtime, open_runtime
from verl.runtime.roles import Roles
from verl.runtime.sampling import draw, sampling_params
from verl.tracking.console import Console
from verl.tracking.files import json_text, read_rows
from verl.tracking.follower import Follower, FollowerFolder
from verl.tracking.plot import draw_learning_curve
from verl.tracking.records import sample_rows
from verl.tracking.run_folder import RunFolder
from verl.tracking.spans import Spans
from verl.tracking.summary import Summary
from verl.tracking.timeline import Timeline
from verl.tracking.tracker import Tracker

log = logging.getLogger(__name__)


@dataclass
class RunData:
    """Tokenizer and loaders of a run."""

    tokenizer: Any
    train: PromptLoader | None
    validation: ValidationLoader | None
    data_sources: list[str]


def load_data(config: VerlConfig, *, train: bool = True) -> RunData:
    """Read and check the data files; raises DataError or ConfigError before any model is loaded."""
    data = config.data
    tokenizer = load_tokenizer(config.actor_rollout_ref.model)
    encoder = PromptEncoder(tokenizer, data)
    sources: set[str] = set()
    train_loader = validation = None
    if train:
        rows = load_dataset(data.train_files, tokenizer, data, max_samples=data.train_max_samples)
        if len(rows) < data.train_batch_size:
            raise ConfigError(
                f"data.train_batch_size={data.train_batch_size} is more than the {len(rows)} usable rows of "
                f"{data.train_files}. Lower it or give more data."
            )
        order = PromptOrder(len(rows), data.seed if data.seed is not None else 42, data.shuffle)
        train_loader = PromptLoader(rows, encoder, order, data.train_batch_size)
        sources |= set(rows.data_sources)
    if data.val_files:
        rows = load_dataset(data.val_files, tokenizer, data, max_samples=data.val_max_samples)
        validation = ValidationLoader(rows, encoder, data.val_batch_size or len(rows))
        sources |= set(rows.data_sources)
    return RunData(tokenizer, train_loader, validation, sorted(sources))


def total_steps(config: VerlConfig, loader: PromptLoader) -> int:
    """trainer.total_training_steps, else total_epochs times the whole batches of an epoch."""
    return config.trainer.total_training_steps or config.trainer.total_epochs * loader.num_steps_per_epoch


def train(loaded: LoadedConfig) -> int:
    """Train as `loaded` says; returns the exit code. Errors are VerlError with the sentence to show."""
    config = loaded.config
    if config.trainer.val_only:
        return evaluate(loaded)
    with ExitStack() as stack:
        runtime = stack.enter_context(open_runtime(config))
        folder = stack.enter_context(_folder(runtime, config.trainer.default_local_dir))
        folder.require_free_gb(config.trainer.min_free_disk_gb)
        console = stack.enter_context(_console(runtime, steps="console" in config.trainer.logger))
        data = load_data(config)
        assert data.train is not None
        steps, scheduler = total_steps(config, data.train), scheduler_of(config)
        stop = stack.enter_context(StopSignal())
        timeline = Timeline(folder.timeline, steps) if runtime.leads else None
        spans = Spans(folder.spans, on_enter=console.phase, timeline=timeline, heartbeat=folder.heartbeat)
        tracker = _tracker(stack, loaded, folder, runtime)
        roles = runtime.build_roles(total_steps=steps, data_sources=data.data_sources)
        stack.callback(roles.close)
        ahead = config.actor_rollout_ref.rollout.prefetch_num > 0
        program = (AsyncPPO if ahead else PPO)(config, roles, data.train, spans, stop.check)
        stack.callback(program.samples.close)
        state, store = TrainerState.fresh(config), open_store(config, folder.root, leads=runtime.leads)
        # a second Ctrl-C waits for nothing
        stack.push(lambda kind, error, trace: None if kind is KeyboardInterrupt else store.close())
        resume = Resume(
            config, folder=folder, roles=roles, runtime=runtime, program=program, state=state, store=store
        )  # fmt: skip
        resume.begin()
        if runtime.leads:
            program.guards.file = folder.guards
            _say_how_it_goes_on(loaded, folder, state, steps)
            loaded.write(folder.root)  # not before: a start that fails must leave what describes the run before it
        console.header(_facts(loaded, roles, data, steps, folder, state))
        held_out = data.validation
        validator = Validator(config, roles, held_out, data.tokenizer, tracker) if held_out is not None else None
        stop.share(runtime.any)
        loop = Loop(
            config,
            program=program,
            roles=roles,
            state=state,
            total_steps=steps,
            store=store,
            validator=validator,
            tracker=tracker,
            console=console,
            spans=spans,
            tokenizer=data.tokenizer,
            stop=stop,
            from_leader=runtime.from_leader,
            resume=resume,
            phases=None if scheduler is None else Phases(scheduler, roles, config, runtime.from_leader),
        )
        console.begin(state.step, steps)
        last = loop.run()
        if runtime.leads:
            _finish(config, folder, tracker, console, roles, state, last or _last_validation(folder.metrics))
    return 0


def evaluate(loaded: LoadedConfig) -> int:
    """Validate the model once (`trainer.val_only`, `verl eval`). Metrics and samples go to `eval/` in the run folder, beside
    whatever a training run left there."""
    config = loaded.config
    with ExitStack() as stack:
        runtime = stack.enter_context(open_runtime(config))
        folder = stack.enter_context(_folder(runtime, Path(config.trainer.default_local_dir) / "eval"))
        console = stack.enter_context(_console(runtime))
        data = load_data(config, train=False)
        if data.validation is None:
            raise ConfigError("Evaluation needs data.val_files; it is empty.")
        tracker = _tracker(stack, loaded, folder, runtime)
        roles = runtime.build_roles(total_steps=1, data_sources=data.data_sources, train=False)
        stack.callback(roles.close)
        metrics = Validator(config, roles, data.validation, data.tokenizer, tracker).run(0)
        if not runtime.leads:
            return 0
        tracker.log(metrics, 0)
        (folder.root / "eval.json").write_text(json.dumps(metrics, indent=2, sort_keys=True))
        console.validation(None, metrics)
        log.info("Every figure is in %s, the samples are in %s.", folder.root / "eval.json", folder.samples)
    return 0


def generate(loaded: LoadedConfig, output: Path) -> int:
    """Sample from the prompts of data.val_files as rollout.* says, and write the samples with their scores to `output`."""
    config = loaded.config
    if output.is_dir():
        raise ConfigError(f"The output {output} is a folder; name a file to write the samples to.")
    data = load_data(config, train=False)
    if data.validation is None:
        raise ConfigError("Generation needs prompts: set data.val_files.")
    with open_runtime(config) as runtime:
        roles = runtime.build_roles(total_steps=1, data_sources=data.data_sources, train=False)
        try:
            _write_samples(config, roles, data, output if runtime.leads else Path(os.devnull))
        finally:
            roles.close()
    return 0


def _write_samples(config: VerlConfig, roles: Roles, data: RunData, output: Path) -> None:
    """One JSON line a sample; into a .parquet file the rows of the data, each with its `responses`."""
    assert data.validation is not None
    output.parent.mkdir(parents=True, exist_ok=True)
    if output.suffix == ".parquet":
        responses: dict[int, list[str]] = {}
        for row in _samples(config, roles, data):
            responses.setdefault(row["ordinal"], []).append(row["response"])
        write_parquet(output, [{**data.validation.row(n), "responses": texts} for n, texts in responses.items()])
        return
    writes = output != Path(os.devnull)
    unfinished = output.with_name(f"{output.name}.part") if writes else output
    with unfinished.open("w", encoding="utf-8") as file:
        for row in _samples(config, roles, data):
            file.write(json_text(row) + "\n")
    if writes:
        unfinished.replace(output)


def _samples(config: VerlConfig, roles: Roles, data: RunData) -> Iterator[dict[str, Any]]:
    """A row for each sample of the validation prompts, with its score, prompt by prompt."""
    assert data.validation is not None
    params = sampling_params(config.actor_rollout_ref.rollout)
    for prompts in data.validation:
        batch = draw(roles.rollout, prompts, params, step=VALIDATION_STEP, split="generate")
        yield from sample_rows(batch.union(roles.reward.collect(batch)), data.tokenizer)


def _folder(runtime: Runtime, root: str | Path) -> Any:
    root = Path(root).expanduser()
    return RunFolder(root) if runtime.leads else FollowerFolder(root, runtime.rank)


def _console(runtime: Runtime, steps: bool = True) -> Any:
    return Console(steps=steps) if runtime.leads else Follower()


def _tracker(stack: ExitStack, loaded: LoadedConfig, folder: Any, runtime: Runtime) -> Any:
    if not runtime.leads:
        return Follower()
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
        )
    )


def _facts(
    loaded: LoadedConfig, roles: Roles, data: RunData, steps: int, folder: RunFolder, state: TrainerState
) -> dict[str, Any]:
    config = loaded.config
    group, algorithm = config.actor_rollout_ref, config.algorithm
    return {
        "model": group.model.path,
        **roles.facts,
        "algorithm": f"{algorithm.adv_estimator}, {group.actor.policy_loss.loss_mode} loss",
        "roles": ", ".join(["rollout", "reward", *roles.trained(), *(["reference"] if roles.reference else [])]),
        "training prompts": data.train.num_rows if data.train else 0,
        "validation prompts": data.validation.num_rows if data.validation else 0,
        "batch": f"{config.data.train_batch_size} prompts x {group.rollout.n} samples",
        "steps": f"{state.step + 1} to {steps}" if 0 < state.step < steps else f"{steps}",
        "checkpoints": _saves(config.trainer.save_freq),
        "run folder": str(folder.root),
        "notices": loaded.notices,
    }


def _say_how_it_goes_on(loaded: LoadedConfig, folder: RunFolder, state: TrainerState, steps: int) -> None:
    """What is worth knowing about a run that was there before."""
    changed = changed_keys(loaded, folder.root) if state.step else []
    if changed:
        log.warning("The run goes on with other settings than before: %s.", "; ".join(changed))
    if state.step >= steps:
        log.warning(
            "The run in %s has taken all of its %d steps: nothing is left to do. To go on, raise trainer.total_epochs or "
            "trainer.total_training_steps; for a new run, choose another trainer.experiment_name or "
            "trainer.default_local_dir, or set trainer.resume_mode=disable.",
            folder.root,
            steps,
        )


def _last_validation(metrics_file: Path) -> dict[str, float]:
    """The metrics of the last validation after a step: for a run that has nothing left to do."""
    rows = [row for row in read_rows(metrics_file) if row.get("step", 0) > 0 and "val/reward" in row]
    return rows[-1] if rows else {}


def _saves(every: int) -> str:
    if every > 0:
        return f"every {every} steps and at the end" if every > 1 else "every step"
    return "only when interrupted; with trainer.save_freq above 0 the trained model is kept"


def _finish(
    config: VerlConfig,
    folder: RunFolder,
    tracker: Tracker,
    console: Console,
    roles: Roles,
    state: TrainerState,
    last: dict[str, float],
) -> None:
    """Summary, learning curve, closing table."""
    first = state.first_validation
    summary = Summary.of_run(
        reward_before=first.get("val/reward"),
        reward_after=last.get("val/reward"),
        greedy_before=first.get("val/greedy"),
        greedy_after=last.get("val/greedy"),
        steps=state.step,
        seconds=state.seconds,
        num_tokens=state.num_tokens,
        device=roles.facts["device"],
        batch_invariant=roles.facts.get("batch_invariant"),
        metrics_file=folder.metrics,
    )
    tracker.finish(summary)
    draw_learning_curve(folder)
    validation = sampling_params(config.actor_rollout_ref.rollout, validation=True)
    console.final(summary, sampled=validation.temperature > 0)
    trained = folder.root / f"global_step_{state.step}" / "actor" / "huggingface"
    if trained.is_dir():
        log.info("The trained model is %s; `verl show %s` says where the time went.", trained, folder.root)
