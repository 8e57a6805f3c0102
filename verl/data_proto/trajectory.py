"""One sample from its prompt to its reward: the record of generation, of unfinished samples and of the ledger.

    prompt | policy, version 3 | environment | policy, version 4 |       segments of one response
           | 1   1   1   1   1 | 0   0   0   | 1   1   1         |       response_mask

A response holds the tokens that the policy sampled and, between them, tokens that an environment (a tool, a user) answered.
The latter are context: they have no log-probability and are never trained. Only this module computes lengths and masks.
"""

from __future__ import annotations

import itertools
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Literal, NamedTuple

import numpy as np
import torch
from numpy.typing import DTypeLike

from verl.data_proto.batch_metrics import count_true
from verl.data_proto.media import Spans
from verl.data_proto.samples import Completion

Source = Literal["policy", "environment"]
Status = Literal["open", "stop", "length", "abort"]


@dataclass
class Segment:
    """Consecutive tokens of a response with one source and one weight version.

    >>> sampled = Segment(np.array([5, 6]), np.array([-0.1, -2.0]), weight_version=3)
    >>> tool = Segment(np.array([9]), None, weight_version=3, source="environment")
    """

    token_ids: np.ndarray  # int32 [n]
    log_probs: np.ndarray | None  # float32 [n] (float64 of a float64 model); None: not sampled
    weight_version: int
    source: Source = "policy"


class Row(NamedTuple):
    """A trajectory without padding, as arrays over its tokens.

    >>> Row(np.array([1, 2]), np.array([5, 6, 9]), np.array([True, True, False]), np.array([-0.1, -2, 0]), np.array([3, 3, 3]))
    Row(prompt_ids=array([1, 2]), ...)
    """

    prompt_ids: np.ndarray  # int64 [prompt]
    response_ids: np.ndarray  # int64 [response]
    response_mask: np.ndarray  # bool [response]: sampled by the policy, and trained
    log_probs: np.ndarray  # float [response]; 0 on environment tokens
    weight_versions: np.ndarray  # int64 [response]: of the weights that sampled each token


@dataclass
class Trajectory:
    """Sample `sample` of the prompt with index `ordinal`: Trajectory(7, 0, (1, 2), [Segment([5, 6], [-0.1, -2.0], 3)]).

    >>> done = Trajectory(7, 0, (1, 2), [Segment(np.array([5, 6]), np.array([-0.1, -2.0]), 3)], status="stop")
    >>> done.response_ids, done.oldest_version
    ([5, 6], 3)
    """

    ordinal: int
    sample: int
    prompt_ids: Sequence[int]
    segments: list[Segment] = field(default_factory=list)
    status: Status = "open"
    messages: list[dict[str, object]] = field(default_factory=list)  # a conversation, in the format of chat templates
    media: Spans = ()  # of an episode, at places from the first token of the response
    experts: np.ndarray | None = None  # [tokens, layers, k] that computed its tokens but the last one, if recorded

    def extended(self, done: Completion, dtype: DTypeLike = np.float32) -> Trajectory:
        """A trajectory that continues with the tokens that an engine sampled, their log-probs in `dtype`."""
        tokens, log_probs = np.asarray(done.token_ids, dtype=np.int32), np.asarray(done.log_probs, dtype=dtype)
        segments = [*self.segments, Segment(tokens, log_probs, done.weight_version)]
        experts = done.experts
        if experts is not None and self.experts is not None:  # earlier tokens were sampled with the earlier choices
            experts = np.concatenate([self.experts, experts[len(self.experts) :]])
        return replace(self, segments=segments, status=done.finish_reason, experts=experts)

    def answered(self, token_ids: Sequence[int], weight_version: int) -> Trajectory:
        """An open trajectory that continues with tokens that no policy sampled."""
        answer = Segment(np.asarray(token_ids, dtype=np.int32), None, weight_version, "environment")
        return replace(self, segments=[*self.segments, answer], status="open")

    @property
    def num_response_tokens(self) -> int:
        """Tokens of all segments."""
        return sum(len(segment.token_ids) for segment in self.segments)

    @property
    def response_ids(self) -> list[int]:
        """Token ids of all segments."""
        return [token for segment in self.segments for token in segment.token_ids.tolist()]

    def can_resume(self, limit: int) -> bool:
        """Whether its generation ended at the limit of a call, and it is shorter than `limit` tokens."""
        return self.status == "length" and self.num_response_tokens < limit

    @property
    def oldest_version(self) -> int:
        """The lowest weight version that sampled one of its tokens; if none was sampled, the lowest of its segments."""
        sampled = [segment for segment in self.segments if segment.source == "policy"]
        return min(segment.weight_version for segment in sampled or self.segments)

    def to_row(self) -> Row:
        """Its tokens, mask, log-probs and versions."""
        sizes = [len(segment.token_ids) for segment in self.segments]
        sampled = [segment.source == "policy" for segment in self.segments]
        log_probs = [
            np.zeros(n) if s.log_probs is None else s.log_probs for s, n in zip(self.segments, sizes, strict=True)
        ]
        return Row(
            np.asarray(self.prompt_ids, dtype=np.int64),
            np.concatenate([np.empty(0, np.int64), *(segment.token_ids for segment in self.segments)]).astype(np.int64),
            np.repeat(np.array(sampled, dtype=bool), sizes),
            np.concatenate([np.empty(0), *log_probs]),
            np.repeat(np.array([segment.weight_version for segment in self.segments], dtype=np.int64), sizes),
        )


def to_columns(
    trajectories: Sequence[Trajectory],
    *,
    pad_token_id: int,
    prompt_width: int,
    response_width: int,
    dtype: torch.dtype = torch.float32,
) -> dict[str, torch.Tensor]:
    """The columns of a batch: prompts [batch, prompt_width] padded on the left, responses [batch, response_width] on the
    right, with their masks, log-probs in `dtype` and weight versions (see verl.data_proto.columns). Widths are limits of the
    config and not the lengths of the longest row, so that batches of one run can be joined."""
    rows = [trajectory.to_row() for trajectory in trajectories]
    tokens = [(row.prompt_ids, row.response_ids, row.response_mask) for row in rows]
    log_probs, _ = padded([r.log_probs for r in rows], 0.0, response_width, dtype)
    versions, _ = padded([r.weight_versions for r in rows], 0, response_width, torch.int64)
    return {
        **token_columns(tokens, pad_token_id, prompt_width, response_width),
        "rollout_log_probs": log_probs,
        "token_weight_version": versions,
        "sample_index": torch.tensor([t.sample for t in trajectories], dtype=torch.int64),
        "weight_version": torch.tensor([t.oldest_version for t in trajectories], dtype=torch.int64),
    }


def token_columns(
    rows: Sequence[tuple[np.ndarray, np.ndarray, np.ndarray]],
    pad_token_id: int = 0,
    prompt_width: int | None = None,
    response_width: int | None = None,
) -> dict[str, torch.Tensor]:
    """prompts, prompt_mask [batch, prompt], responses, response_mask [batch, response] and attention_mask of rows (prompt ids,
    response ids, response mask); as wide as the longest row by default."""
    prompt_width = max(len(ids) for ids, _, _ in rows) if prompt_width is None else prompt_width
    response_width = max(len(ids) for _, ids, _ in rows) if response_width is None else response_width
    prompts, prompt_mask = padded([ids for ids, _, _ in rows], pad_token_id, prompt_width, torch.int64, pad_left=True)
    responses, exists = padded([ids for _, ids, _ in rows], pad_token_id, response_width, torch.int64)
    return {
        "prompts": prompts,
        "prompt_mask": prompt_mask,
        "responses": responses,
        "response_mask": padded([mask for _, _, mask in rows], False, response_width, torch.bool)[0],
        "attention_mask": torch.cat([prompt_mask, exists], dim=1),
    }


def padded(
    rows: Sequence[np.ndarray], fill: float, width: int, dtype: torch.dtype, *, pad_left: bool = False
) -> tuple[torch.Tensor, torch.Tensor]:
    """(values in `dtype`, mask), both [batch, width]; `pad_left` pads on the left."""
    values = torch.full((len(rows), width), fill, dtype=dtype)
    mask = torch.zeros((len(rows), width), dtype=torch.bool)
    for i, row in enumerate(rows):
        where = slice(width - len(row), width) if pad_left else slice(0, len(row))
        values[i, where] = torch.from_numpy(row).to(dtype)
        mask[i, where] = True
    return values, mask


def response_lengths(columns: Mapping[str, torch.Tensor]) -> torch.Tensor:
    """int64 [batch]: tokens of each response, environment tokens included."""
    return count_true(columns["attention_mask"], slice(-columns["responses"].shape[1], None))


def row_cuts(columns: Mapping[str, torch.Tensor]) -> list[list[int]]:
    """For each row, the first places of its segments, and its length: neighbouring tokens of one source and version are one
    segment. [0] for a row without tokens."""
    sampled, versions = columns["response_mask"].numpy(), columns["token_weight_version"].numpy()
    lengths = response_lengths(columns).tolist()
    cuts = [[0, length] if length else [0] for length in lengths]
    changes = (sampled[:, 1:] != sampled[:, :-1]) | (versions[:, 1:] != versions[:, :-1])
    for row, place in np.argwhere(changes).tolist():
        if place + 1 < lengths[row]:
            cuts[row].insert(-1, place + 1)
    return cuts


def trajectory_of(
    columns: Mapping[str, torch.Tensor], row: int, *, ordinal: int, status: Status, prompt_ids: Sequence[int] = ()
) -> Trajectory:
    """The inverse of `to_columns` for one row; neighbours of one source and version become one segment."""
    names = ("responses", "response_mask", "rollout_log_probs", "token_weight_version")
    row_columns = {name: columns[name][row : row + 1] for name in ("attention_mask", *names)}
    tokens, sampled, log_probs, versions = (row_columns[name][0].numpy() for name in names)
    trajectory = Trajectory(ordinal, int(columns["sample_index"][row]), prompt_ids, status=status)
    (cuts,) = row_cuts(row_columns)
    for start, end in itertools.pairwise(cuts):
        part = slice(start, end)
        source: Source = "policy" if sampled[start] else "environment"
        own_log_probs = log_probs[part] if sampled[start] else None
        trajectory.segments.append(Segment(tokens[part].astype(np.int32), own_log_probs, int(versions[start]), source))
    return trajectory
