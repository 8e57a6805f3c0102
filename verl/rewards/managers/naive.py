"""Reward managers naive (a call per sample), batch (a call per batch) and gdpo (several rewards per sample).

naive sends each call the moment its sample is submitted, so that scoring overlaps with generation.
"""

import logging
from collections import Counter
from collections.abc import Sequence
from concurrent.futures import Future
from dataclasses import replace
from typing import ClassVar, Protocol, runtime_checkable

from verl.data_proto.samples import Score, ScoreRequest
from verl.errors import ConfigError
from verl.families import UNSHAPED
from verl.rewards.outcome import outcome
from verl.rewards.pool import RewardPool


@runtime_checkable
class RewardManager(Protocol):
    """Converts requests to scores. Constructed as `Manager(pool, max_response_length=..., **reward.reward_kwargs)` with a
    RewardPool that is not started. The class attribute `batched = True` makes the pool call the function with lists."""

    def start(self, data_sources: Sequence[str] = ()) -> None:
        """Start the workers. Raises RewardError for a function that cannot be called, and a data source without scorer."""
        ...

    def submit(self, request: ScoreRequest) -> None:
        """Start to score one sample, without waiting. Raises ValueError for a key that was submitted already."""
        ...

    def collect(self, keys: Sequence[str]) -> dict[str, Score]:
        """Wait for submitted samples and remove them. Raises KeyError for a key that was not submitted."""
        ...

    def score(self, requests: Sequence[ScoreRequest]) -> list[Score]:
        """Scores in the order of the requests."""
        ...

    @property
    def num_defaulted(self) -> int:
        """Number of samples so far with a scorer that failed."""
        ...

    def close(self) -> None:
        """Kill the workers. May be called again."""
        ...


logger = logging.getLogger(__name__)

MAX_WARNINGS_PER_COLLECT = 5


class NaiveRewardManager:
    """One call per sample. Subclasses override `shape` (a correction computed from request and score), or `_send` and
    `_receive`."""

    batched: ClassVar[bool] = False

    def __init__(self, pool: RewardPool, *, max_response_length: int):
        self.pool = pool
        self.max_response_length = max_response_length
        self._num_defaulted = 0
        self._requests: dict[str, ScoreRequest] = {}
        self._calls: dict[str, Future[list[Score]]] = {}
        self._has_parts = False  # whether a sample has had them

    def start(self, data_sources: Sequence[str] = ()) -> None:
        self.pool.start(data_sources)

    def submit(self, request: ScoreRequest) -> None:
        if request.key in self._requests:
            raise ValueError(f"The sample {request.key} is being scored already.")
        self._requests[request.key] = request
        self._send(request)

    def collect(self, keys: Sequence[str]) -> dict[str, Score]:
        missing = [k for k in keys if k not in self._requests]
        if missing:
            raise KeyError(f"The sample {missing[0]} was not submitted for scoring.")
        requests = [self._requests.pop(k) for k in dict.fromkeys(keys)]
        received = self._receive(requests)
        self._check_parts([s for s in received if s.error is None])
        scores = [self._finish(r, s) for r, s in zip(requests, received, strict=True)]
        self._log_failures(scores)
        return {s.key: s for s in scores}

    def score(self, requests: Sequence[ScoreRequest]) -> list[Score]:
        for request in requests:
            self.submit(request)
        scores = self.collect([r.key for r in requests])
        return [scores[r.key] for r in requests]

    @property
    def num_defaulted(self) -> int:
        return self._num_defaulted

    def close(self) -> None:
        self.pool.close()

    def shape(self, request: ScoreRequest, score: Score) -> Score:
        """Convert the function's score to the training score. Not called for defaulted samples."""
        return score

    def lacking(self, score: Score) -> str:
        """A part that the run reads and the function has not returned ("no number named 'format'"), or ""."""
        names = (n for n in self.pool.function.parts if not isinstance(score.parts.get(n), (int, float)))
        return next((f"no number named {name!r}" for name in names), "")

    def _send(self, request: ScoreRequest) -> None:
        self._calls[request.key] = self.pool.submit([request])

    def _receive(self, requests: list[ScoreRequest]) -> list[Score]:
        return self.pool.wait([self._calls.pop(r.key) for r in requests])

    def _check_parts(self, scores: list[Score]) -> None:
        """Raises ConfigError when no sample so far has had the parts that the run reads."""
        self._has_parts |= any(not self.lacking(score) for score in scores)
        if scores and not self._has_parts:
            names = "".join(f", {name}" for name in sorted(scores[0].parts)[:8])
            raise ConfigError(
                f"The reward function {self.pool.function.label} returned {self.lacking(scores[0])}, which the algorithm "
                f"reads; it returned score{names}. Return a dict such as {{'score': total, 'accuracy': a, 'format': f}}, "
                "or name one of these in algorithm.gdpo_reward_keys and algorithm.filter_groups.metric."
            )

    def _finish(self, request: ScoreRequest, score: Score) -> Score:
        if score.error is not None:
            return score
        if lacking := self.lacking(score):
            return self.pool.defaulted(request, f"returned {lacking}")
        shaped = self.shape(request, score)
        if shaped is score:
            return score
        shaped = replace(shaped, parts={**shaped.parts, UNSHAPED: score.score})
        checked = outcome({**shaped.parts, "score": shaped.score}, self.pool.limits)
        return self.pool.defaulted(request, f"and its manager {checked['error']}") if "error" in checked else shaped

    def _log_failures(self, scores: list[Score]) -> None:
        failed = [s.error for s in scores if s.error is not None]
        self._num_defaulted += len(failed)
        counted = Counter(failed).most_common(MAX_WARNINGS_PER_COLLECT)
        for error, count in counted:
            logger.warning("%s%s", error, f" ({count} samples)" if count > 1 else "")
        if num_more := len(failed) - sum(count for _, count in counted):
            logger.warning("So did %d more samples of this batch.", num_more)


class BatchRewardManager(NaiveRewardManager):
    """One call with lists over all samples that are collected together, for scorers that compare samples. It has the time limit
    of one sample, and an error in it costs all its samples."""

    batched: ClassVar[bool] = True

    def _send(self, request: ScoreRequest) -> None:
        """Do nothing: the batch is complete when it is collected."""

    def _receive(self, requests: list[ScoreRequest]) -> list[Score]:
        return self.pool.score_all(requests)


class GdpoRewardManager(NaiveRewardManager):
    """Several rewards per sample, normalized one by one by the estimator `gdpo` (arXiv:2601.05242)."""

    def lacking(self, score: Score) -> str:
        has_numbers = any(isinstance(v, (int, float)) for k, v in score.parts.items() if k != "acc")
        return super().lacking(score) or ("" if has_numbers else "no number beside its score")
