"""Reward managers of the older contract: `manager(batch, return_dict)` puts a score on the last token of each response.

    manager = NaiveRewardManager(tokenizer, num_examine=0, compute_score=my_function)
    manager(batch)                      # float [batch, response]
    manager(batch, return_dict=True)    # {"reward_tensor": ..., "reward_extra_info": {"acc": [...], ...}}

They call the function in this process; a run calls it in worker processes with limits (verl/rewards/).
"""

import functools
import logging
import sys
from abc import ABC, abstractmethod
from collections import defaultdict
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch

from verl.compat.sections import loaded_config, names_of_caller
from verl.data_proto.proto import DataProto
from verl.data_proto.tokenizer import Tokenizer
from verl.errors import ConfigError
from verl.registry import RegistryMapping, load_object
from verl.rewards.functions import RewardFunctionSpec, finished, load_reward_function
from verl.rewards.managers import REWARD_MANAGERS, function_spec
from verl.rewards.managers.build import settings_of_manager
from verl.rewards.managers.dapo import OverlongBuffer, overlong_penalty
from verl.rewards.scorers.route import default_compute_score

log = logging.getLogger(__name__)

RawRewardFn = Callable[..., Any]


class AbstractRewardManager(ABC):
    """Base of a script's own manager."""

    @abstractmethod
    def __init__(
        self,
        tokenizer: Tokenizer,
        num_examine: int,
        compute_score: RawRewardFn | None,
        reward_fn_key: str = "data_source",
        **kwargs: object,
    ): ...

    @abstractmethod
    def __call__(self, data: DataProto, return_dict: bool = False) -> torch.Tensor | dict[str, Any]: ...

    def _extract_reward_from_rm_scores(
        self, data: DataProto, return_dict: bool = False
    ) -> torch.Tensor | dict[str, object] | None:
        """The column `rm_scores` of a batch that is already scored; None without it."""
        if data.batch is None or "rm_scores" not in data.batch.keys():
            return None
        names = data.meta_info.get("reward_extra_keys", [])
        extra = {name: data.non_tensor_batch[name] for name in names}
        scores = data.batch["rm_scores"]
        return {"reward_tensor": scores, "reward_extra_info": extra} if return_dict else scores


@dataclass(eq=False)
class NaiveRewardManager(AbstractRewardManager):
    """One call of `compute_score(data_source=, solution_str=, ground_truth=, extra_info=)` per row; by default the
    built-in scorer of the row's data source. The first `num_examine` rows of each source are logged."""

    tokenizer: Tokenizer
    num_examine: int = 0
    compute_score: Any = None
    reward_fn_key: str = "data_source"

    def __post_init__(self) -> None:
        self.compute_score = self.compute_score or default_compute_score

    def __call__(self, data: DataProto, return_dict: bool = False) -> torch.Tensor | dict[str, object]:
        done = self._extract_reward_from_rm_scores(data, return_dict)
        if done is not None:
            return done
        rewards = torch.zeros_like(data.batch["responses"], dtype=torch.float32)
        reported: list[Mapping[str, object]] = []
        counts: dict[str, int] = defaultdict(int)
        rows = [self._row(data[i]) for i in range(len(data))]
        for i, (row, result) in enumerate(zip(rows, self._score(rows), strict=True)):
            entries = dict(result) if isinstance(result, Mapping) else {"score": float(result)}
            score = self._shape(float(entries["score"]), row["response_length"], entries)
            reported.append(entries if isinstance(result, Mapping) else {})
            if row["response_length"]:  # an empty response has no token for it
                rewards[i, row["response_length"] - 1] = score
            counts[row["data_source"]] += 1
            if counts[row["data_source"]] <= self.num_examine:
                log.info("[%s] %s -> %s: score %s", row["data_source"], row["prompt"], row["solution_str"], score)
        names = dict.fromkeys(name for entries in reported for name in entries)
        extra = {name: [entries.get(name) for entries in reported] for name in names}
        return {"reward_tensor": rewards, "reward_extra_info": extra} if return_dict else rewards

    def _row(self, item: Any) -> dict[str, Any]:
        columns, objects = item.batch, item.non_tensor_batch
        width = columns["prompts"].shape[-1]
        mask = columns["attention_mask"].bool()
        prompt, response = columns["prompts"][mask[:width]], columns["responses"][mask[width:]]
        extra = dict(objects.get("extra_info") or {})
        extra["num_turns"] = objects.get("__num_turns__")
        extra["rollout_reward_scores"] = objects.get("reward_scores", {})
        return {
            "data_source": objects[self.reward_fn_key],
            "solution_str": self.tokenizer.decode(response, skip_special_tokens=True),
            "ground_truth": objects["reward_model"]["ground_truth"],
            "extra_info": extra,
            "prompt": self.tokenizer.decode(prompt, skip_special_tokens=True),
            "response_length": len(response),
        }

    def _score(self, rows: Sequence[Mapping[str, object]]) -> list[Any]:
        arguments = ("data_source", "solution_str", "ground_truth", "extra_info")
        return [finished(self.compute_score(**{name: row[name] for name in arguments})) for row in rows]

    def _shape(self, score: float, response_length: int, entries: dict[str, object]) -> float:
        """The final score; entries added to `entries` are returned as extra info."""
        return score


class BatchRewardManager(NaiveRewardManager):
    """One call with lists over all rows: data_sources, solution_strs, ground_truths, extra_infos, and `reward_kwargs`."""

    def __init__(
        self,
        tokenizer: Tokenizer,
        num_examine: int = 0,
        compute_score: RawRewardFn | None = None,
        reward_fn_key: str = "data_source",
        **reward_kwargs: object,
    ):
        if compute_score is None:
            raise ConfigError("The reward manager batch needs a compute_score function that takes lists.")
        super().__init__(tokenizer, num_examine, compute_score, reward_fn_key)
        self.reward_kwargs = reward_kwargs

    def _score(self, rows: Sequence[Mapping[str, object]]) -> list[Any]:
        names = ("data_source", "solution_str", "ground_truth", "extra_info")
        lists = {f"{name}s": [row[name] for row in rows] for name in names}
        return list(finished(self.compute_score(**lists, **self.reward_kwargs)))


PrimeRewardManager = NaiveRewardManager  # `verl train` scores in parallel with either


@dataclass(eq=False)
class DAPORewardManager(NaiveRewardManager):
    """Naive, minus the penalty of overlong replies (`overlong_buffer_cfg`, `max_resp_len`)."""

    max_resp_len: int | None = None
    overlong_buffer_cfg: Any = None

    def __post_init__(self) -> None:
        super().__post_init__()
        self.buffer = OverlongBuffer(**dict(self.overlong_buffer_cfg or {}))
        if self.buffer.enable and not 0 < self.buffer.len <= (self.max_resp_len or 0):
            raise ConfigError(f"overlong_buffer_cfg.len={self.buffer.len} needs a max_resp_len of at least that.")

    def _shape(self, score: float, response_length: int, entries: dict[str, object]) -> float:
        if not self.buffer.enable:
            return score
        penalty = overlong_penalty(response_length, self.max_resp_len or 0, self.buffer)
        if self.buffer.log:
            entries.update(overlong_reward=penalty, overlong=penalty < 0)
        return score + penalty


REWARD_MANAGER_REGISTRY = RegistryMapping(
    REWARD_MANAGERS,
    {
        **dict.fromkeys(("naive", "prime", "gdpo"), NaiveRewardManager),
        "batch": BatchRewardManager,
        "dapo": DAPORewardManager,
    },
)

register = REWARD_MANAGERS.register


def get_reward_manager_cls(name: str) -> Any:
    """The manager class `name`, built into this contract or registered by a script. Raises NameConfigError."""
    return REWARD_MANAGER_REGISTRY[name]


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
    """The reward manager of a complete config, to be called as `manager(batch, return_dict=True)`: the class that
    `reward.reward_manager` names, with the config's function and `reward_kwargs`. Raises ConfigError or RewardError."""
    complete = loaded_config(config, reads=names_of_caller(sys._getframe(1).f_globals)).config
    reward, chosen = complete.reward, complete.reward.reward_manager
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
        reward_fn_key=complete.data.reward_fn_key,
        **{**settings_of_manager(reward), **reward_kwargs},
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


def _remote_score(
    data: DataProto,
    config: object = None,
    tokenizer: Tokenizer | None = None,
    reward_fn: AbstractRewardManager | None = None,
) -> tuple[torch.Tensor, dict[str, object]]:
    return compute_reward(data, load_reward_manager(config, tokenizer) if reward_fn is None else reward_fn)


class _Remote:
    """`compute_reward` in a Ray worker: `.remote(data, config, tokenizer)` or `.remote(data, reward_fn=manager)`."""

    def remote(self, *args: object, **kwargs: object) -> Any:
        from verl.compat.ray_worker_group import remote_function

        return remote_function(_remote_score, num_cpus=1).remote(*args, **kwargs)


compute_reward_async = _Remote()


def _section(config: object, *names: str) -> Any:
    for name in names:
        config = config.get(name) if isinstance(config, Mapping) else getattr(config, name, None)
        if config is None:
            return None
    return config
