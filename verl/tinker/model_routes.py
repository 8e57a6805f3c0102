"""Routes of models: creation, training, saving and loading. A model computes its requests by their seq_id."""

from __future__ import annotations

import asyncio
import hashlib
import time
from collections.abc import Callable
from functools import partial
from typing import Any

from starlette.requests import Request
from tinker import types

from verl.engines.adapters import PARTS, Adapter
from verl.models.optim import AdamStep
from verl.tinker.checkpoints import ModelFacts, SavedAdapter
from verl.tinker.codec import training_message, training_request, training_result
from verl.tinker.messages import as_answer, read_message
from verl.tinker.queues import RequestFuture, WireAnswer
from verl.tinker.records import RefusedRequest
from verl.tinker.service import PROTOBUF, ServedModel, ServedSampler, Service


class ModelRoutes:
    """One method for each route. A method returns a message of the SDK, a RequestFuture or a Response."""

    def __init__(self, service: Service):
        self.service = service

    async def create_model(self, request: Request) -> Any:
        asked = await read_message(request, types.CreateModelRequest)
        self.service.touch(asked.session_id)
        lora = asked.lora_config
        if lora is None:
            raise RefusedRequest("Full fine-tuning is not available in this version. Create a LoRA training client.")
        parts = [
            part
            for part, trains in zip(PARTS, (lora.train_attn, lora.train_mlp, lora.train_unembed), strict=True)
            if trains
        ]
        most = self.service.bench.engine.spec
        assert most is not None
        if not 1 <= lora.rank <= most.rank or not parts:
            raise RefusedRequest(
                f"A LoRA model has a rank from 1 to {most.rank} and trains at least one kind of layer."
            )
        model_id = f"{asked.session_id}:train:{asked.model_seq_id}"
        seed = _seed(model_id) if lora.seed is None else lora.seed
        make = partial(self.service.bench.engine.new_adapter, lora.rank, seed, parts)
        return self._new_model(request, asked, model_id, asked.base_model, lora.rank, parts, make)

    def _new_model(
        self,
        request: Request,
        asked: Any,
        model_id: str,
        base: str,
        rank: int,
        parts: list[str],
        make: Callable[[], Adapter],
    ) -> RequestFuture:
        base = self.service.base_model(base)
        metadata = {str(k): str(v) for k, v in (asked.user_metadata or {}).items()} or None
        facts = ModelFacts(model_id, base, rank, parts, time.time(), metadata)
        self.service.checkpoints.register(model_id, facts.document())
        model = ServedModel(model_id, asked.session_id, base, rank)
        answer: Any = types.CreateModelResponse(model_id=model_id)
        if isinstance(asked, types.LoadWeightsRequest):
            answer = types.LoadWeightsResponse(path=asked.path)
        return self.service.add_model(model, request.state.digest, make, answer)

    async def get_info(self, request: Request) -> Any:
        model = self.service.model((await read_message(request, types.GetInfoRequest)).model_id)
        bench = self.service.bench
        data = types.ModelData(
            arch=bench.architecture, model_name=model.base_model, tokenizer_id=str(self.service.checkpoints.base)
        )
        return types.GetInfoResponse(
            type="get_info", model_data=data, model_id=model.model_id, is_lora=True, lora_rank=model.rank,
            model_name=model.base_model,
        )  # fmt: skip

    async def forward_backward(self, request: Request) -> Any:
        message = training_message(request.state.body)
        model, bench = self.service.model(message.model_id), self.service.bench

        def prepare() -> Callable[[], WireAnswer]:
            checked = training_request(message, bench.vocabulary, bench.longest)

            def work() -> WireAnswer:
                try:
                    return WireAnswer(training_result(bench.forward_backward(model.trained(), checked)), PROTOBUF)
                except Exception as error:
                    model.failed = model.failed or str(error)
                    raise

            return work

        return self.service.queue(model, message.seq_id, request.state.digest, prepare)

    async def optim_step(self, request: Request) -> Any:
        asked = await read_message(request, types.OptimStepRequest)
        model, values = self.service.model(asked.model_id), asked.optim_params

        def prepare() -> Callable[[], WireAnswer]:
            return partial(self._step, model, _adam_step(values))

        return self.service.queue(model, asked.seq_id, request.state.digest, prepare)

    def _step(self, model: ServedModel, values: AdamStep) -> WireAnswer:
        adapter = model.trained()
        if model.failed:
            reason, model.failed = model.failed, ""
            adapter.discard()
            raise RefusedRequest(f"A forward_backward of this step failed ({reason}), so no step was taken.")
        return as_answer(types.OptimStepResponse(metrics=self.service.bench.optim_step(adapter, values)))

    async def save_weights(self, request: Request) -> Any:
        asked = await read_message(request, types.SaveWeightsRequest)
        model = self.service.model(asked.model_id)
        name = asked.path or f"step-{asked.seq_id}"

        def work() -> WireAnswer:
            saved = self._save(model, "weights", name, asked, overwrite=asked.overwrite)
            return as_answer(types.SaveWeightsResponse(path=saved.uri))

        return self.service.queue(model, asked.seq_id, request.state.digest, lambda: work)

    async def save_weights_for_sampler(self, request: Request) -> Any:
        asked = await read_message(request, types.SaveWeightsForSamplerRequest)
        model = self.service.model(asked.model_id)

        def work() -> WireAnswer:
            if asked.path is not None:
                saved = self._save(model, "sampler_weights", asked.path, asked, overwrite=False)
                return as_answer(types.SaveWeightsForSamplerResponseInternal(path=saved.uri))
            sampler_id = f"{model.session_id}:sample:{asked.sampling_session_seq_id}"
            weights = model.trained().snapshot()
            self.service.samplers[sampler_id] = ServedSampler(sampler_id, model.session_id, model.base_model, weights)
            return as_answer(types.SaveWeightsForSamplerResponseInternal(sampling_session_id=sampler_id))

        def prepare() -> Callable[[], WireAnswer]:
            if asked.kind != "snapshot":
                raise RefusedRequest("Samplers that follow the weights (inflight) are not available. Use snapshots.")
            return work

        return self.service.queue(model, asked.seq_id, request.state.digest, prepare)

    def _save(self, model: ServedModel, kind: str, name: str, asked: Any, *, overwrite: bool) -> SavedAdapter:
        notes = {"base_model": model.base_model, "user_metadata": asked.user_metadata}
        return self.service.checkpoints.save(
            model.model_id, kind, name, model.trained(), overwrite=overwrite, notes=notes
        )

    async def load_weights(self, request: Request) -> Any:
        asked = await read_message(request, types.LoadWeightsRequest)
        checkpoints = self.service.checkpoints
        saved = await asyncio.to_thread(checkpoints.get, asked.path)
        load = partial(checkpoints.load, asked.path, optimizer=asked.optimizer)
        if asked.session_id is not None:
            self.service.touch(asked.session_id)
            model_id = f"{asked.session_id}:train:{asked.model_seq_id}"
            base = asked.base_model or saved.state["base_model"]
            parts = checkpoints.facts(saved.model_id)["parts"]
            return self._new_model(request, asked, model_id, base, saved.state["rank"], parts, load)
        model = self.service.model(asked.model_id or "")

        def work() -> WireAnswer:
            model.adapter = load()
            return as_answer(types.LoadWeightsResponse(path=asked.path))

        return self.service.queue(model, asked.seq_id, request.state.digest, lambda: work)


def _adam_step(values: Any) -> AdamStep:
    if not isinstance(values, types.AdamParams):
        raise RefusedRequest("The optimizer here is AdamW; send adam_params.")
    rates, betas = (values.learning_rate, values.weight_decay), (values.beta1, values.beta2)
    clip_grad = max(0.0, values.grad_clip_norm)
    fits = all(0 <= r <= 1e3 for r in rates) and all(0 <= b < 1 for b in betas) and 0 <= values.eps <= 1
    if not fits or clip_grad == float("inf"):
        raise RefusedRequest(f"A value of adam_params is out of range: {values}.")
    return AdamStep(values.learning_rate, *betas, values.eps, values.weight_decay, clip_grad)


def _seed(model_id: str) -> int:
    return int.from_bytes(hashlib.sha256(model_id.encode()).digest()[:4], "little")
