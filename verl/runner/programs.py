"""The programs of RLRunner: SFT and PPO with transformers' callbacks, and rewards of the script.

The script's objects do not pass through the config: `Script.current` holds them in the process that runs the program.
"""

from __future__ import annotations

import builtins
import math
import os
import shutil
import threading
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, ClassVar

from verl.config import PPOConfig
from verl.data_proto.samples import Score, ScoreRequest
from verl.errors import ConfigError, RewardError
from verl.parallel.torch_settings import run_settings
from verl.programs.api import Program, StepResult
from verl.programs.ppo import PPO
from verl.programs.ppo_async import AsyncPPO
from verl.programs.preference import PreferenceOptimization
from verl.programs.reward_model import RewardModelProgram
from verl.programs.sft import SFT
from verl.rewards.functions import name_of, require_distinct, results_of
from verl.rewards.pool import RewardPool

_LOGGED = {
    "loss": ("train/loss", "actor/loss"), "grad_norm": ("train/grad_norm", "actor/grad_norm"),
    "learning_rate": ("train/lr", "actor/lr"), "mean_token_accuracy": ("train/token_accuracy", "train/mean_token_accuracy"),
    "entropy": ("train/entropy", "actor/entropy"), "reward": ("critic/score/mean",), "kl": ("actor/kl_loss",),
    "completions/mean_length": ("response_length/mean",),
}  # fmt: skip
_PAIRS = [f"{name}/{side}" for name in ("rewards", "logps", "logits") for side in ("chosen", "rejected")]
_LOGGED |= {name: (f"train/{name}",) for name in (*_PAIRS, "rewards/accuracies", "rewards/margins")}


@dataclass
class Script:
    """Objects that a script has given to its RLRunner. `events` calls its callbacks (transformers' CallbackHandler)."""

    args: Any
    state: Any
    control: Any
    events: object
    steps_per_epoch: int
    reward_functions: list[Callable[..., object]] = field(default_factory=list)
    reward_weights: list[float] = field(default_factory=list)
    losses: list[float] = field(default_factory=list)  # of the steps since train began

    current: ClassVar[Script | None] = None
    _running: ClassVar[threading.RLock] = threading.RLock()

    @contextmanager
    def running(self) -> Iterator[None]:
        """For a run of this script. Another thread's run waits; in a callback the outer run continues afterwards."""
        with Script._running:
            before, Script.current = Script.current, self
            try:
                yield
            finally:
                Script.current = before

    def call(self, event: str, **values: object) -> None:
        """Call `event` of every callback; callbacks of transformers decide the actions that are due."""
        self.control = getattr(self.events, event)(self.args, self.state, self.control, **values)

    def log(self, metrics: Mapping[str, float]) -> None:
        """on_log with `metrics`; they join the history."""
        logs = {**metrics, "epoch": self.state.epoch}
        self.state.log_history.append({**logs, "step": self.state.global_step})
        self.call("on_log", logs=logs)

    def log_step(self, metrics: Mapping[str, float]) -> None:
        """Log the metrics of a step under transformers' and TRL's names, if that is due."""
        if self.control.should_log:
            names = {name: next((m for m in candidates if m in metrics), None) for name, candidates in _LOGGED.items()}
            self.log({name: metrics[metric] for name, metric in names.items() if metric})


class Processes:
    """The part of accelerate's Accelerator that scripts read from a trainer."""

    def __init__(self) -> None:
        self.process_index, self.num_processes = (
            int(os.environ.get(*pair)) for pair in (("RANK", "0"), ("WORLD_SIZE", "1"))
        )
        self.is_main_process = self.process_index == 0

    def print(self, *values: object, **settings: Any) -> None:
        """print, in the first process."""
        if self.is_main_process:
            builtins.print(*values, **settings)  # noqa: T201 - for the script


def current_script() -> Script:
    """The script of this process. Raises RuntimeError outside of RLRunner.train."""
    if Script.current is None:
        raise RuntimeError("verl.runner.programs is only for RLRunner.")
    return Script.current


class WithCallbacks(Program[Any]):
    """Calls the events of transformers' Trainer, in its order, around the steps of a program."""

    ends_with_checkpoint: ClassVar[bool] = False  # its callbacks decide

    @property
    def schedule(self) -> Mapping[str, str]:  # type: ignore[override]
        """See Program."""
        args = current_script().args
        evaluates, saves = (getattr(s, "value", s) for s in (args.eval_strategy, args.save_strategy))
        after = {} if evaluates == "no" else {"validation": f"eval_strategy={evaluates}"}
        return {**after, "checkpoints": f"save_strategy={saves}, and one at the end"}

    def step(self, step: int) -> StepResult:
        """See Program. Callbacks may end the run after this step."""
        script, state = current_script(), current_script().state
        if (step - 1) % script.steps_per_epoch == 0:
            script.call("on_epoch_begin")
        script.call("on_step_begin")
        with run_settings():  # against settings of callbacks
            result = super().step(step)  # type: ignore[safe-super]
        state.global_step, state.epoch = step, step / script.steps_per_epoch
        script.losses += [result.metrics[name] for name in _LOGGED["loss"] if name in result.metrics]
        script.call("on_step_end")
        script.log_step(result.metrics)
        if script.control.should_training_stop:
            self.data.num_steps = step  # type: ignore[attr-defined]
        if step % script.steps_per_epoch == 0 or step == self.data.num_steps:  # type: ignore[attr-defined]
            script.call("on_epoch_end")
            script.log_step(result.metrics)
        self._saved = False
        return result

    def validate(self, step: int) -> dict[str, float]:
        metrics = super().validate(step)  # type: ignore[safe-super]
        script = current_script()
        evaluation = {f"eval_{name.removeprefix('val/')}": value for name, value in metrics.items()}
        script.log(evaluation)
        script.call("on_evaluate", metrics=evaluation)
        return metrics

    @property
    def requests(self) -> frozenset[str]:  # type: ignore[override]
        """See Program. The last step is saved: the script's model takes its weights from there."""
        script = current_script()
        is_last = script.state.global_step == self.data.num_steps  # type: ignore[attr-defined]
        due = {"validation": script.control.should_evaluate, "checkpoint": script.control.should_save or is_last}
        return frozenset(name for name, holds in due.items() if holds)

    def state_dict(self) -> dict[str, object]:
        self._saved = True
        return super().state_dict()

    def step_done(self, step: int, metrics: Mapping[str, float]) -> None:
        super().step_done(step, metrics)
        script = current_script()
        if self._saved and self.run.is_rank_zero:  # type: ignore[attr-defined]
            _link_checkpoints(self.run.folder, step, script.state)  # type: ignore[attr-defined]
        if self._saved and script.control.should_save:
            script.call("on_save")


def resume_keys(choice: str | bool | None) -> dict[str, Any]:
    """The keys of an argument resume_from_checkpoint."""
    if not choice:
        return {"trainer.resume_mode": "disable"}
    if choice is True:
        return {"trainer.resume_mode": "auto"}
    path = Path(choice)
    path = path.with_name(path.name.replace("checkpoint-", "global_step_"))
    return {"trainer.resume_mode": "resume_path", "trainer.resume_from_path": path}


def refuse_other_checkpoints(folder: Path) -> None:
    """Raises ConfigError if `folder` has a checkpoint-N of another trainer."""
    foreign = []
    for path in _checkpoints(folder):
        files = list(path.iterdir())
        if files and not any(file.is_symlink() for file in files):  # callbacks may have added files to ours
            foreign.append(path.name)
    if foreign:
        raise ConfigError(
            f"The output_dir {folder} has checkpoints of another trainer, such as {foreign[0]}. Choose another output_dir."
        )


def _checkpoints(folder: Path) -> list[Path]:
    return [path for path in sorted(folder.glob("checkpoint-*")) if path.name[11:].isdigit() and path.is_dir()]


def _link_checkpoints(folder: Path, step: int, state: Any) -> None:
    """checkpoint-N for each global_step_N: links to the files of its model, and trainer_state.json."""
    for old in _checkpoints(folder):
        if not (folder / f"global_step_{old.name[11:]}").is_dir():
            shutil.rmtree(old)
    model = next((folder / f"global_step_{step}").glob("*/huggingface"), None)
    if model is None:
        return
    checkpoint = folder / f"checkpoint-{step}"
    shutil.rmtree(checkpoint, ignore_errors=True)
    checkpoint.mkdir()
    for file in model.iterdir():
        (checkpoint / file.name).symlink_to(Path("..") / file.relative_to(folder))
    state.save_to_json(str(checkpoint / "trainer_state.json"))


class RunnerSFT(WithCallbacks, SFT):  # type: ignore[misc]  # whose schedule is a constant
    """Supervised fine-tuning with callbacks."""


class RunnerPreference(WithCallbacks, PreferenceOptimization):
    """Preference optimization with callbacks."""


class RunnerRewardModel(WithCallbacks, RewardModelProgram):
    """Reward models with callbacks."""


class RunnerPPO(WithCallbacks, PPO):
    """PPO and GRPO with callbacks."""

    @classmethod
    def select(cls, config: PPOConfig) -> type[Program[Any]]:
        """See AsyncPPO. Raises ConfigError for another program than PPO."""
        if config.algorithm.program != "ppo":
            raise ConfigError(
                f"RLRunner calls no callbacks in algorithm.program={config.algorithm.program}; use `verl train`."
            )
        return RunnerAsyncPPO if config.actor_rollout_ref.rollout.prefetch_num > 0 else cls


class RunnerAsyncPPO(WithCallbacks, AsyncPPO):
    """The same with samples generated ahead."""


class ScriptRewards:
    """A reward manager that calls the functions of the script, in this process, with all samples that are collected together.
    TRL's functions get `completion_ids` and `trainer_state` too, if they take them. The sum of all, weighed by
    `reward_weights`, is the score; a sample without a number from any has none. Raises RewardError for a function that fails or
    returns another count."""

    def __init__(self, pool: RewardPool, *, max_response_length: int):
        self._requests: dict[str, ScoreRequest] = {}
        self.num_defaulted = 0

    def start(self, data_sources: Sequence[str] = ()) -> None:
        """Nothing to start."""

    def close(self) -> None:
        """Nothing to end."""

    def submit(self, request: ScoreRequest) -> None:
        self._requests[request.key] = request

    def collect(self, keys: Sequence[str]) -> dict[str, Score]:
        return dict(zip(keys, self.score([self._requests.pop(key) for key in keys]), strict=True))

    def score(self, requests: Sequence[ScoreRequest]) -> list[Score]:
        script = current_script()
        columns = {name_of(fn): _call(fn, requests) for fn in script.reward_functions}
        scores = []
        for request, *values in zip(requests, *columns.values(), strict=True):
            weighted = [
                w * v for w, v in zip(script.reward_weights, values, strict=True) if v is not None and not math.isnan(v)
            ]
            parts = {name: value for name, value in zip(columns, values, strict=True) if value is not None}
            error = (
                None if weighted else f"No reward function returned a number for sample {request.key}; it has no score."
            )
            self.num_defaulted += error is not None
            scores.append(Score(request.key, float(sum(weighted)), parts if len(columns) > 1 else {}, error))
        return scores


def _call(function: Callable[..., object], requests: Sequence[ScoreRequest]) -> list[float | None]:
    samples = [(r.data_source, r.solution_str, r.ground_truth, r.extra_info) for r in requests]
    state, ids = current_script().state, [list(r.response_ids) for r in requests]
    try:
        with run_settings():  # the function may change them
            results = results_of(function, samples, {"trainer_state": state, "completion_ids": ids})
        scores = [result["score"] if isinstance(result, Mapping) else result for result in results]
        return [None if score is None else float(score) for score in scores]
    except RewardError:
        raise
    except Exception as error:  # a user's function may raise anything
        raise RewardError(
            f"The reward function {name_of(function)} failed: {type(error).__name__}: {error}."
        ) from error


def reward_list(functions: object) -> list[Any]:
    """The reward functions of a script, given as one or as a list."""
    rewards = [] if functions is None else list(functions) if isinstance(functions, list | tuple) else [functions]
    require_distinct([reward for reward in rewards if callable(reward)])
    return rewards
