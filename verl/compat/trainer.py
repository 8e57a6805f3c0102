"""`PPOTrainer` and `RLTrainer`: training with a config from Python, step by step."""

from __future__ import annotations

import inspect
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

from verl.errors import ConfigError
from verl.families import SINKS
from verl.run.host import SteppedRun

if TYPE_CHECKING:
    from verl.config import PPOConfig
    from verl.programs.rollout_queue import RolloutQueue

# names of the phases of a step in articles about verl -> spans here
_SEED_SPANS = {"rollout_step": "gen", "reward_fn": "reward"}


class RLTrainer(SteppedRun):
    """A run that is taken step by step: `with RLTrainer(config) as trainer: trainer.step()`. `config` is a list of `key=value`
    texts, a tree, or what load_config returns; `log_with` names further trackers. `reward_fn` is a compute_score function of a
    file: a script that names its own starts below `if __name__ == "__main__"`. Raises the errors of `verl train`."""

    def __init__(
        self,
        config: object = (),
        *,
        log_with: str | list[str] | None = None,
        reward_fn: Callable[..., object] | None = None,
    ):
        from verl.compat.sections import loaded_config
        from verl.config import load_config

        loaded = load_config(list(config)) if isinstance(config, list | tuple) else loaded_config(config)
        if reward_fn is not None:
            loaded = replace(loaded, config=_with_reward(loaded.config, reward_fn))
        names = [log_with] if isinstance(log_with, str) else log_with or []
        if unknown := [name for name in names if name not in SINKS]:
            raise ConfigError(f"There is no tracker {unknown[0]!r} for log_with; there are {', '.join(SINKS)}.")
        trainer = loaded.config.trainer
        loggers = list(dict.fromkeys([*trainer.logger, *names]))
        super().__init__(replace(loaded, config=replace(loaded.config, trainer=replace(trainer, logger=loggers))))

    @property
    def config(self) -> Any:
        return self.loaded.config

    @property
    def rollout_queue(self) -> RolloutQueue | None:
        """The batches made ahead of training; None without rollout.prefetch_num."""
        return getattr(self.program, "rollout_queue", None)

    def step(self) -> dict[str, float] | None:
        """See SteppedRun. The metrics have share/rollout_step and share/reward_fn too, the parts of the step's time that
        generation and the wait for scores took."""
        metrics = super().step()
        if metrics is None:
            return None
        for name, span in _SEED_SPANS.items():
            metrics[f"share/{name}"] = metrics.get(f"timing_s/{span}", 0.0) / metrics["perf/time_per_step"]
        return metrics

    def train(self) -> None:
        """Take all steps that are left, and close."""
        with self:
            loop, finish = self._started()
            loop.run()
            finish()

    fit = train

    @property
    def program(self) -> Any:
        """The running program (verl/programs/ppo.py): `program.rollout_queue.qsize()` with rollout.prefetch_num."""
        return self._started()[0].program


class PPOTrainer(RLTrainer):
    """PPOTrainer(["data.train_files=train.jsonl", ...], log_with="tensorboard").train()"""


def _with_reward(config: PPOConfig, reward_fn: Callable[..., object]) -> PPOConfig:
    """`config` with a function of the script as its custom_reward_function. Raises ConfigError for one without a file."""
    name, function = getattr(reward_fn, "__qualname__", ""), config.reward.custom_reward_function
    try:
        path = inspect.getsourcefile(reward_fn)
    except TypeError:  # an object with __call__
        path = None
    if path is None or not Path(path).is_file() or not name.isidentifier():
        raise ConfigError(
            f"reward_fn={reward_fn!r} cannot be loaded by the reward processes: give a function at the top level of a file."
        )
    function = replace(function, path=path, name=name)
    return replace(config, reward=replace(config.reward, custom_reward_function=function))
