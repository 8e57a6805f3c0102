"""Results of episodes that differ from what their agents returned: failed, without training, in another dtype."""

from collections.abc import Sequence
from dataclasses import replace
from typing import Any

import numpy as np
from numpy.typing import DTypeLike

from verl.agents.episode import EpisodeResult, EpisodeTask
from verl.data_proto.metrics import Metric
from verl.data_proto.trajectory import Segment, Trajectory


def failed(task: EpisodeTask, why: str, filler: int, version: int, **more: Any) -> EpisodeResult:
    """The result of an episode that cannot train: a response of one token with mask 0. It follows the tokens of earlier parts,
    and these do not train either."""
    prompt = task.prompt_ids[: task.max_prompt_length] or (filler,)
    empty = Segment(np.asarray([filler], dtype=np.int32), None, version, "environment")
    trajectory = Trajectory(task.ordinal, task.sample, prompt, [empty], "abort")
    if task.so_far is not None:
        trajectory = replace(untrained(task.so_far), status="abort")
        trajectory.segments.append(empty)
    return EpisodeResult(task, trajectory, error=why, **more)


def untrained(trajectory: Trajectory) -> Trajectory:
    """The same tokens, of which none trains."""
    return replace(trajectory, segments=[replace(s, log_probs=None, source="environment") for s in trajectory.segments])


def in_dtype(result: EpisodeResult, dtype: DTypeLike) -> EpisodeResult:
    """The result with log-probs of `dtype`."""

    def cast(trajectory: Trajectory) -> Trajectory:
        segments = [
            s if s.log_probs is None else replace(s, log_probs=s.log_probs.astype(dtype)) for s in trajectory.segments
        ]
        return replace(trajectory, segments=segments)

    return replace(result, trajectory=cast(result.trajectory), branches=[cast(one) for one in result.branches])


def trained_share(results: Sequence[EpisodeResult]) -> dict[str, Metric]:
    """The share of the sampled tokens of episodes that train; nothing without tokens."""
    num_sampled = sum(result.num_sampled for result in results)
    segments = [s for result in results for one in (result.trajectory, *result.branches) for s in one.segments]
    trained = sum(len(segment.token_ids) for segment in segments if segment.log_probs is not None)
    return {"trained_token_share": Metric.mean(trained / num_sampled, num_sampled)} if num_sampled else {}
