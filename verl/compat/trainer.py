"""`PPOTrainer`, `RLTrainer`, `RayPPOTrainer`, `TaskRunner` and `run_ppo`: training with a config from Python.

The program builds workers, loaders and rewards from the config. Arguments and overridden methods that it would not use are
refused by name.
"""

from __future__ import annotations

import inspect
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

from verl.errors import ConfigError
from verl.families import SINKS
from verl.run.steps import SteppedRun

if TYPE_CHECKING:
    from verl.config import PPOConfig

# methods of the other releases' trainer that scripts override
_TRAINER_HOOKS = (
    "_balance_batch", "_compute_advantage", "_compute_old_log_prob", "_compute_or_extract_reward", "_compute_ref_log_prob",
    "_compute_reward_colocate", "_compute_values", "_create_dataloader", "_create_worker_classes", "_dump_generations",
    "_get_gen_batch", "_init_models", "_init_resource_pools", "_load_checkpoint", "_log_rollout_data",
    "_maybe_log_val_generations", "_post_fit", "_save_checkpoint", "_start_profiling", "_stop_profiling", "_update_actor",
    "_update_critic", "_validate", "_validate_config",
)  # fmt: skip
_RUNNER_HOOKS = (
    "add_actor_rollout_worker", "add_critic_worker", "add_ref_policy_worker", "add_reward_model_resource_pool",
    "add_reward_model_worker", "add_teacher_model_resource_pool", "init_resource_pool_mgr",
)  # fmt: skip
_INSTEAD = (
    "The program builds workers, loaders and rewards from the config. Register a function (register_adv_est, "
    "register_policy_loss, custom_reward_function.path, data.custom_cls.path), or write a program: verl/programs/ppo.py."
)
# names of the phases of a step in articles about verl -> spans here
_SEED_SPANS = {"rollout_step": "gen", "reward_fn": "reward"}


class RayPPOTrainer:
    """`fit()` trains by the config, on the runtime that it names.

    `tokenizer`, `processor`, `collate_fn` and the resource pools are ignored: the program builds its own. Raises ConfigError
    for worker classes, rewards or samplers of the script and for overridden methods: they would not be used.
    """

    def __init__(
        self,
        config: object,
        tokenizer: Any = None,
        role_worker_mapping: dict[Any, Any] | None = None,
        resource_pool_manager: Any = None,
        ray_worker_group_cls: Any = None,
        processor: Any = None,
        reward_fn: Any = None,
        val_reward_fn: Any = None,
        train_dataset: Any = None,
        val_dataset: Any = None,
        collate_fn: Any = None,
        train_sampler: Any = None,
        device_name: str | None = None,
        **other: Any,
    ):
        from verl.compat.sections import loaded_config

        _refuse_overrides(self, RayPPOTrainer, _TRAINER_HOOKS)
        if other:
            raise ConfigError(f"RayPPOTrainer has no argument {next(iter(other))!r} here. {_INSTEAD}")
        self.config = config
        self.tokenizer = tokenizer
        self.processor = processor
        self.resource_pool_manager = resource_pool_manager
        self._loaded = loaded_config(config)
        self._refuse_own_parts(role_worker_mapping or {}, (reward_fn, val_reward_fn), train_sampler)
        self._refuse_own_rows(train_dataset, val_dataset)

    def init_workers(self) -> None:
        """No effect: `fit` starts and ends the workers."""

    def fit(self) -> None:
        """Train. Raises the errors of `verl train`; call it again to resume an interrupted run."""
        from verl.run.host import train

        train(self._loaded)

    def __getattr__(self, name: str) -> Any:
        if name.startswith("__"):
            raise AttributeError(name)
        raise AttributeError(f"RayPPOTrainer has no {name!r} here. {_INSTEAD}")

    def _refuse_own_parts(self, workers: dict[Any, Any], rewards: tuple[Any, ...], sampler: Any) -> None:
        from torch.utils.data import RandomSampler, SequentialSampler

        from verl.compat.reward_managers import NaiveRewardManager

        own = [
            cls for cls in map(_undecorated, workers.values()) if not getattr(cls, "__module__", "").startswith("verl.")
        ]
        if own:
            raise ConfigError(f"The worker class {own[0].__name__} would not be used. {_INSTEAD}")
        for reward in rewards:
            if reward is not None and type(reward).__module__ != NaiveRewardManager.__module__:
                raise ConfigError(f"The reward_fn {reward!r} would not be called. {_INSTEAD}")
        if sampler is not None and not isinstance(sampler, (RandomSampler, SequentialSampler)):
            raise ConfigError(f"The sampler {type(sampler).__name__} would not be used. {_INSTEAD}")

    def _refuse_own_rows(self, *datasets: Any) -> None:
        from verl.data.dataset import dataset_class

        expected_class = dataset_class(self._loaded.config.data)
        for dataset in datasets:
            if dataset is not None and type(dataset) is not expected_class:
                raise ConfigError(
                    f"The rows of {type(dataset).__name__} would not be used. Set data.custom_cls.path and .name to it."
                )


class RLTrainer(SteppedRun):
    """A run that is taken step by step: `with RLTrainer(config) as trainer: trainer.step()`.

    `config` is a list of `key=value` texts, a tree (OmegaConf, a dict, dataclasses of verl.config), or what load_config
    returns; `log_with` names trackers in addition to trainer.logger. `reward_fn` is a compute_score function of a file, which
    reward processes load from the file: a script that names its own function starts below `if __name__ == "__main__"`. Raises
    the errors of `verl train`.
    """

    def __init__(
        self,
        config: object = (),
        *,
        log_with: str | list[str] | None = None,
        reward_fn: Callable[..., Any] | None = None,
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
        """The typed config tree."""
        return self.loaded.config

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


class TaskRunner:
    """`run(config)` trains. Overridden methods that choose workers are refused: they would not be called."""

    def run(self, config: object) -> None:
        """Train by `config`. Raises the errors of `verl train`."""
        from verl.compat.sections import loaded_config
        from verl.run.host import train

        _refuse_overrides(self, TaskRunner, _RUNNER_HOOKS)
        train(loaded_config(config))

    def __getattr__(self, name: str) -> Any:
        if name in _RUNNER_HOOKS:
            raise AttributeError(f"TaskRunner has no {name!r} here. {_INSTEAD}")
        raise AttributeError(name)


def run_ppo(config: object, task_runner_class: Any = None) -> None:
    """Train by `config` (OmegaConf, a dict or dataclasses of verl.config), on the runtime that it names.
    `task_runner_class` is TaskRunner or a subclass, also one made by `ray.remote`. Raises the errors of `verl train`."""
    runner = _undecorated(task_runner_class) if task_runner_class is not None else TaskRunner
    runner().run(config)


def _with_reward(config: PPOConfig, reward_fn: Callable[..., Any]) -> PPOConfig:
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


def _undecorated(cls: Any) -> Any:
    """The class that `ray.remote` has wrapped."""
    return getattr(getattr(cls, "__ray_metadata__", None), "modified_class", cls)


def _refuse_overrides(obj: Any, base: type, hooks: tuple[str, ...]) -> None:
    for cls in type(obj).__mro__[: type(obj).__mro__.index(base)]:
        for name in hooks:
            if name in vars(cls):
                raise ConfigError(f"{cls.__name__}.{name} would not be called. {_INSTEAD}")
