"""The reward role: processes of a reward manager, or a manager of another release, score samples during generation."""

from __future__ import annotations

import functools
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import TYPE_CHECKING, Any, Protocol

import numpy as np
import torch

from verl.algorithms.advantages.turns import turn_numbers
from verl.data_proto.extras import MEDIA_COLUMNS
from verl.data_proto.merge import object_array
from verl.data_proto.proto import DataProto
from verl.data_proto.samples import Score, ScoreRequest, names_of_samples
from verl.data_proto.tokenizer import Tokenizer
from verl.data_proto.trajectory import token_columns
from verl.errors import RewardError
from verl.parallel.register import Dispatch, register
from verl.rewards.functions import load_reward_function
from verl.rewards.managers import RewardManager, function_spec
from verl.rewards.managers.build import is_called, manager_class

if TYPE_CHECKING:
    from verl.config import RewardConfig


def called_manager(section: RewardConfig, tokenizer: Tokenizer) -> CalledManager | None:
    """The manager of a script, if `reward.reward_manager` names a class with `__call__(batch, return_dict)`; None for a manager
    with workers. Raises RewardError if it cannot be made."""
    cls = manager_class(section)
    if not is_called(cls):
        return None
    function = function_spec(section)
    compute_score = functools.partial(load_reward_function(function), **function.kwargs)
    try:
        manager = cls(
            tokenizer=tokenizer, num_examine=0, compute_score=compute_score, **dict(section.reward_kwargs or {})
        )
    except Exception as error:  # a user's class may raise anything
        raise RewardError(f"The reward manager {cls.__name__} cannot be made: {error}") from error
    return CalledManager(manager)


class CalledManager:
    """A RewardManager (verl/rewards/managers/naive.py) that calls `manager` with all samples that are collected together.

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
        """The scores of submitted samples: the sums of the rewards of their tokens; these lie on the last token. Raises
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


_NOT_READ = ("token_weight_version",)  # 8 bytes a token
_OF_PROMPT = "sample_split uid data_source reward_model extra_info prompt_token_ids raw_prompt template_kwargs".split()
_OBJECTS = (*_OF_PROMPT, "episode_reward", "episode_error", "episode_extra", *MEDIA_COLUMNS)


class Server(Protocol):
    """The reward model at an address, see JudgeServer."""

    @property
    def address(self) -> str: ...

    def close(self) -> None: ...


class RewardModel(Protocol):
    def score(self, batch: DataProto) -> DataProto:
        """One column [batch] with the model's score or reply, see verl/roles/reward_model.py."""
        ...

    def close(self) -> None:
        """End the processes of the model."""


@dataclass(eq=False)
class RewardWorker:
    """With a reward `model`, samples wait for their batch: the model reads all of it at once in `collect`.

    Samples arrive through `submit` if the rollout runs in this process. Other samples are read from the batch, by the policy's
    `tokenizer`. With `needs_answer`, samples of rows without a reference answer are not scored, and have the score 0: if
    rewards do not train, built-in scorers have nothing to compare them with. With `turn_rewards` the turns of episodes are
    rewarded at their ends, see `_reward_turns`.
    """

    manager: RewardManager
    model: RewardModel | None = None
    tokenizer: Any = None
    default_score: float | None = None
    needs_answer: bool = False
    turn_rewards: bool = False
    server: Server | None = None  # of the reward model, for a function that asks it itself
    _submitted: set[str] = field(default_factory=set)
    _waiting: dict[str, ScoreRequest] = field(default_factory=dict)

    def submit(self, request: ScoreRequest) -> None:
        """Start to score one sample; returns at once."""
        if self.needs_answer and request.ground_truth is None:
            return
        self._submitted.add(request.key)
        if self.model is None:
            self.manager.submit(request)
        else:
            self._waiting[request.key] = request

    @register(dispatch_mode=Dispatch.ND_OWNER_PROTO, blocking=False, objects=_OBJECTS, left_out=_NOT_READ)
    def start_scoring(self, batch: DataProto) -> None:
        """Start to score the rows of `batch` that are not being scored yet; returns at once. `collect` waits for them."""
        keys = names_of_samples(batch)
        self._submit_unseen(batch, keys, self._given(batch, keys))

    @register(dispatch_mode=Dispatch.ND_OWNER_PROTO, objects=_OBJECTS, left_out=_NOT_READ)
    def collect(self, batch: DataProto) -> DataProto:
        """Waits (with the manager's deadline) for the scores of the rows of `batch`, by their names.

        Columns token_level_scores [batch, response] with the score on the last response token, reward_parts, reward_error,
        is_scored, and the reward model's, if there is one.
        """
        keys = names_of_samples(batch)
        verdicts = self._given(batch, keys)
        self._submit_unseen(batch, keys, verdicts)
        self._submitted.difference_update(keys)
        from_model = None if self.model is None else self.model.score(batch)
        if from_model is not None:
            self._submit_waiting(keys, from_model)
        by_key = {**verdicts, **self.manager.collect([key for key in keys if key not in verdicts])}
        scores = [by_key[k] for k in keys]
        mask = batch.batch["response_mask"]
        lengths = batch.batch["attention_mask"][:, -mask.shape[1] :].sum(dim=1)
        token_scores = torch.zeros(mask.shape, dtype=torch.float32)
        token_scores[torch.arange(len(scores)), lengths - 1] = torch.tensor(
            [s.score for s in scores], dtype=torch.float32
        )
        if self.turn_rewards and "episode_extra" in batch.non_tensor_batch:
            _reward_turns(token_scores, batch, lengths - 1)
        failed_episodes = batch.non_tensor_batch.get("episode_error", [None] * len(scores))
        has_default = self.default_score is not None
        is_scored = [
            episode is None and (score.error is None or has_default)
            for episode, score in zip(failed_episodes, scores, strict=True)
        ]
        scored = DataProto.from_dict(
            {"token_level_scores": token_scores, "is_scored": torch.tensor(is_scored)},
            {
                "reward_parts": object_array(score.parts for score in scores),
                "reward_error": object_array(score.error for score in scores),
            },
        )
        return scored if from_model is None else scored.union(from_model)

    def _given(self, batch: DataProto, keys: Sequence[str]) -> dict[str, Score]:
        """Scores of episodes that bring their own, and 0 for failed episodes and for samples that are not scored."""
        objects, scores = batch.non_tensor_batch, {}
        if self.needs_answer:
            answers = (_ground_truth(batch, row) for row in range(len(batch)))
            scores = {k: Score(k, 0.0) for k, a in zip(keys, answers, strict=True) if a is None}
        if "episode_reward" not in objects:
            return scores
        for key, reward, error in zip(keys, objects["episode_reward"], objects["episode_error"], strict=True):
            if error is not None:
                scores[key] = Score(key, 0.0, error=f"Episode {key} {error}; it has no score.")
            elif reward is not None:
                scores[key] = Score(key, float(reward), {"acc": float(reward)})
        return scores

    def _submit_unseen(self, batch: DataProto, keys: Sequence[str], verdicts: Mapping[str, Score]) -> None:
        """Submit the samples of a rollout in another process. A rollout in this process has submitted its own already."""
        width = batch.batch["response_mask"].shape[1]
        exists = batch.batch["attention_mask"][:, -width:].bool()
        for row, key in enumerate(keys):
            if key not in self._submitted and key not in verdicts:
                token_ids = batch.batch["responses"][row][exists[row]].tolist()
                self.submit(score_request(batch, row, key, token_ids, self.tokenizer))

    def _submit_waiting(self, keys: list[str], from_model: DataProto) -> None:
        columns = {
            **dict(from_model.batch.items() if from_model.batch is not None else {}),
            **from_model.non_tensor_batch,
        }
        for name, values in columns.items():
            for key, value in zip(keys, values.tolist(), strict=True):
                if key not in self._waiting:  # an episode that brought its reward
                    continue
                self.manager.submit(replace(self._waiting.pop(key), from_model={name: value}))

    @register(dispatch_mode=Dispatch.ALL_REDUCE)
    def num_defaulted(self) -> int:
        """Samples of this run with a failed scorer."""
        return self.manager.num_defaulted

    def close(self) -> None:
        self.manager.close()
        for part in (self.model, self.server):
            if part is not None:
                part.close()


def _reward_turns(token_scores: torch.Tensor, batch: DataProto, ends: torch.Tensor) -> None:
    """Add what episodes have in extra["turn_rewards"] to the last token of each turn. If an episode brings its reward, the turn
    rewards are parts of it, and only the remainder stays on its last token, of `ends` [batch]. Else they add to the score."""
    objects, numbers = batch.non_tensor_batch, turn_numbers(batch.batch["response_mask"])
    for row, (extra, reward) in enumerate(zip(objects["episode_extra"], objects["episode_reward"], strict=True)):
        turn_rewards = (extra or {}).get("turn_rewards") or []
        if objects["episode_error"][row] is not None or not turn_rewards:
            continue
        if reward is not None:
            token_scores[row, ends[row]] = float(reward) - sum(turn_rewards)
        for turn, turn_reward in enumerate(turn_rewards):
            places = (numbers[row] == turn).nonzero()
            # an episode that does not train has none
            token_scores[row, places[-1] if len(places) else ends[row]] += turn_reward


def score_request(
    rows: DataProto,
    row: int,
    key: str,
    token_ids: Sequence[int],
    tokenizer: Tokenizer,
    episode: Mapping[str, object] | None = None,
) -> ScoreRequest:
    """The request for a response of `token_ids` to the prompt of `row`; data_source, reward_model and extra_info are object
    columns of `rows`. `episode` is what an agent adds to extra_info, else the column episode_extra."""
    objects = rows.non_tensor_batch
    extra = dict(objects["extra_info"][row] or {}) if "extra_info" in objects else {}
    if episode is None and "episode_extra" in objects:
        episode = objects["episode_extra"][row]
    extra |= episode or {}
    return ScoreRequest(
        key=key,
        data_source=str(objects["data_source"][row]),
        solution_str=tokenizer.decode(token_ids, skip_special_tokens=True),
        ground_truth=_ground_truth(rows, row),
        extra_info=extra,
        response_length=len(token_ids),
        response_ids=tuple(token_ids),
        prompt_ids=tuple(objects["prompt_token_ids"][row]) if "prompt_token_ids" in objects else (),
    )


def _ground_truth(rows: DataProto, row: int) -> object:
    """The reference answer of a row; None without one."""
    objects = rows.non_tensor_batch
    return (objects["reward_model"][row] or {}).get("ground_truth") if "reward_model" in objects else None
