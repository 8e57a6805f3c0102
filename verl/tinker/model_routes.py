"""Routes of models: creation, training, saving and loading. A model computes its requests by their seq_id."""

import hashlib
import time
from collections.abc import Callable, Iterator
from dataclasses import replace
from functools import partial
from typing import Any, TypeAlias

import numpy as np
from tinker import types

from verl.models.optim import AdamStep
from verl.tinker.adapters import PARTS
from verl.tinker.bases import BaseModel
from verl.tinker.checkpoints import SavedAdapter
from verl.tinker.codec import PROTOBUF, training_message, training_request, training_result
from verl.tinker.model_run import ModelRun
from verl.tinker.queues import SLICE_TOKENS, RequestFuture, WireAnswer
from verl.tinker.records import Datum, RefusedRequest, TrainingOutput, TrainingRequest
from verl.tinker.routes import check_room, checked_ttl, require_base
from verl.tinker.served import ClientCall, ServedModel, ServedSampler, Work, at_once
from verl.tinker.service import Service

SaveRequest: TypeAlias = (
    types.SaveWeightsRequest | types.SaveWeightsForSamplerRequest | types.SaveWeightsExternalRequest
)
_REPLACED_S = 900.0  # without a request, of a snapshot that makes room for others


class ModelRoutes:
    """One method for each route. A method returns a message of the SDK, a RequestFuture or a Response."""

    def __init__(self, service: Service):
        self.service = service

    async def create_model(self, call: ClientCall) -> RequestFuture:
        message = call.read(types.CreateModelRequest)
        self.service.touch(call, message.session_id)
        lora = message.lora_config or types.LoraConfig(rank=0)
        chosen = zip(PARTS, (lora.train_attn, lora.train_mlp, lora.train_unembed), strict=True)
        parts = [part for part, trains in chosen if trains]
        max_rank = self.service.bases.named(message.base_model).facts.most_rank
        if not max_rank and (lora.rank or len(parts) < len(PARTS)):
            raise RefusedRequest(
                "Models of this base model train all their weights. Create a training client with rank=0."
            )
        if max_rank and not lora.rank:
            raise RefusedRequest(
                "Models of this base model train adapters. Name a rank from 1 on, or start a server with rank=0."
            )
        if max_rank and not (1 <= lora.rank <= max_rank and parts):
            raise RefusedRequest(f"A LoRA model has a rank from 1 to {max_rank} and trains at least one kind of layer.")
        model_id = f"{message.session_id}:train:{message.model_seq_id}"
        seed = _seed(model_id) if lora.seed is None else lora.seed
        bases, base = self.service.bases, self.service.bases.named(message.base_model)

        def make(model_id: str) -> int:
            return bases.bench(base).training.create(model_id, rank=lora.rank, seed=seed, parts=parts)

        answer = types.CreateModelResponse(model_id=model_id)
        return self._new_model(call, message, message.base_model, lora.rank, parts, make, answer)

    def _new_model(
        self,
        call: ClientCall,
        message: Any,
        base: str,
        rank: int,
        parts: list[str],
        make: Callable[[str], int],
        answer: types.CreateModelResponse | types.LoadWeightsResponse,
    ) -> RequestFuture:
        if (optimizer := message.optimizer_config) is not None and optimizer.type != "adamw":
            raise RefusedRequest(f"The optimizer here is AdamW, not {optimizer.type}. Leave out optimizer.")
        model_id, models = f"{message.session_id}:train:{message.model_seq_id}", self.service.models
        tenant = self.service.sessions[message.session_id].tenant
        if model_id not in models:
            check_room(self.service, call, "models")
        if rank > tenant.limits.rank and call.stored is None:
            raise RefusedRequest(f"The limit of this API key is a rank of {tenant.limits.rank}; the model has {rank}.")
        base_model = self.service.bases.named(base)
        if not base_model.trains:
            raise RefusedRequest(f"The base model {base} only samples on this server. Train another one.")
        metadata = {str(k): str(v) for k, v in (message.user_metadata or {}).items()} or None
        facts = {"model_id": model_id, "base_model": base, "rank": rank, "parts": parts, "tenant": tenant.name}
        self.service.checkpoints.register(model_id, {**facts, "created": time.time(), "user_metadata": metadata})
        run = ModelRun(self.service.checkpoints.run_folder(model_id), base_model.tokenizer)
        model = ServedModel(model_id, message.session_id, tenant, base, rank, run, self.service.bases, base_model)
        model.unsaved_s = float("inf") if isinstance(message, types.LoadWeightsRequest) else 0.0
        return self.service.add_model(call, model, make, WireAnswer.of(answer))

    async def get_info(self, call: ClientCall) -> object:
        model = self.service.model(call, call.read(types.GetInfoRequest).model_id)
        place = model.base.tokenizer_place
        data = types.ModelData(arch=model.base.facts.architecture, model_name=model.base_model, tokenizer_id=place)
        return types.GetInfoResponse(
            type="get_info", model_data=data, model_id=model.model_id, is_lora=model.rank > 0, lora_rank=model.rank,
            model_name=model.base_model,
        )  # fmt: skip

    async def forward_backward(self, call: ClientCall) -> RequestFuture:
        message = training_message(call.body)
        model = self.service.model(call, message.model_id)

        def prepare() -> Work:
            facts = model.base.facts
            checked = training_request(message, facts.vocabulary, facts.longest)
            num_tokens = sum(len(datum.tokens) for datum in checked.data)
            return Work(model, self._in_slices(model, checked), not checked.forward_only, num_tokens, model.fail)

        return self.service.queue(call, model, message.seq_id, prepare)

    def _in_slices(self, model: ServedModel, request: TrainingRequest) -> Iterator[WireAnswer | None]:
        """Compute the rows in slices, so that a model waits for one of them only. They depend on the request alone."""
        log_probs, metrics, rows, tokens = list[np.ndarray](), dict[str, float](), list[Datum](), 0
        model.num_tokens += 0 if request.forward_only else sum(len(datum.tokens) for datum in request.data)
        for number, datum in enumerate(request.data, 1):
            rows, tokens = [*rows, datum], tokens + len(datum.tokens)
            is_last = number == len(request.data)
            if is_last or tokens + len(request.data[number].tokens) > SLICE_TOKENS:
                with model.run.spans("forward" if request.forward_only else "forward_backward"):
                    output = model.created().forward_backward(replace(request, data=rows))
                if not request.forward_only:
                    model.loss += output.metrics["loss:sum"]
                    model.run.add(request.loss, rows, output.log_probs)
                log_probs, rows, tokens = log_probs + output.log_probs, [], 0
                metrics = {name: metrics.get(name, 0.0) + value for name, value in output.metrics.items()}
                if not is_last:
                    yield None
        yield WireAnswer(training_result(TrainingOutput(log_probs, metrics)), PROTOBUF)

    async def optim_step(self, call: ClientCall) -> RequestFuture:
        message = call.read(types.OptimStepRequest)
        model, values = self.service.model(call, message.model_id), message.optim_params

        def prepare() -> Work:
            steps = at_once(partial(self._step, model, _adam_step(values)))
            return Work(model, steps, changes=True, failed=model.drop_gradients)

        return self.service.queue(call, model, message.seq_id, prepare)

    def _step(self, model: ServedModel, values: AdamStep) -> WireAnswer:
        bench = model.created()
        if model.failed:
            raise RefusedRequest(f"A forward_backward of this step failed ({model.failed}), so no step was taken.")
        with model.run.spans("optim_step"):
            metrics = bench.optim_step(model.model_id, values)
        step = model.num_steps = (model.num_steps or 0) + 1
        row = {"actor/loss": model.loss, "actor/lr": values.learning_rate, "perf/total_num_tokens": model.num_tokens}
        row |= {"step": step, "time": time.time(), "actor/grad_norm": metrics["grad_norm"]}
        model.run.end_step(step, row)
        model.drop_gradients()
        return WireAnswer.of(types.OptimStepResponse(metrics=metrics))

    async def save_weights(self, call: ClientCall) -> RequestFuture:
        message = call.read(types.SaveWeightsRequest)
        model = self.service.model(call, message.model_id)
        name = message.path or f"step-{message.seq_id}"

        def work() -> WireAnswer:
            saved = self._save(model, "weights", name, message, overwrite=message.overwrite)
            return WireAnswer.of(types.SaveWeightsResponse(path=saved.uri))

        return self.service.queue(call, model, message.seq_id, partial(self._saving, model, message, work))

    async def save_weights_for_sampler(self, call: ClientCall) -> RequestFuture:
        message = call.read(types.SaveWeightsForSamplerRequest)
        model = self.service.model(call, message.model_id)
        # a repetition of the SDK has another number of the sampler
        repeated = message.model_copy(update={"sampling_session_seq_id": None}).model_dump_json()
        call = replace(call, digest=hashlib.sha256(repeated.encode()).hexdigest())

        def work() -> WireAnswer:
            if message.path is not None:
                saved = self._save(model, "sampler_weights", message.path, message, overwrite=False)
                return WireAnswer.of(types.SaveWeightsForSamplerResponseInternal(path=saved.uri))
            snapshots = self.service.snapshots
            sampler_id = f"{model.session_id}:sample:{message.sampling_session_seq_id}"
            weights = model.created().state(model.model_id, optimizer=False).weights
            self._require_room(model, weights.num_bytes())
            with model.run.spans("save"), snapshots.lock:
                digest = snapshots.write(weights)
                owner = (model.session_id, model.tenant)
                sampler = ServedSampler(sampler_id, *owner, model.base_model, digest, snapshot_of=model.model_id)
                self.service.add_sampler(sampler)
            return WireAnswer.of(types.SaveWeightsForSamplerResponseInternal(sampling_session_id=sampler_id))

        def prepare() -> Work:
            if message.kind != "snapshot":
                raise RefusedRequest("Samplers that follow the weights (inflight) are not available. Use snapshots.")
            if message.path is None:
                check_room(self.service, call, "samplers")
            return self._saving(model, message, work)

        return self.service.queue(call, model, message.seq_id, prepare)

    def _saving(self, model: ServedModel, message: SaveRequest, work: Callable[[], WireAnswer]) -> Work:
        checked_ttl(message.ttl_seconds)
        return Work(model, at_once(work))

    def _save(self, model: ServedModel, kind: str, name: str, message: SaveRequest, *, overwrite: bool) -> SavedAdapter:
        checkpoints = self.service.checkpoints
        request = f"{model.model_id}/{message.seq_id}"
        metadata = getattr(message, "user_metadata", None)
        notes = {"base_model": model.base_model, "user_metadata": metadata, "request": request}
        adapter = model.created().state(model.model_id, optimizer=kind == "weights")
        num_bytes = adapter.weights.num_bytes() * (3 if kind == "weights" else 1)
        if overwrite:
            num_bytes -= checkpoints.replaced_bytes(model.model_id, kind, name)
        self._require_room(model, num_bytes)
        with model.run.spans("save"):
            return checkpoints.save(
                model.model_id, kind, name, adapter, overwrite=overwrite, notes=notes, base=model.base.path,
                ttl_s=message.ttl_seconds,
            )  # fmt: skip

    def _require_room(self, model: ServedModel, num_bytes: int) -> None:
        """Raise RefusedRequest if the tenant may not store so many bytes more. Snapshots that were replaced go first."""
        tenant, limit = model.tenant.name, model.tenant.limits.bytes
        if self.service.stored_bytes(tenant) + num_bytes > limit:
            self.service.drop_replaced(_REPLACED_S, tenant)
        if self.service.stored_bytes(tenant) + num_bytes > limit:
            raise RefusedRequest(
                f"The limit of this API key is {limit} bytes of checkpoints and snapshots. Delete some, and save again."
            )

    async def save_weights_external(self, call: ClientCall) -> RequestFuture:
        message = call.read(types.SaveWeightsExternalRequest)
        model = self.service.model(call, message.model_id)

        def work() -> WireAnswer:
            saved = self._save(model, "external_weights", message.path, message, overwrite=False)
            size = saved.num_bytes()
            return WireAnswer.of(types.SaveWeightsExternalResponseInternal(path=saved.uri, size_bytes=size))

        def prepare() -> Work:
            if message.age_encryption_recipients:
                raise RefusedRequest("Encrypted files are not available. Leave out age_encryption_recipients.")
            return self._saving(model, message, work)

        return self.service.queue(call, model, message.seq_id, prepare)

    async def load_weights(self, call: ClientCall) -> RequestFuture:
        message = call.read(types.LoadWeightsRequest)
        checkpoints, answer = self.service.checkpoints, types.LoadWeightsResponse(path=message.path)

        def load(base: BaseModel, model_id: str) -> int:
            adapter = checkpoints.load(message.path, optimizer=message.optimizer)
            return self.service.bases.bench(base).training.put(model_id, adapter)

        if message.session_id is not None:
            self.service.touch(call, message.session_id)
            if call.stored is not None:  # the checkpoint may be gone since then
                facts = checkpoints.facts(call.stored.owner)
                base, make = facts["base_model"], partial(load, self.service.bases.named(facts["base_model"]))
                return self._new_model(call, message, base, facts["rank"], facts["parts"], make, answer)
            saved = self.service.saved(call, message.path)
            base, parts = message.base_model or saved.state["base_model"], checkpoints.facts(saved.model_id)["parts"]
            require_base(self.service, base, saved)
            make = partial(load, self.service.bases.named(base))
            return self._new_model(call, message, base, saved.state["rank"], parts, make, answer)
        model = self.service.model(call, message.model_id or "")

        def work() -> WireAnswer:
            model.num_steps, model.unsaved_s = load(model.base, model.model_id), float("inf")
            model.drop_gradients()
            model.run.rewind(model.num_steps)
            return WireAnswer.of(answer)

        def prepare() -> Work:
            saved = self.service.saved(call, message.path)
            require_base(self.service, model.base_model, saved)
            parts, held = (", ".join(checkpoints.facts(n)["parts"]) for n in (saved.model_id, model.model_id))
            if (rank := saved.state["rank"], parts) != (model.rank, held):
                raise RefusedRequest(
                    f"The state has rank {rank} on {parts}, and the model has rank {model.rank} on {held}. Create a training "
                    "client from the state."
                )
            return Work(model, at_once(work), changes=True)

        return self.service.queue(call, model, message.seq_id, prepare)


def _adam_step(values: object) -> AdamStep:
    if not isinstance(values, types.AdamParams):
        raise RefusedRequest("The optimizer here is AdamW. Send AdamParams as optim_params.")
    rates, betas = (values.learning_rate, values.weight_decay), (values.beta1, values.beta2)
    clip_grad = max(0.0, values.grad_clip_norm)
    fits = all(0 <= r <= 1e3 for r in rates) and all(0 <= b < 1 for b in betas) and 0 <= values.eps <= 1
    if not fits or clip_grad == float("inf"):
        raise RefusedRequest(f"A value of adam_params is out of range: {values}.")
    return AdamStep(values.learning_rate, *betas, values.eps, values.weight_decay, clip_grad)


def _seed(model_id: str) -> int:
    return int.from_bytes(hashlib.sha256(model_id.encode()).digest()[:4], "little")
