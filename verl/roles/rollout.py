"""The rollout role: prompts in, padded columns out; each sample goes to the scorer as soon as it ends."""

from __future__ import annotations

import itertools
import logging
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field, replace
from typing import TYPE_CHECKING, Any, NamedTuple

import numpy as np
import torch
from numpy.typing import DTypeLike

from verl.config import RolloutConfig, full_key
from verl.config.active_keys import quantized_keys
from verl.data_proto.extras import EXPERTS, experts_of, media_of
from verl.data_proto.merge import object_array
from verl.data_proto.metrics import Metric
from verl.data_proto.proto import DataProto
from verl.data_proto.samples import Completion, PromptRequest, SamplingParams, ScoreRequest, sample_key
from verl.data_proto.tokenizer import Tokenizer
from verl.data_proto.trajectory import Trajectory, to_columns, trajectory_of
from verl.errors import ModelError
from verl.parallel.register import Dispatch, Execute, register
from verl.roles.reward import score_request
from verl.rollout.api import RolloutEngine
from verl.rollout.rollout_model import Replica, Weights

if TYPE_CHECKING:
    from verl.agents.agents import Agents
    from verl.agents.episode import EpisodeResult
    from verl.agents.images import EpisodeImages

UNSCORED = "unscored"  # split of samples that no reward function gets


class GroupEnds:
    """Seconds from the construction until the last sample of each prompt has ended."""

    def __init__(self) -> None:
        self._began = time.perf_counter()
        self._ends: dict[int, float] = {}
        self._longest: dict[int, int] = {}

    def note(self, sample: Trajectory) -> None:
        """The sample has ended."""
        self._ends[sample.ordinal] = time.perf_counter() - self._began
        self._longest[sample.ordinal] = max(self._longest.get(sample.ordinal, 0), sample.num_response_tokens)

    def metrics(self) -> dict[str, Metric]:
        """The prompt that ended last, tokens of its longest response, seconds until its end, and until nine tenths of the
        groups had ended (mean over ranks). Nothing without samples."""
        if not self._ends:
            return {}
        ends = sorted(self._ends.values())
        last, num_most = max(self._ends, key=self._ends.__getitem__), max(9 * len(ends) // 10, 1)
        return {
            "last_group/prompt": Metric.at_largest(last, ends[-1]),
            "last_group/tokens": Metric.at_largest(self._longest[last], ends[-1]),
            "last_group/ended_s": Metric.max(ends[-1]),
            "last_group/others_ended_s": Metric.mean(ends[num_most - 1], len(ends)),
        }


log = logging.getLogger(__name__)

ScoreStream = Callable[[ScoreRequest], None]

# ranks generate side by side; their other metrics add up
_LARGEST_OF_RANKS = (
    "seconds", "num_decode_steps", "busy_s", "idle_s", "kv_fragmentation", "switch_peak_gb", "switch_peak_ratio",
    "sync_s", "accepted_per_step", "saved_step_share",
)  # fmt: skip


def _added(name: str, value: float) -> Metric:
    return (Metric.max if name in _LARGEST_OF_RANKS else Metric.sum)(value)


def _nothing() -> dict[str, float]:
    return {}


@dataclass(eq=False)
class RolloutWorker:
    """`score_stream` receives a ScoreRequest for every sample as it ends, during generation.

    `replica` is None when the engine generates with the training module itself, else the copy that takes the weights of each
    update. Ranks that share one do the same work, and one of them answers and has a `score_stream`. `rank` is this worker's
    among all that generate. `on_generation_end` is called after `end_generation`, before anything trains, and returns metrics.
    With `agents` each sample is an episode. With `records_experts` the engine's records are the column `routed_experts`.
    """

    engine: RolloutEngine
    tokenizer: Tokenizer
    params: SamplingParams
    max_prompt_length: int
    free_cache: bool
    score_stream: ScoreStream | None = None
    replica: Replica | None = None
    rank: int = 0
    on_generation_end: Callable[[], dict[str, float]] = _nothing
    agents: Agents | None = None
    records_experts: bool = False
    _ends: GroupEnds = field(default_factory=GroupEnds, init=False)  # of the last generation

    @register(dispatch_mode=Dispatch.ONE_TO_ALL, execute_mode=Execute.RANK_ZERO)
    def exact_log_probs(self) -> bool:
        """Whether sampled log-probs equal the training forward's to rounding: same weights in float32 or better."""
        return not quantized_keys(self.engine.config) and self._dtype() in (torch.float32, torch.float64)

    @register(dispatch_mode=Dispatch.ND_SCATTER_PROTO, blocking=False)
    def generate(
        self, prompts: DataProto, *, step: int, params: SamplingParams, split: str = "train", limit: int | None = None
    ) -> DataProto:
        """`params.n` rows per prompt (samples of a prompt adjacent) with the columns that the table names under rollout.

        With a `limit` above params.max_new_tokens the samples that reach the latter are unfinished and not scored yet.
        `advance` continues them up to `limit` tokens, the width of the columns then.
        """
        limit = limit or params.max_new_tokens
        return self.advance(prompts, DataProto(), step, params, params.max_new_tokens, split, limit)[0]

    @register(dispatch_mode=Dispatch.ND_ADVANCE_PROTO, blocking=False)
    def advance(
        self, prompts: DataProto, rows: DataProto, step: int, params: SamplingParams, first: int, split: str, limit: int,
        due: int | None = None,
    ) -> tuple[DataProto, DataProto]:  # fmt: skip
        """New samples of `prompts` as by `generate`, of at most `first` tokens, and up to params.max_new_tokens more for
        unfinished `rows` (prompts' and rollout's columns, `begun_step` and `expected_tokens`), all under the current weights.
        Returns all rollout columns of both. They share one generation. Longer parts begin before shorter ones, so that a step
        waits only once for its last samples. With `due` running samples may stop before, see RolloutHandle."""
        self._ends, self.engine.trains = GroupEnds(), split == "train"
        self.engine.resumes_below = limit if self.engine.trains and self.agents is None else 0
        if len(rows) and "kv_rank" in rows.batch and (rows.batch["kv_rank"] < 0).any():
            self.engine.forget()
        if self.agents is not None:
            resumed = self._resumed_episodes(self.agents, rows, params, limit)
            if len(rows) and not len(prompts):
                return DataProto(), resumed
            starting = replace(params, max_new_tokens=first)
            return self._episodes(self.agents, prompts, starting, step, split, limit), resumed
        rollouts = [*_resuming(rows, limit), *_starting(prompts, split, params.n, first)]
        by_key = {
            (one.request.ordinal, one.request.first_sample + i): one for one in rollouts for i in range(one.num_samples)
        }

        def trajectory(done: Completion) -> Trajectory:
            before = by_key[done.key].before or Trajectory(*done.key, by_key[done.key].request.token_ids)
            return before.extended(done, self._np_dtype())

        def on_finish(done: Completion) -> None:
            one, sample = by_key[done.key], trajectory(done)
            self._ends.note(sample)
            if self.score_stream is not None and one.split != UNSCORED and not sample.can_resume(limit):
                key = sample_key(one.split, sample.ordinal, sample.sample)
                self.score_stream(score_request(one.rows, one.row, key, sample.response_ids, self.tokenizer))

        self.engine.due = None if due is None else frozenset(key for key in by_key if key[0] < due)
        # a rank that only takes part has no requests
        requests, count = [one.request for one in rollouts], len(rows)
        completions = self.engine.generate(requests, params, step=step, on_finish=on_finish) if rollouts else []
        samples = [(trajectory(done), by_key[done.key].split) for done in completions]
        return self._columns(samples[count:], limit), self._columns(samples[:count], limit)

    def set_weights(self, version: int, weights: Weights | None = None) -> None:
        """The weights changed: samples made from now on carry `version`. A replica, or an engine with its own weights, loads
        `weights`, all of its parameters by name. Called by the weight sync of this rank."""
        copy = self.replica if self.replica is not None else self.engine
        if weights is not None:
            copy.load(weights)
        self.engine.publish(version)

    def set_rank(self, rank: int) -> None:
        """This worker's rank among all that generate, after ranks have joined or left."""
        self.rank = rank

    def close(self) -> None:
        """End the agents, and an engine that has its own processes."""
        if self.agents is not None:
            self.agents.close()
        self.engine.close()

    @register(dispatch_mode=Dispatch.ALL_REDUCE, blocking=False)
    def end_generation(self, *, syncs: bool = False) -> dict[str, Metric]:
        """Free the KV cache if configured, and the engine's weights if it `syncs`: new ones come before the next generation.
        Returns the engine's metrics of the last `generate`."""
        stats = self.engine.stats() if self.agents is None else self.agents.metrics()
        self.engine.syncs = syncs
        if self.free_cache:
            self.engine.release()
        stats = {**stats, **self.on_generation_end(), "num_replicas": 1}
        log.debug("Generation: %s", {name: str(value) for name, value in stats.items()})
        metrics = {k: v if isinstance(v, Metric) else _added(k, float(v)) for k, v in stats.items()}
        return metrics | self._ends.metrics()

    def _episodes(
        self,
        agents: Agents,
        prompts: DataProto,
        params: SamplingParams,
        step: int,
        split: str,
        limit: int,
        before: Sequence[Trajectory] | None = None,
    ) -> DataProto:
        """Generate episodes: the columns of single turns, and the columns of episodes."""
        position = {ordinal: i for i, ordinal in enumerate(prompts.batch["ordinal"].tolist())}

        def on_finish(done: EpisodeResult) -> None:
            self._ends.note(done.trajectory)
            if self.score_stream is not None and done.reward is None and done.error is None:
                key, row = sample_key(split, done.task.ordinal, done.task.sample), position[done.task.ordinal]
                ids = done.trajectory.response_ids
                self.score_stream(score_request(prompts, row, key, ids, self.tokenizer, done.extra))

        results = agents.generate(
            prompts,
            params,
            step=step,
            split=split,
            limit=limit,
            dtype=self._np_dtype(),
            on_finish=on_finish,
            before=before,
        )
        columns = self._columns([(done.trajectory, split) for done in results], limit)
        return columns.union(DataProto.from_dict({}, episode_columns(results, agents.images)))

    def _resumed_episodes(self, agents: Agents, rows: DataProto, params: SamplingParams, limit: int) -> DataProto:
        """More tokens for unfinished episodes; the samples of a batch began together."""
        begun = [] if not len(rows) else list(zip(rows.batch["begun_step"].tolist(), _splits(rows), strict=True))
        params, parts = replace(params, n=1), []
        for (step, split), numbers in itertools.groupby(range(len(rows)), key=lambda row: begun[row]):
            part = rows.select_idxs(np.fromiter(numbers, np.int64))
            parts.append(self._episodes(agents, part, params, step, split, limit, _unfinished(part)))
        return DataProto.concat(parts) if parts else DataProto()

    def _dtype(self) -> torch.dtype | None:
        """The dtype of the weights that generate; None if they are out of reach."""
        return None if self.engine.facts.holds_weights else next(self.engine.module.parameters()).dtype

    def _np_dtype(self) -> DTypeLike:
        return np.float64 if self._dtype() == torch.float64 else np.float32

    def _columns(self, samples: Sequence[tuple[Trajectory, str]], width: int) -> DataProto:
        """The rollout's columns of samples with their splits."""
        trajectories = [trajectory for trajectory, _ in samples]
        columns = to_columns(
            trajectories,
            pad_token_id=self.tokenizer.pad_token_id if self.tokenizer.pad_token_id is not None else 0,
            prompt_width=self.max_prompt_length,
            response_width=width,
            dtype=torch.float64 if self._dtype() == torch.float64 else torch.float32,
        )
        columns["rollout_rank"] = torch.full((len(trajectories),), self.rank)
        objects = sample_names(samples)
        if self.records_experts:
            if any(trajectory.experts is None for trajectory in trajectories):
                raise ModelError(
                    "The rollout engine returned no experts of a sample, which actor.router_replay.mode=R3 needs. Set "
                    f"{full_key('rollout.name')}=native, or the mode to R2."
                )
            objects[EXPERTS] = object_array([trajectory.experts for trajectory in trajectories])
        return DataProto.from_dict(columns, objects)


class _Asked(NamedTuple):
    """A request of a generation: samples of the prompt in a row, or the sample `before` that continues."""

    rows: DataProto
    row: int
    split: str
    num_samples: int
    request: PromptRequest
    before: Trajectory | None = None


def _starting(prompts: DataProto, split: str, count: int, limit: int) -> Iterator[_Asked]:
    media = media_of(prompts) or [None] * len(prompts)
    expected = prompts.batch["expected_tokens"].tolist() if "expected_tokens" in prompts.batch else [0.0] * len(prompts)
    for row, (image, tokens) in enumerate(zip(media, expected, strict=True)):
        ids, ordinal = tuple(prompts.non_tensor_batch["prompt_token_ids"][row]), int(prompts.batch["ordinal"][row])
        request = PromptRequest(ordinal, ids, max_new_tokens=limit, media=image, expected_tokens=tokens)
        yield _Asked(prompts, row, split, count, request)


def _resuming(rows: DataProto, limit: int) -> Iterator[_Asked]:
    media, splits = media_of(rows) or [None] * len(rows), _splits(rows)
    for row, before in enumerate(_unfinished(rows)):
        begun, drawn = int(rows.batch["begun_step"][row]), before.num_response_tokens
        sequence, more = (*before.prompt_ids, *before.response_ids), limit - drawn
        request = PromptRequest(before.ordinal, sequence, before.sample, drawn, 1, more, media[row], random_step=begun)
        yield _Asked(rows, row, splits[row], 1, request, before)


def _unfinished(rows: DataProto) -> list[Trajectory]:
    """The samples of `rows` so far."""
    trajectories = [
        trajectory_of(rows.batch, i, ordinal=int(rows.batch["ordinal"][i]), status="open", prompt_ids=_prompt(rows, i))
        for i in range(len(rows))
    ]
    for trajectory, experts in zip(trajectories, experts_of(rows) or [], strict=False):
        trajectory.experts = experts
    return trajectories


def _splits(rows: DataProto) -> list[str]:
    return list(rows.non_tensor_batch.get("sample_split", ()))


def _prompt(rows: DataProto, row: int) -> tuple[int, ...]:
    """The prompt of a sample; an episode's prompt may differ from the prompt of its data row."""
    return tuple(rows.batch["prompts"][row][rows.batch["prompt_mask"][row]].tolist())


def sample_names(samples: Sequence[tuple[Trajectory, str]]) -> dict[str, np.ndarray]:
    """The columns finish_reason and sample_split of samples with their splits."""
    return {
        "finish_reason": np.array([t.status for t, _ in samples], dtype=object),
        "sample_split": np.array([split for _, split in samples], dtype=object),
    }


def episode_columns(episodes: Sequence[EpisodeResult], images: EpisodeImages) -> dict[str, np.ndarray]:
    """The object columns of episodes; `images` are the images that they can have."""
    media = [done.trajectory.media for done in episodes]
    return {
        **({} if not images.tokens else {"episode_media": object_array(media)}),
        "__num_turns__": object_array([done.num_turns for done in episodes]),
        "tool_call_counts": object_array([int(done.metrics.get("num_tool_calls", 0)) for done in episodes]),
        "episode_times": object_array([done.metrics for done in episodes]),
        "episode_reward": object_array([done.reward for done in episodes]),
        "episode_error": object_array([done.error for done in episodes]),
        "episode_extra": object_array([done.extra for done in episodes]),
        "episode_branches": object_array([done.branches for done in episodes]),
    }


def sampling_params(config: RolloutConfig, *, validation: bool = False) -> SamplingParams:
    """The sampling of training or of validation; validation without do_sample is greedy."""
    stops: dict[str, Any] = {
        "stop": tuple(config.stop),
        "stop_token_ids": tuple(config.stop_token_ids),
        "ignore_eos": config.ignore_eos,
        "seed": config.seed,
    }
    rule, limit = (config.val_kwargs, config.val_kwargs.max_new_tokens) if validation else (config, None)
    return SamplingParams(
        n=rule.n, temperature=rule.temperature if rule.do_sample else 0.0, top_p=rule.top_p, top_k=rule.top_k,
        min_p=rule.min_p, max_new_tokens=limit or config.response_length, **stops,
    )  # fmt: skip


def greedy(params: SamplingParams, n: int = 1) -> SamplingParams:
    """The most likely token at each position, under the same limits."""
    return replace(params, n=n, temperature=0.0, top_p=1.0, top_k=-1, min_p=0.0)
