"""Build the reward manager and its pool from the config section `reward`."""

from __future__ import annotations

import dataclasses
import inspect
from collections.abc import Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

from verl.errors import ConfigError
from verl.families import REWARD_MANAGERS, engine_facts
from verl.registry import load_object
from verl.rewards.functions import (
    FUNCTION_LIST,
    MODEL_REPLY,
    MODEL_SCORE,
    RewardFunctionSpec,
    service_arguments,
    takes_completions,
)
from verl.rewards.managers.naive import RewardManager
from verl.rewards.pool import DebugPool, RewardPool
from verl.rewards.sandbox.limits import Limits

if TYPE_CHECKING:
    from verl.config import RewardConfig


def build_reward_manager(
    config: RewardConfig, *, max_response_length: int, log_dir: str | Path | None = None, parts: Sequence[str] = ()
) -> RewardManager:
    """The manager named by `reward.reward_manager`, with a pool that is not started. `max_response_length`: tokens. `parts`:
    numbers that the function must return in addition to the score. Raises ConfigError."""
    manager = manager_class(config)
    kwargs = _plain(settings_of_manager(config))
    try:
        inspect.signature(manager).bind(None, max_response_length=max_response_length, **kwargs)
    except TypeError as error:
        raise ConfigError(
            f"The reward manager {config.reward_manager.name!r} does not take reward.reward_kwargs={kwargs}: {error}."
        ) from error
    pool = build_pool(config, log_dir=log_dir, parts=parts)
    return manager(pool, max_response_length=max_response_length, **kwargs)  # type: ignore[no-any-return]


def settings_of_manager(config: RewardConfig) -> dict[str, Any]:
    """reward.reward_kwargs without the sections that recipes have there for other managers, under the manager's name."""
    managers = set(REWARD_MANAGERS) - {config.reward_manager.name}
    return {name: value for name, value in (config.reward_kwargs or {}).items() if name not in managers}


def build_pool(
    config: RewardConfig, *, log_dir: str | Path | None = None, parts: Sequence[str] = (), by_position: bool = False
) -> RewardPool:
    """The pool of the config's function and manager, not started; `by_position`: see RewardFunctionSpec."""
    spec = function_spec(config, batched=getattr(manager_class(config), "batched", False))
    pool = DebugPool if config.debug else RewardPool
    return pool(
        dataclasses.replace(spec, parts=tuple(parts), by_position=by_position),
        num_workers=config.num_workers,
        timeout_s=config.timeout_s,
        memory_mb=config.memory_mb,
        limits=Limits(
            cpu_s=2 * config.timeout_s if config.cpu_s is None else config.cpu_s,
            max_file_mb=config.max_file_mb,
            max_open_files=config.max_open_files,
            max_processes=config.max_processes,
            network=config.network,
            max_output_kb=config.max_output_kb,
            max_result_kb=config.max_result_kb,
            max_parts=config.max_parts,
            max_abs_score=config.max_abs_score,
        ),
        process_per_sample=config.process_per_sample,
        default_score=config.default_score,
        log_dir=log_dir,
    )


def function_spec(config: RewardConfig, *, batched: bool = False) -> RewardFunctionSpec:
    """The function of `reward.custom_reward_function`. Without a path: a function that returns the output of the reward
    model, or without a reward model the built-in scorers."""
    custom, model = config.custom_reward_function, config.reward_model
    argument = (MODEL_REPLY if model.judge_template else MODEL_SCORE)[batched] if model.enable else None
    if custom.path:
        name, kwargs = custom.name or "compute_score", _plain(custom.reward_kwargs or {})
        if not model.enable and takes_completions(custom.path, name):
            kwargs = {"functions": [f"{custom.path.removeprefix('file://')}:{name}"], "arguments": kwargs}
            return RewardFunctionSpec(FUNCTION_LIST, "score_lists" if batched else "score_sample", kwargs, batched)
        if model.enable and (arguments := service_arguments(custom.path, name) - set(kwargs)):
            return _served(config, RewardFunctionSpec(custom.path, name, kwargs, batched), arguments)
        return RewardFunctionSpec(custom.path, name, kwargs, batched, argument)
    if model.enable:
        name = ("last_number" if model.judge_template else "model_score") + ("s" if batched else "")
        return RewardFunctionSpec("verl.rewards.model_score", name, batched=batched, from_model=argument)
    sandbox = {"sandbox_fusion_url": config.sandbox_fusion.url} if config.sandbox_fusion.url else {}
    return RewardFunctionSpec(None, kwargs=sandbox, batched=batched)


def _served(config: RewardConfig, spec: RewardFunctionSpec, names: set[str]) -> RewardFunctionSpec:
    """A function that asks the service of the reward model itself by the arguments `names`: one at service.url, or the run's
    own, whose address is there once it serves. Raises ConfigError for a service that the function cannot reach."""
    model = config.reward_model
    if not serves_judge(config) and not (model.rollout.service.url and config.network):
        raise ConfigError(
            f"The reward function {spec.label} has the parameter {min(names)}: it asks a service of the reward model itself. "
            "Set reward.reward_model.rollout.service.url to its address and reward.network=True, or "
            "leave out reward.reward_model.rollout.name: then the run serves it."
        )
    address = model.rollout.service.url.rstrip("/").removesuffix("/v1").partition("://")[2]
    kwargs = {**spec.kwargs, **({"reward_router_address": address} if "reward_router_address" in names else {})}
    return replace(spec, kwargs=kwargs, tokenizer=model.model_path if "reward_model_tokenizer" in names else None)


def asks_service(config: RewardConfig) -> bool:
    """Whether the reward function asks the service of the reward model itself, so that no reward model runs here."""
    custom = config.custom_reward_function
    return bool(custom.path) and bool(service_arguments(str(custom.path), custom.name or "compute_score"))


def serves_judge(config: RewardConfig) -> bool:
    """Whether the run serves its reward model to a reward function that asks for it: if that is at no other service."""
    model = config.reward_model
    facts = engine_facts(model.rollout.name)
    is_default = model.rollout.service.url == type(model.rollout.service)().url
    is_elsewhere = facts.asks_service and not (facts.starts_process and is_default)
    return model.enable and not is_elsewhere and asks_service(config)


def is_called(manager: object) -> bool:
    """Whether a manager is of other releases' contract: `manager(batch, return_dict)`."""
    return "__call__" in dir(manager) and not hasattr(manager, "submit")


def manager_class(config: RewardConfig) -> Any:
    """The class that `reward.reward_manager` names. A function of TRL's form gets all samples at once. Raises ConfigError."""
    chosen, custom = config.reward_manager, config.custom_reward_function
    if chosen.source == "importlib":
        if not chosen.module.path:
            raise ConfigError(
                "reward.reward_manager.source=importlib needs reward.reward_manager.module.path, a file or module."
            )
        manager = load_object(f"{chosen.module.path}:{chosen.name}")
    else:
        is_trl = chosen.name == "naive" and takes_completions(custom.path, custom.name or "compute_score")
        manager = REWARD_MANAGERS.get("batch" if is_trl else chosen.name)
    if is_called(manager):
        return manager
    missing = [m for m in ("start", "submit", "collect", "score", "close") if not callable(getattr(manager, m, None))]
    if missing:
        raise ConfigError(
            f"The reward manager {chosen.name!r} has no method {missing[0]!r}: subclass NaiveRewardManager and "
            "override `shape`, or write a class with __call__(batch, return_dict)."
        )
    return manager


def _plain(value: object) -> Any:
    """Config containers as plain dicts and lists, since they travel to the workers as JSON."""
    if isinstance(value, Mapping):
        return {str(k): _plain(v) for k, v in value.items()}
    return [_plain(v) for v in value] if hasattr(value, "__iter__") and not isinstance(value, str) else value
