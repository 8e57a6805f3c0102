"""Reward managers of other releases in a run: `manager(batch, return_dict=True)` scores a whole batch, in the run's process."""

from __future__ import annotations

import functools
from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING, Any

import numpy as np
import torch

from verl.data_proto.merge import object_array
from verl.data_proto.proto import DataProto
from verl.data_proto.samples import Score, ScoreRequest
from verl.data_proto.tokenizer import Tokenizer
from verl.data_proto.trajectory import token_columns
from verl.errors import RewardError
from verl.rewards.functions import load_reward_function
from verl.rewards.managers import function_spec
from verl.rewards.managers.build import is_called, manager_class

if TYPE_CHECKING:
    from verl.specs import RewardSpec


def called_manager(spec: RewardSpec, tokenizer: Tokenizer) -> CalledManager | None:
    """The manager of a script, where `reward.reward_manager` names a class with `__call__(batch, return_dict)`; None for a
    manager with workers. Raises RewardError where it cannot be made."""
    own = manager_class(spec.section)
    if not is_called(own):
        return None
    function = function_spec(spec.section)
    compute_score = functools.partial(load_reward_function(function), **function.kwargs)
    try:
        manager = own(
            tokenizer=tokenizer, num_examine=0, compute_score=compute_score, **dict(spec.section.reward_kwargs or {})
        )
    except Exception as error:  # a user's class may raise anything
        raise RewardError(f"The reward manager {own.__name__} cannot be made: {error}") from error
    return CalledManager(manager)


class CalledManager:
    """A RewardManager (verl/rewards/managers/api.py) that calls `manager` with all samples that are collected together.

    The batch has prompts, responses, attention_mask, data_source, reward_model and extra_info. There is no time limit and no
    sandbox: an error of the manager ends the run.
    """

    def __init__(self, manager: Callable[..., object]):
        self.manager, self._requests = manager, dict[str, ScoreRequest]()

    def start(self, data_sources: Sequence[str] = ()) -> None:
        """Nothing to start."""

    def submit(self, request: ScoreRequest) -> None:
        """Keep the sample until it is collected."""
        self._requests[request.key] = request

    def collect(self, keys: Sequence[str]) -> dict[str, Score]:
        """The scores of submitted samples: the sums of the rewards of their tokens, which lie on the last one. Raises
        RewardError."""
        if not keys:
            return {}
        requests = [self._requests.pop(key) for key in keys]
        name = type(self.manager).__name__
        try:
            returned = self.manager(_batch(requests), return_dict=True)
        except Exception as error:  # a user's class may raise anything
            raise RewardError(f"The reward manager {name} failed: {type(error).__name__}: {error}") from error
        rewards, extra = _parts(returned)
        ends = torch.tensor([request.response_length - 1 for request in requests])
        if rewards.shape[0] != len(requests) or rewards.scatter(1, ends[:, None], 0.0).any():
            raise RewardError(
                f"The reward manager {name} must return a reward for each of the {len(requests)} samples, on the last token of "
                "its response. Add up the rewards of other tokens there."
            )
        totals = rewards.sum(dim=1).tolist()
        return {
            request.key: Score(request.key, total, {part: values[row] for part, values in extra.items()})
            for row, (request, total) in enumerate(zip(requests, totals, strict=True))
        }

    def score(self, requests: Sequence[ScoreRequest]) -> list[Score]:
        """Scores in the order of the requests."""
        for request in requests:
            self.submit(request)
        return list(self.collect([request.key for request in requests]).values())

    @property
    def num_defaulted(self) -> int:
        """0: an error ends the run."""
        return 0

    def close(self) -> None:
        """Nothing to end."""


def _parts(returned: Any) -> tuple[torch.Tensor, dict[str, Sequence[Any]]]:
    """(rewards [batch, response], a value for each row by name) of what a manager has returned."""
    extra: dict[str, Any] = {}
    if isinstance(returned, dict):
        returned, extra = returned["reward_tensor"], returned.get("reward_extra_info") or {}
    return returned.float(), {
        name: column.tolist() if hasattr(column, "tolist") else list(column) for name, column in extra.items()
    }


def _batch(requests: Sequence[ScoreRequest]) -> DataProto:
    tokens = []
    for request in requests:
        prompt, response = (np.asarray(ids, dtype=np.int64) for ids in (request.prompt_ids, request.response_ids))
        tokens.append((prompt, response, np.ones(len(response), dtype=bool)))
    columns = token_columns(tokens)
    objects: dict[str, list[object]] = {
        "data_source": [request.data_source for request in requests],
        "reward_model": [{"ground_truth": request.ground_truth} for request in requests],
        "extra_info": [request.extra_info for request in requests],
    }
    return DataProto.from_dict(columns, {name: object_array(values) for name, values in objects.items()})
