"""Typed records that pass between the stages of a rollout: request -> completion -> score. No torch here."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any, Literal

from verl.data_proto.media import Media, MediaSpan, Spans

if TYPE_CHECKING:
    import numpy as np

    from verl.data_proto.proto import DataProto

FinishReason = Literal["stop", "length", "abort"]
SampleKey = tuple[int, int]  # (prompt index, sample)


def sample_key(split: str, ordinal: int, sample: int) -> str:
    """Name of a sample, unique while it is being scored."""
    return f"{split}/{ordinal}/{sample}"


def names_of_samples(batch: DataProto) -> list[str]:
    """The name of each row, not stored: a text takes 70 bytes."""
    columns, splits = batch.batch, batch.non_tensor_batch["sample_split"]
    return list(map(sample_key, splits, columns["ordinal"].tolist(), columns["sample_index"].tolist()))


@dataclass(frozen=True)
class SamplingParams:
    """Rules of sampling. A `temperature` of 0 is greedy decoding.

    Sampled log-probabilities are taken from `softmax(logits / temperature)` before top-k, top-p and min-p filtering
    (greedy: temperature 1), so that they compare with the training forward.

    >>> SamplingParams(n=8, temperature=0.7, max_new_tokens=256, stop=("</answer>",)).top_k
    -1
    """

    n: int = 1  # samples per prompt; the prompt is computed once for all of them
    temperature: float = 1.0
    top_p: float = 1.0
    top_k: int = -1  # -1: off
    min_p: float = 0.0
    max_new_tokens: int = 512
    stop: tuple[
        str, ...
    ] = ()  # a response ends after the token that completes one of these strings (kept in the response)
    stop_token_ids: tuple[int, ...] = ()  # in addition to the model's end-of-sequence ids; the stopping token is kept
    ignore_eos: bool = False
    seed: int = 42
    grammar: str = ""  # of requests that have none


@dataclass(frozen=True)
class PromptRequest:
    """One prompt to sample from. `ordinal` numbers the prompt in the run and, with `(seed, step, sample, position)`, keys its
    random numbers: neither batch composition nor worker count changes the sampled tokens.

    A resumed sample has its response so far at the end of `token_ids`. It samples the same tokens as without the break.

    >>> new = PromptRequest(ordinal=7, token_ids=(1, 2))
    >>> resumed = PromptRequest(ordinal=7, token_ids=(1, 2, 5, 6), first_sample=1, num_drawn=2, num_samples=1)
    """

    ordinal: int
    token_ids: tuple[int, ...]
    first_sample: int = 0  # index of the first of its samples
    num_drawn: int = 0  # tokens at the end of token_ids that belong to the response: the position of the next token
    num_samples: int | None = None  # None: SamplingParams.n
    max_new_tokens: int | None = None  # of this request, at most SamplingParams.max_new_tokens; None: the same
    media: Media | None = None  # images of the prompt
    spans: Spans = ()  # images at their places, of an episode
    adapter: str | None = None  # name of one of NativeRollout.adapters
    expected_tokens: float = 0.0  # that a new sample will likely get; prompts with more begin first, 0 is unknown
    random_ordinal: int | None = None  # keys the random numbers in place of `ordinal`
    random_step: int | None = None  # in place of the generation's step: the first step of a resumed sample
    stop: tuple[str, ...] = ()  # in addition to the strings of SamplingParams
    grammar: str = (
        ""  # what the tokens after `token_ids` must be: a JSON schema, or {} for any JSON object; "": anything
    )

    @property
    def placed(self) -> Spans:
        """All images at their places."""
        return self.spans if self.media is None else (MediaSpan(0, self.prompt_length, self.media), *self.spans)

    @property
    def prompt_length(self) -> int:
        """Tokens before the response."""
        return len(self.token_ids) - self.num_drawn


@dataclass(frozen=True)
class TurnRequest:
    """Another turn of a sample that finished and was kept. `token_ids`, the answer of an environment, follow its response; the
    policy continues after them. They count as positions of the response. Places of `spans` count from the first of them."""

    ordinal: int
    sample: int
    token_ids: tuple[int, ...]
    max_new_tokens: int | None = None  # of this turn, as in PromptRequest
    spans: Spans = ()
    stop: tuple[str, ...] = ()  # as in PromptRequest, of this turn
    grammar: str = ""


@dataclass
class Completion:
    """One finished sample: PromptRequest(7, ...) with n=2 gives Completion(7, 0, ...) and Completion(7, 1, ...). When a sample
    has resumed or continued, only the new tokens.

    >>> Completion(7, 1, token_ids=[5, 6], log_probs=[-0.1, -2.0], finish_reason="stop", weight_version=3).token_ids
    [5, 6]
    """

    ordinal: int
    sample: int
    token_ids: list[int]
    log_probs: list[float]  # same length as token_ids, see SamplingParams
    finish_reason: FinishReason
    weight_version: int  # version of the weights that made it
    experts: np.ndarray | None = None  # [tokens, layers, k] of prompt and response but the last token, if recorded

    @property
    def key(self) -> SampleKey:
        """(prompt index, sample)."""
        return self.ordinal, self.sample


@dataclass
class ScoreRequest:
    """Arguments of a reward function: compute_score(data_source, solution_str, ground_truth, extra_info).

    >>> ScoreRequest("7/0", "openai/gsm8k", solution_str="2 + 2 = 4", ground_truth="4").extra_info
    {}
    """

    key: str  # unique within one scoring call, for example "7/0" (ordinal/sample)
    data_source: str
    solution_str: str
    ground_truth: object
    extra_info: dict[str, object] = field(default_factory=dict)
    response_length: int = 0  # tokens, for length-based shaping
    response_ids: tuple[int, ...] = ()  # of the response; they do not travel to the workers of a pool
    prompt_ids: tuple[int, ...] = ()  # as response_ids
    from_model: dict[str, object] = field(default_factory=dict)  # further arguments, from a reward model


@dataclass
class Score:
    """A reward with its parts. `error` is None, or the sentence that says why the reward function gave none; then `score` is
    reward.default_score, or 0 without one.

    >>> Score("7/0", 1.0, parts={"format": 0.5}).error is None
    True
    """

    key: str
    score: float
    parts: dict[str, Any] = field(default_factory=dict)
    error: str | None = None
    seconds: float = 0.0
