"""Reward managers and functions of a config, for a script's own batches: `verl.trainer.ppo.reward`."""

from __future__ import annotations

import functools
from collections.abc import Mapping
from typing import Any

import torch

from verl.compat.reward_managers import AbstractRewardManager, RawRewardFn, get_reward_manager_cls
from verl.compat.sections import loaded_config
from verl.data_proto.proto import DataProto
from verl.data_proto.tokenizer import Tokenizer
from verl.registry import load_object
from verl.rewards.functions import RewardFunctionSpec, load_reward_function
from verl.rewards.managers import function_spec


def get_custom_reward_fn(config: object) -> RawRewardFn | None:
    """The function of `reward.custom_reward_function` (or the older `custom_reward_function`) with its reward_kwargs; None
    without a path. Raises RewardError when it cannot be loaded or called."""
    section = _section(config, "reward", "custom_reward_function") or _section(config, "custom_reward_function") or {}
    if not section.get("path"):
        return None
    kwargs = dict(section.get("reward_kwargs") or {})
    name = section.get("name") or "compute_score"
    function = load_reward_function(RewardFunctionSpec(section["path"], name, kwargs))
    return functools.wraps(function)(functools.partial(function, **kwargs)) if kwargs else function


def load_reward_manager(
    config: object, tokenizer: Tokenizer | None, num_examine: int = 0, **reward_kwargs: object
) -> Any:
    """The reward manager of a whole config, to be called as `manager(batch, return_dict=True)`: the class that
    `reward.reward_manager` names, with the config's function and `reward_kwargs`. Raises ConfigError or RewardError."""
    whole = loaded_config(config).config
    reward, chosen = whole.reward, whole.reward.reward_manager
    if chosen.source == "importlib":
        manager_class = load_object(f"{chosen.module.path}:{chosen.name}")
    else:
        manager_class = get_reward_manager_cls(chosen.name)
    spec = function_spec(reward, batched=chosen.name == "batch")
    function = load_reward_function(spec)
    bound = functools.partial(function, **spec.kwargs) if spec.kwargs else function
    return manager_class(
        tokenizer=tokenizer,
        num_examine=num_examine,
        compute_score=bound,
        reward_fn_key=whole.data.reward_fn_key,
        **{**dict(reward.reward_kwargs or {}), **reward_kwargs},
    )


def compute_reward(data: DataProto, reward_fn: AbstractRewardManager | None) -> tuple[torch.Tensor, dict[str, Any]]:
    """(rewards [batch, response], other results of the function: name -> one value per row). Without a function: the scores
    that the batch has."""
    if reward_fn is None:
        return extract_reward(data)
    outputs: Any = reward_fn(data, return_dict=True)
    return outputs["reward_tensor"], dict(outputs.get("reward_extra_info", {}))


def extract_reward(batch: DataProto) -> tuple[torch.Tensor, dict[str, Any]]:
    """The same results of a batch that is already scored, from its column `rm_scores`."""
    names = batch.meta_info.get("reward_extra_keys", [])
    return batch.batch["rm_scores"], {name: batch.non_tensor_batch[name] for name in names}


def _score(
    data: DataProto,
    config: object = None,
    tokenizer: Tokenizer | None = None,
    reward_fn: AbstractRewardManager | None = None,
) -> tuple[torch.Tensor, dict[str, object]]:
    return compute_reward(data, load_reward_manager(config, tokenizer) if reward_fn is None else reward_fn)


class _Remote:
    """`compute_reward_async.remote(data, config, tokenizer)` or `.remote(data, reward_fn=manager)`: `compute_reward` in a
    Ray worker; `ray.get` waits for it."""

    def remote(self, *args: object, **kwargs: object) -> Any:
        from verl.runtime.ray_worker_group import remote_function

        return remote_function(_score, num_cpus=1).remote(*args, **kwargs)


compute_reward_async = _Remote()


def _section(config: object, *names: str) -> Any:
    for name in names:
        config = config.get(name) if isinstance(config, Mapping) else getattr(config, name, None)
        if config is None:
            return None
    return config
