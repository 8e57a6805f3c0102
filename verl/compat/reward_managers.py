"""Reward managers of the older contract: `manager(batch, return_dict)` puts a score on the last token of each response.

    manager = NaiveRewardManager(tokenizer, num_examine=0, compute_score=my_function)
    manager(batch)                      # float [batch, response]
    manager(batch, return_dict=True)    # {"reward_tensor": ..., "reward_extra_info": {"acc": [...], ...}}

They call the function in this process; a run calls it in worker processes with limits (verl/rewards/).
"""

from __future__ import annotations

import inspect
import logging
from abc import ABC, abstractmethod
from collections import defaultdict
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import torch

from verl.compat.python import get_event_loop
from verl.data_proto.proto import DataProto
from verl.data_proto.tokenizer import Tokenizer
from verl.errors import ConfigError
from verl.registry import RegistryMapping
from verl.rewards.managers import REWARD_MANAGERS
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


class NaiveRewardManager(AbstractRewardManager):
    """One call of `compute_score(data_source=, solution_str=, ground_truth=, extra_info=)` per row; by default the
    built-in scorer of the row's data source. The first `num_examine` rows of each source are logged."""

    def __init__(
        self,
        tokenizer: Tokenizer,
        num_examine: int = 0,
        compute_score: RawRewardFn | None = None,
        reward_fn_key: str = "data_source",
    ):
        self.tokenizer = tokenizer
        self.num_examine = num_examine
        self.compute_score: RawRewardFn = compute_score or default_compute_score
        self.reward_fn_key = reward_fn_key

    def __call__(self, data: DataProto, return_dict: bool = False) -> torch.Tensor | dict[str, object]:
        done = self._extract_reward_from_rm_scores(data, return_dict)
        if done is not None:
            return done
        rewards = torch.zeros_like(data.batch["responses"], dtype=torch.float32)
        extra: dict[str, list[object]] = defaultdict(list)
        shown: dict[str, int] = defaultdict(int)
        rows = [self._row(data[i]) for i in range(len(data))]
        for i, (row, result) in enumerate(zip(rows, self._score(rows), strict=True)):
            entries = dict(result) if isinstance(result, Mapping) else {"score": float(result)}
            score = self._shape(float(entries["score"]), row["response_length"], entries)
            if isinstance(result, Mapping):
                for name, value in entries.items():
                    extra[name].append(value)
            rewards[i, row["response_length"] - 1] = score
            shown[row["data_source"]] += 1
            if shown[row["data_source"]] <= self.num_examine:
                log.info("[%s] %s -> %s: score %s", row["data_source"], row["prompt"], row["solution_str"], score)
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
        return [_wait(self.compute_score(**{name: row[name] for name in arguments})) for row in rows]

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
        return list(_wait(self.compute_score(**lists, **self.reward_kwargs)))


class DAPORewardManager(NaiveRewardManager):
    """Naive, minus the penalty of overlong replies (`overlong_buffer_cfg`, `max_resp_len`)."""

    def __init__(
        self,
        tokenizer: Tokenizer,
        num_examine: int = 0,
        compute_score: RawRewardFn | None = None,
        reward_fn_key: str = "data_source",
        max_resp_len: int | None = None,
        overlong_buffer_cfg: Any = None,
    ):
        super().__init__(tokenizer, num_examine, compute_score, reward_fn_key)
        self.buffer = OverlongBuffer(**dict(overlong_buffer_cfg or {}))
        if self.buffer.enable and (max_resp_len is None or not 0 < self.buffer.len <= max_resp_len):
            raise ConfigError(f"overlong_buffer_cfg.len={self.buffer.len} needs a max_resp_len of at least that.")
        self.max_resp_len = max_resp_len or 0

    def _shape(self, score: float, response_length: int, entries: dict[str, object]) -> float:
        if not self.buffer.enable:
            return score
        penalty = overlong_penalty(response_length, self.max_resp_len, self.buffer)
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


def _wait(score: object) -> Any:
    """The result of a scorer that may be a coroutine function."""
    return get_event_loop().run_until_complete(score) if inspect.isawaitable(score) else score
