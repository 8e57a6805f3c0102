"""Samples in turns: a generation that stays open, advances by some steps at a time, and takes requests before each of them.

Every lane has an engine with keys and values of its requests. All engines read one copy of the weights, or ask a service.
"""

from __future__ import annotations

import secrets
from collections import deque
from collections.abc import Collection, Mapping
from dataclasses import dataclass, field, replace
from typing import Any, cast

from verl.data_proto.samples import Completion, PromptRequest, SamplingParams
from verl.models.adapter_weights import AdapterWeights
from verl.rollout.native.compiled.forward import CpuForward
from verl.rollout.native.engine import NativeRollout
from verl.rollout.native.torch.forward import DenseForward
from verl.tinker.outside import OutsideRollout
from verl.tinker.records import SamplingRequest

_WAIT_S = 0.05  # of a turn for samples of a service
MOST_STEPS = 8  # of a turn: a step with few samples takes longer than its tokens say
_MOST_TENANTS = 16  # with rollout.max_num_seqs samples each in a lane


class LaneRollout(NativeRollout):
    """An engine that shares the copy of the weights of `main`, and whose `adapters` change while it generates."""

    main: NativeRollout

    @classmethod
    def of(cls, main: NativeRollout) -> LaneRollout:
        rows = _MOST_TENANTS * main.config.max_num_seqs
        config = replace(main.config, max_num_seqs=rows, batch_invariant="auto")  # `main` was examined
        rollout = cls(main.module, main.tokenizer, config, eos_token_ids=main.eos_token_ids)
        rollout.main, rollout.adapters = main, cast(Any, {None: None})
        return rollout

    def dense(self) -> DenseForward | CpuForward | None:
        return self.main.dense()

    def named_adapters(self) -> Any:
        return self.adapters

    def hold(self, name: str, weights: AdapterWeights) -> None:
        """Let requests name an adapter."""
        self.named_adapters()[name] = weights

    def let_go(self, name: str) -> None:
        """Forget an adapter."""
        del self.named_adapters()[name]


@dataclass
class _RunningRequest:
    """A request with its samples, and the parts of it that have not begun."""

    weights: AdapterWeights | None
    request: SamplingRequest
    parts: deque[PromptRequest]
    done: list[Completion] = field(default_factory=list)
    running: int = 0


class OpenLane:
    """Requests with equal `params` and at most `longest` tokens a sample. Unless the engine mixes adapters, all have equal
    weights, and the module shows them when the lane advances."""

    def __init__(
        self, main: NativeRollout | OutsideRollout, params: SamplingParams, longest: int, *, mixes: bool = True
    ):
        self._is_outside = isinstance(main, OutsideRollout)
        self._rollout = main.lane() if isinstance(main, OutsideRollout) else LaneRollout.of(main)
        self._most_rows, self._prefix = main.config.max_num_seqs, secrets.token_hex(4)
        self._generation = self._rollout.open(replace(params, max_new_tokens=longest), step=0)
        self._requests, self._mixes = dict[int, _RunningRequest](), mixes
        self._names: dict[AdapterWeights, str] = {}

    @property
    def is_empty(self) -> bool:
        return not self._requests

    def weights(self) -> set[AdapterWeights | None]:
        """The adapters of the requests, None for the base model."""
        return {running_request.weights for running_request in self._requests.values()}

    def add(self, number: int, weights: AdapterWeights | None, request: SamplingRequest) -> None:
        """Take a request under a number of its lane; it begins with the next step."""
        name = None
        if weights is not None and self._mixes:
            if weights not in self._names:
                self._rollout.hold(f"{self._prefix}-{number}", weights)
            name = self._names.setdefault(weights, f"{self._prefix}-{number}")
        prompt = PromptRequest(
            number, request.tokens, max_new_tokens=request.max_tokens, random_ordinal=request.ordinal, adapter=name
        )
        firsts = range(0, request.num_samples, self._most_rows)
        counts = [(first, min(self._most_rows, request.num_samples - first)) for first in firsts]
        parts = deque(replace(prompt, first_sample=first, num_samples=count) for first, count in counts)
        self._requests[number] = running_request = _RunningRequest(weights, request, parts)
        self._begin(running_request)

    def _begin(self, running_request: _RunningRequest) -> None:
        """Begin the next part of a request, if it has one."""
        if running_request.parts:
            part = running_request.parts.popleft()
            running_request.running = part.num_samples or 1
            self._generation.add(part)

    def drop(self, numbers: Collection[int]) -> None:
        """Forget requests that have begun, as the ones whose clients have gone. Unknown numbers are ignored."""
        for number in self._requests.keys() & set(numbers):
            samples = range(self._requests.pop(number).request.num_samples)
            self._generation.abort([(number, sample) for sample in samples])
        self._forget()

    def advance(self, tokens: int) -> Mapping[int, tuple[AdapterWeights | None, SamplingRequest, list[Completion]]]:
        """Take steps of about `tokens` tokens, at least one: the requests that have ended, by their numbers."""
        ended = {}
        for _ in range(1 if self._is_outside else MOST_STEPS):
            tokens -= max(1, sum(running_request.running for running_request in self._requests.values()))
            for completion in self._generation.poll(_WAIT_S if self._is_outside else 0):
                running_request = self._requests[completion.ordinal]
                running_request.done.append(completion)
                running_request.running -= 1
                if not running_request.running:
                    self._begin(running_request)
                if not running_request.running:
                    samples = sorted(running_request.done, key=lambda c: c.sample)
                    ended[completion.ordinal] = (running_request.weights, running_request.request, samples)
                    del self._requests[completion.ordinal]
            if tokens <= 0 or not self._requests:
                break
        if ended:
            self._forget()
        return ended

    def _forget(self) -> None:
        """Forget the adapters that no request has; the last request ends the generation."""
        for weights in [weights for weights in self._names if weights not in self.weights()]:
            self._rollout.let_go(self._names.pop(weights))
        if not self._requests:
            self._generation.close()

    def close(self) -> None:
        """End a lane that has failed, with its requests."""
        self._requests.clear()
        self._forget()
