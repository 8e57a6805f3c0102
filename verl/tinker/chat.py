"""An endpoint for clients of OpenAI's API: chat completions and completions of a checkpoint, or of the base model.

    client = openai.OpenAI(base_url="http://127.0.0.1:8000/v1", api_key="tml-...")
    client.chat.completions.create(model="tinker://MODEL/sampler_weights/NAME", messages=[...])

A request becomes a sample request of a session that the tenant has for this endpoint, with its limits and turns.
"""

import asyncio
import hashlib
import itertools
import time
from dataclasses import replace
from typing import Any, Literal, NamedTuple

import numpy as np
import pydantic
from starlette.requests import ClientDisconnect
from tinker import types
from tinker.proto import tinker_public_pb2 as wire

from verl.data.schema import messages_of
from verl.data_proto.tokenizer import Tokenizer
from verl.errors import DataError
from verl.tinker.bases import BaseModel
from verl.tinker.checkpoints import KINDS
from verl.tinker.records import RefusedRequest
from verl.tinker.routes import Routes
from verl.tinker.served import ENDPOINT, ClientCall

_WAIT_S, _LOOK_S = 3600.0, 2.0
_SPARE = 2  # times the characters of the model's longest text, before which a text is not read


class GenerationRequest(pydantic.BaseModel):
    """The settings that both requests have."""

    model_config = pydantic.ConfigDict(extra="forbid", strict=True)
    model: str
    max_tokens: int | None = None
    temperature: float = 1.0
    top_p: float = 1.0
    n: int = 1
    stop: str | list[str] | None = None
    seed: int | None = None
    stream: Literal[False] = False
    user: str | None = None


class ChatRequest(GenerationRequest):
    messages: list[Any]
    max_completion_tokens: int | None = None
    logprobs: bool = False


class CompletionRequest(GenerationRequest):
    prompt: str | list[int]
    logprobs: Literal[0] | None = None


class _Sample(NamedTuple):
    """A sampled text, "length" or "stop", and its tokens with their log-probs."""

    text: str
    finish_reason: str
    tokens: list[int]
    log_probs: list[float]


class ChatRoutes:
    """One method for each route."""

    def __init__(self, routes: Routes):
        self.routes, self.service, self._numbers = routes, routes.service, itertools.count(time.time_ns())
        self._longest_tokens = dict[BaseModel, int]()

    async def models(self, call: ClientCall) -> object:
        checkpoints, mine = self.service.checkpoints, self.service.checkpoints.models(call.tenant.sees)
        saved = [(one.uri, one.state["time"]) for name in mine for one in checkpoints.listed(name) if one.kind in KINDS]
        rows = [*((name, 0.0) for name in self.service.bases.names), *saved]
        data = [{"id": name, "object": "model", "created": int(at), "owned_by": call.tenant.name} for name, at in rows]
        return {"object": "list", "data": data}

    async def chat(self, call: ClientCall) -> object:
        message = call.read(ChatRequest)
        base = self._base(call, message.model)
        tokenizer = base.tokenizer
        try:
            messages = messages_of(message.messages)
        except DataError as error:
            raise RefusedRequest(str(error)) from error
        self._require_short(base, sum(len(str(said.get("content") or "")) for said in messages))
        settings = {"add_generation_prompt": True, "return_dict": False}
        try:
            ids = await asyncio.to_thread(tokenizer.apply_chat_template, messages, **settings)
        except Exception as error:  # templates of users raise whatever they like
            raise RefusedRequest(f"The chat template takes no such messages ({type(error).__name__}).") from error
        if message.max_completion_tokens is not None:
            message = message.model_copy(update={"max_tokens": message.max_completion_tokens})
        samples = await self._samples(call, message, list(ids))
        choices = [
            {
                "index": number, "finish_reason": sample.finish_reason,
                "message": {"role": "assistant", "content": sample.text},
                "logprobs": {"content": _scored(sample, tokenizer)} if message.logprobs else None,
            }
            for number, sample in enumerate(samples)
        ]  # fmt: skip
        return self._answer("chat.completion", message, len(ids), samples, choices)

    async def complete(self, call: ClientCall) -> object:
        message = call.read(CompletionRequest)
        base, ids = self._base(call, message.model), message.prompt
        if isinstance(ids, str):
            self._require_short(base, len(ids))
            ids = await asyncio.to_thread(base.tokenizer.encode, ids)
        samples = await self._samples(call, message, ids)
        choices = [
            {"index": number, "finish_reason": sample.finish_reason, "text": sample.text, "logprobs": None}
            for number, sample in enumerate(samples)
        ]
        return self._answer("text_completion", message, len(ids), samples, choices)

    async def _samples(self, call: ClientCall, message: GenerationRequest, ids: list[int]) -> list[_Sample]:
        base = self._base(call, message.model)
        tokenizer = base.tokenizer
        shared = message.model_dump(include={"max_tokens", "temperature", "top_p", "seed"})
        sampling = types.SamplingParams(**shared, stop=None)
        texts = [message.stop] if isinstance(message.stop, str) else message.stop or []
        stops = [text for text in texts if text]  # engines pass over an empty one
        if stops:  # a stop replaces the end-of-sequence tokens for the SDK, and is one more here
            ends = [tokenizer.decode([token]) for token in base.facts.ends]
            sampling = sampling.model_copy(update={"stop": [*stops, *filter(None, ends)]})
        request = types.SampleRequest(
            sampling_session_id=await self._sampler(call, message.model), seq_id=next(self._numbers), num_samples=message.n,
            prompt=types.ModelInput.from_ints(ids), sampling_params=sampling,
        )  # fmt: skip
        future = self.service.futures[(await self.routes.sample(_as(call, "asample", request))).request_id]
        until = time.monotonic() + _WAIT_S
        while (answer := await future.wait(_LOOK_S)) is None and not future.ends and time.monotonic() < until:
            if await call.is_gone():
                future.is_gone = True
                raise ClientDisconnect
        if answer is None:
            raise RefusedRequest("The server ends, or has no time for this request. Ask again later.", 503)
        if answer.failure is not None:
            raise RefusedRequest(answer.failure, 500)
        samples = list[_Sample]()
        for sequence in wire.SampleResponse.FromString(answer.body).sequences:
            tokens = np.frombuffer(sequence.tokens, "<i4").tolist()
            scores = np.frombuffer(sequence.logprobs, "<f4").tolist()
            text = tokenizer.decode(tokens, skip_special_tokens=True)
            text = min((text.partition(stop)[0] for stop in stops), key=len, default=text)
            reason = "length" if sequence.stop_reason == wire.STOP_REASON_LENGTH else "stop"
            samples.append(_Sample(text, reason, tokens, scores))
        return samples

    def _require_short(self, base: BaseModel, num_chars: int) -> None:
        """Raise RefusedRequest for a text that the model cannot hold, before it is read: that takes seconds a megabyte."""
        if base not in self._longest_tokens:
            self._longest_tokens[base] = max(map(len, base.tokenizer.get_vocab()), default=1)
        if num_chars > _SPARE * base.facts.longest * self._longest_tokens[base]:
            raise RefusedRequest(f"A text of {num_chars:,} characters exceeds the model's {base.facts.longest} tokens.")

    def _base(self, call: ClientCall, model: str) -> BaseModel:
        """The base model of a model's name: its own, or that of a checkpoint."""
        saved = self.service.saved(call, model) if model.startswith("tinker://") else None
        return self.service.bases.named(model if saved is None else saved.state["base_model"])

    async def _sampler(self, call: ClientCall, model: str) -> str:
        """The sampler of a model in the tenant's session for this endpoint."""
        session_id = f"{ENDPOINT}{call.tenant.name}"
        if session_id not in self.service.sessions:
            self.service.new_session(session_id, call.tenant, {"display_name": "OpenAI endpoint"})
        is_saved = model.startswith("tinker://")
        number = int.from_bytes(hashlib.sha256(model.encode()).digest()[:6], "big")
        request = types.CreateSamplingSessionRequest(
            session_id=session_id, sampling_session_seq_id=number, base_model=None if is_saved else model,
            model_path=model if is_saved else None,
        )  # fmt: skip
        session = await self.routes.create_sampling_session(_as(call, "create_sampling_session", request))
        return session.sampling_session_id

    def _answer(
        self, kind: str, message: GenerationRequest, num_prompt: int, samples: list[_Sample], choices: list[Any]
    ) -> dict[str, object]:
        num_sampled = sum(len(sample.tokens) for sample in samples)
        usage = {
            "prompt_tokens": num_prompt,
            "completion_tokens": num_sampled,
            "total_tokens": num_prompt + num_sampled,
        }
        identity = f"cmpl-{next(self._numbers)}"
        named = {"id": identity, "object": kind, "created": int(time.time()), "model": message.model}
        return {**named, "choices": choices, "usage": usage}


def _scored(sample: _Sample, tokenizer: Tokenizer) -> list[dict[str, object]]:
    texts = [tokenizer.decode([token]) for token in sample.tokens]
    return [
        {"token": text, "logprob": score, "bytes": list(text.encode()), "top_logprobs": []}
        for text, score in zip(texts, sample.log_probs, strict=True)
    ]


def _as(call: ClientCall, route: str, message: pydantic.BaseModel) -> ClientCall:
    """The call that a client of the SDK would have made."""
    body = message.model_dump_json(exclude_none=True).encode()
    return replace(call, route=route, body=body, digest=hashlib.sha256(body).hexdigest())
