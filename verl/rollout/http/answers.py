"""The JSON answer of a service, of any shape: values read by their place and their type.

answer.at(str, "choices", 0, "finish_reason")     # ModelError without one, with the place
sample = checked_reply(answer, token_ids, log_probs, reason, request)
"""

from __future__ import annotations

import base64
import json
import math
from dataclasses import dataclass, field, replace
from typing import Any, TypeVar, cast

from verl.data_proto.media import Clip, ImageFiles
from verl.data_proto.samples import FinishReason, SamplingParams
from verl.errors import ModelError
from verl.foreign_text import clean

T = TypeVar("T")

_NAMES = {str: "a text", int: "a whole number", bool: "true or false", list: "a list", dict: "an object"}
# x - logsumexp(x) in float32 can end above 0 by the rounding of logits of up to 10,000: 2**-24 * 10**4
_ROUNDING = 1e-3
_LEAST = -3e38  # less is not finite in float32; NaN is not above it either
_MOST_STRINGS = 32  # of a request to SGLang


@dataclass(frozen=True)
class SampleRequest:
    """One sample: a prompt, the sampling parameters, and the key of its random numbers (verl.rollout.uniforms)."""

    token_ids: tuple[int, ...]
    params: SamplingParams
    stop_token_ids: list[int]  # the end-of-sequence tokens among them
    key: int
    num_drawn: int
    vocab_size: int  # of the model
    name: str = "a sample"  # for errors
    files: ImageFiles = field(default_factory=ImageFiles)  # images, for each a token of the prompt
    adapter: str | None = None  # the name by which the service holds it

    @property
    def num_prompt_tokens(self) -> int:
        """Tokens of the prompt and its images, as the model reads them."""
        return len(self.files.token_ids or self.token_ids)

    @property
    def stop_strings(self) -> list[str]:
        """Stop strings for the service: a hint (engine.sample_by_rules), perhaps fewer than the sample has."""
        return [string for string in self.params.stop if string][:_MOST_STRINGS]

    def after(self, token_ids: list[int]) -> SampleRequest:
        """The request for the remaining tokens of the sample, without stop strings."""
        num_left = self.params.max_new_tokens - len(token_ids)
        files = self.files
        return replace(
            self,
            token_ids=(*self.token_ids, *token_ids),
            params=replace(self.params, stop=(), max_new_tokens=num_left),
            num_drawn=self.num_drawn + len(token_ids),
            files=replace(files, token_ids=(*files.token_ids, *token_ids)) if files.token_ids else files,
        )

    @property
    def num_tokens(self) -> int:
        """Tokens that an answer can hold: some services repeat the prompt."""
        return self.num_prompt_tokens + self.params.max_new_tokens

    @property
    def urls(self) -> list[tuple[str, str]]:
        """(image or video, data URL) of each image. The URL of a video has its frames as vLLM reads them."""
        return [
            ("video", f"data:video/jpeg;base64,{','.join(map(_base64, item.frames))}")
            if isinstance(item, Clip)
            else ("image", f"data:image/png;base64,{_base64(item)}")
            for item in self.files.contents
        ]


def _base64(file: bytes) -> str:
    return base64.b64encode(file).decode()


@dataclass(frozen=True)
class SampleReply:
    """The sample of a service, without tokens after its first stop token; a service may have ended it for a reason of its own
    that is no end here. `version` is the version of the weights that the service reports with it, or None."""

    token_ids: list[int]
    log_probs: list[float]
    finish_reason: FinishReason
    version: str | None = None


@dataclass(frozen=True)
class Answer:
    """The JSON `value` of the answer of the service at `url` to `call`, such as "POST /v1/completions"."""

    url: str
    call: str
    value: Any

    def at(self, kind: type[T], *place: str | int) -> T:
        """The value at `place`, of the type `kind`: str, int, bool, list or dict. Raises ModelError without one."""
        value = self.get(kind, *place)
        if value is None:
            raise self.unusable(f"has no {_path(place)}")
        return value

    def get(self, kind: type[T], *place: str | int) -> T | None:
        """As `at`, but None for nothing, or null. Raises ModelError for a value of another type."""
        value = self._find(place)
        if value is not None and type(value) is not kind:
            raise self.unusable(f"has {_shown(value)} as {_path(place)}, not {_NAMES[kind]}")
        return value

    def label(self, *place: str | int) -> str | None:
        """The name, message or number at `place` as a text that can be shown. Raises as `get` does."""
        value = self._find(place)
        text = str(value) if type(value) is int else self.get(str, *place)
        return None if text is None else clean(text)

    def _find(self, place: tuple[str | int, ...]) -> object:
        value = self.value
        for step in place:
            if type(value) is dict:
                value = value.get(step)
            else:
                value = value[step] if type(value) is list and isinstance(step, int) and step < len(value) else None
        return value

    def unusable(self, fault: str) -> ModelError:
        """The error for an answer with this fault."""
        return ModelError(
            f"The answer of the service at {self.url} to {self.call} {fault}. Look at its log; it may be one of another kind."
        )


def checked_reply(
    answer: Answer,
    token_ids: list[Any],
    log_probs: list[Any],
    reason: str,
    request: SampleRequest,
    version: str | None = None,
) -> SampleReply:
    """The sample of an answer. Raises ModelError for token ids outside the vocabulary, log-probs above 0, more tokens than were
    wanted, none, or another number of log-probs, and for a sample that the service has ended by itself."""
    place = f"for {request.name}"
    if reason not in ("stop", "length"):
        raise answer.unusable(f"says that it ended {request.name} by itself ({clean(reason, limit=100)})")
    if not 1 <= len(token_ids) == len(log_probs) <= request.params.max_new_tokens:
        raise answer.unusable(
            f"has {len(token_ids)} tokens and {len(log_probs)} log-probs {place}, of {request.params.max_new_tokens} at most"
        )
    for token in token_ids:
        if type(token) is not int or not 0 <= token < request.vocab_size:
            raise answer.unusable(
                f"has {_shown(token)} as a token id {place}; the model knows {request.vocab_size:,} tokens"
            )
    for value in log_probs:
        if type(value) not in (int, float) or value > _ROUNDING:
            raise answer.unusable(f"has {_shown(value)} as a log-probability {place}; those are numbers of at most 0")
    values = [min(0.0, float(value)) if value > _LEAST else -math.inf for value in log_probs]
    end = next((i + 1 for i, token in enumerate(token_ids) if token in request.stop_token_ids), None)
    if end is not None:  # SGLang with ignore_eos continues
        token_ids, values, reason = token_ids[:end], values[:end], "stop"
    return SampleReply(token_ids, values, cast("FinishReason", reason), version)


def require_prompt(answer: Answer, is_same: bool, request: SampleRequest) -> None:
    """Raise ModelError for the answer to another prompt than was sent: cut, or tokenized again by a proxy."""
    if not is_same:
        raise answer.unusable(f"is of another prompt than the {len(request.token_ids)} tokens sent for {request.name}")


def _path(place: tuple[str | int, ...]) -> str:
    return "".join(f"[{step}]" if isinstance(step, int) else f".{step}" for step in place).lstrip(".") or "whole"


def _shown(value: Any) -> str:
    """A value as JSON, cut short."""
    kind = type(value)
    if kind in (list, dict):
        return "a list" if kind is list else "an object"
    return clean(json.dumps(value) if kind is not int else hex(value) if abs(value) >> 64 else str(value), limit=200)
