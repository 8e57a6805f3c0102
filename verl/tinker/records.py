"""Typed records of the service: what requests ask for, free of the wire's form. They cross to the workers."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field

import numpy as np

from verl.data_proto.samples import Completion, SamplingParams
from verl.parallel.serialize import record


class RefusedRequest(Exception):
    """A request that is answered with `status` and a sentence."""

    def __init__(self, sentence: str, status: int = 400, retry_after_s: int | None = None):
        super().__init__(sentence)
        self.sentence, self.status, self.retry_after_s = sentence, status, retry_after_s


@record
@dataclass(frozen=True)
class Datum:
    """A sequence `tokens` int64 [N] with the inputs of its loss, such as target_tokens, each [N] or [N, K]. Position i
    predicts target_tokens[i]."""

    tokens: np.ndarray
    inputs: Mapping[str, np.ndarray]


@record
@dataclass(frozen=True)
class TrainingRequest:
    """Rows for one forward and, unless `forward_only`, backward pass, summed by the loss `loss`."""

    model_id: str
    loss: str
    settings: Mapping[str, float]
    data: list[Datum]
    forward_only: bool = False


@record
@dataclass(frozen=True)
class TrainingOutput:
    """Log-probs of the targets of each datum, [N] or [N, K] float32, and metrics named `name:reduction`."""

    log_probs: list[np.ndarray]
    metrics: dict[str, float]

    @classmethod
    def added(cls, outputs: Sequence[TrainingOutput]) -> TrainingOutput:
        """The output of ranks that have computed parts of the rows each."""
        log_probs = [np.add.reduce(parts) for parts in zip(*(o.log_probs for o in outputs), strict=True)]
        return cls(log_probs, {name: sum(o.metrics[name] for o in outputs) for name in outputs[0].metrics})


@record
@dataclass(frozen=True)
class Targets:
    """Tokens whose log-probs a request wants: `ids` [prompt - 1, K], for the tokens of the prompt after the first; -1 for none.
    In an answer their log-probs, 0 for none. `starts` and `columns` list the cells of a sparse matrix (CSR)."""

    ids: np.ndarray
    starts: np.ndarray | None = None
    columns: np.ndarray | None = None


@record
@dataclass(frozen=True)
class SamplingRequest:
    """`num_samples` samples of at most `max_tokens` tokens after `tokens`. `params` is equal for requests that are computed
    together. `ordinal` keys the random numbers."""

    tokens: tuple[int, ...]
    num_samples: int
    max_tokens: int
    params: SamplingParams
    ordinal: int
    prompt_log_probs: bool = False
    top_of_prompt: int = 0  # most probable tokens that are listed at each token of the prompt
    top_of_samples: int = 0
    last_tokens: int | None = None  # of the prompt that are scored; None: all
    targets: Targets | None = None


@record
@dataclass(frozen=True)
class TopTokens:
    """The K most probable tokens at each position, descending: both [positions, K]."""

    ids: np.ndarray
    log_probs: np.ndarray


@record
@dataclass(frozen=True)
class SampleOutput:
    """Samples of one request. `prompt_log_probs` is float32 [prompt], NaN for tokens without a score."""

    completions: list[Completion]
    prompt_log_probs: np.ndarray | None = None
    prompt_top: TopTokens | None = None
    sample_tops: list[TopTokens] = field(default_factory=list)
    targets: Targets | None = None
