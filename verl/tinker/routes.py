"""Routes of sessions, saved weights, sampling, results, and of the state of a service as a tenant may see it."""

import time
import uuid
from collections import Counter
from collections.abc import Mapping
from datetime import datetime, timezone
from typing import Any, TypeVar

import pydantic
from starlette.responses import HTMLResponse, JSONResponse, Response
from tinker import types

from verl.page.pages import Site
from verl.page.server import HEADERS, gauges
from verl.tinker.checkpoints import KINDS, SavedAdapter
from verl.tinker.codec import sampling_request
from verl.tinker.records import RefusedRequest
from verl.tinker.served import ClientCall, ClientSession, ServedModel, ServedSampler
from verl.tinker.service import Service
from verl.tinker.tenants import Tenant

Row = TypeVar("Row")
POLL_S = 25.0  # of the 45 s that the client waits
HOLE_S = 45.0  # without a request of a model whose next one has not come; the SDK repeats one after 30 s at most
_FAILS_S = 10.0  # for the answer of a request that has failed
_LISTED = 20  # runs and checkpoints of a page, unless the client asks for another number


class _WeightsInfoRequest(pydantic.BaseModel):  # the SDK has no message for it
    tinker_path: str


class _TtlRequest(pydantic.BaseModel):  # as above
    ttl_seconds: int | None


class Routes:
    """One method for each route. A method returns a message of the SDK, a dict, a RequestFuture or a Response."""

    def __init__(self, service: Service):
        self.service = service

    async def health(self, call: ClientCall) -> object:
        return types.HealthResponse(status="ok")

    async def config(self, call: ClientCall) -> object:
        return types.ClientConfigResponse(fwdbwd_max_chunk_len=1024, sample_enable_stuck_detection=False)

    async def nothing(self, call: ClientCall) -> object:
        return {}

    async def capabilities(self, call: ClientCall) -> object:
        models = [
            types.SupportedModel(
                model_name=name, max_context_length=base.facts.longest, trainable=base.trains, sampleable=True
            )
            for base in self.service.bases.bases
            for name in base.names
        ]
        return types.GetServerCapabilitiesResponse(supported_models=models)

    async def create_session(self, call: ClientCall) -> object:
        message = call.read(types.CreateSessionRequest)
        check_room(self.service, call, "sessions")
        session_id = str(uuid.uuid4())
        notes = {"user_metadata": message.user_metadata, "display_name": message.display_name}
        self.service.new_session(session_id, call.tenant, notes)
        return types.CreateSessionResponse(session_id=session_id)

    async def heartbeat(self, call: ClientCall) -> object:
        self.service.touch(call, call.read(types.SessionHeartbeatRequest).session_id)
        return types.SessionHeartbeatResponse()

    async def finish(self, call: ClientCall) -> object:
        session = self.service.sessions.get(call.path["session_id"])
        if session is not None and call.tenant.sees(
            session.tenant.name
        ):  # else the answer of the first request was lost
            self.service.finish(call.path["session_id"])
        return Response(status_code=204)

    async def telemetry(self, call: ClientCall) -> object:
        return types.TelemetryResponse(status="accepted")

    async def weights_info(self, call: ClientCall) -> object:
        saved = self.service.saved(call, call.read(_WeightsInfoRequest).tinker_path)
        parts = self.service.checkpoints.facts(saved.model_id)["parts"]
        return types.WeightsInfoResponse(
            base_model=saved.state["base_model"], is_lora=saved.state["rank"] > 0, lora_rank=saved.state["rank"],
            train_attn="attention" in parts, train_mlp="mlp" in parts, train_unembed="head" in parts,
        )  # fmt: skip

    async def list_checkpoints(self, call: ClientCall) -> object:
        model_id = call.path.get("model_id")
        if model_id is not None:
            self.service.facts(call, model_id)
        checkpoints, names = self.service.checkpoints, [model_id] if model_id is not None else self._owned(call)
        saved = sorted((s for name in names for s in checkpoints.listed(name)), key=lambda s: -s.state["time"])
        listed = [_checkpoint(one) for one in saved]
        if model_id is not None:
            return types.CheckpointsListResponse(checkpoints=listed)
        page, cursor = rows_of_page(call, listed)
        return types.CheckpointsListResponse(checkpoints=page, cursor=cursor)

    async def delete_checkpoint(self, call: ClientCall) -> object:
        self.service.checkpoints.delete(self._addressed(call))
        return Response(status_code=204)

    async def set_ttl(self, call: ClientCall) -> object:
        ttl_s = call.read(_TtlRequest).ttl_seconds
        self.service.checkpoints.set_expiry(self._addressed(call), checked_ttl(ttl_s))
        return Response(status_code=204)

    def _addressed(self, call: ClientCall) -> SavedAdapter:
        return self.service.addressed(call, f"tinker://{call.path['model_id']}/{call.path['checkpoint_id']}")

    def _owned(self, call: ClientCall) -> list[str]:
        return self.service.checkpoints.models(call.tenant.sees)

    async def training_run(self, call: ClientCall) -> object:
        return self._run(call, call.path["model_id"])

    async def training_runs(self, call: ClientCall) -> object:
        page, cursor = rows_of_page(call, self._owned(call))
        return types.TrainingRunsResponse(training_runs=[self._run(call, name) for name in page], cursor=cursor)

    def _run(self, call: ClientCall, model_id: str) -> types.TrainingRun:
        facts = self.service.facts(call, model_id)
        live, newest = self.service.models.get(model_id), dict[str, types.Checkpoint]()
        for saved in self.service.checkpoints.listed(model_id):
            newest.setdefault(saved.kind, _checkpoint(saved))
        return types.TrainingRun(
            training_run_id=model_id, base_model=facts["base_model"], model_owner=facts["tenant"], is_lora=facts["rank"] > 0,
            lora_rank=facts["rank"], last_request_time=_time(live.last_request if live else facts["created"]),
            last_checkpoint=newest.get("weights"), last_sampler_checkpoint=newest.get("sampler_weights"),
            user_metadata=facts["user_metadata"],
        )  # fmt: skip

    async def create_sampling_session(self, call: ClientCall) -> types.CreateSamplingSessionResponse:
        message = call.read(types.CreateSamplingSessionRequest)
        self.service.touch(call, message.session_id)
        service, sampler_id = self.service, f"{message.session_id}:sample:{message.sampling_session_seq_id}"
        tenant = service.sessions[message.session_id].tenant
        if sampler_id not in service.samplers:  # a repeated request gets the first one's sampler
            check_room(service, call, "samplers")
            path = message.model_path
            saved = None if path is None else service.saved(call, path)
            if saved is not None and message.base_model is not None:
                require_base(service, message.base_model, saved)
            name = message.base_model if saved is None else saved.state["base_model"]
            service.bases.require_fit(service.bases.named(name), call.tenant.name)
            digest = None if saved is None else saved.digest
            with service.snapshots.lock:
                if saved is not None:
                    service.snapshots.link(saved.folder / saved.weights_file, saved.digest)
                service.add_sampler(ServedSampler(sampler_id, message.session_id, tenant, str(name), digest, path))
        return types.CreateSamplingSessionResponse(sampling_session_id=sampler_id)

    async def get_sampler(self, call: ClientCall) -> object:
        sampler = self.service.sampler(call, call.path["sampler_id"])
        return types.GetSamplerResponse(
            sampler_id=sampler.sampler_id, model_path=sampler.model_path,
            base_model=self.service.bases.named(sampler.base_model).tokenizer_place,
        )  # fmt: skip

    async def sample(self, call: ClientCall) -> types.UntypedAPIFuture:
        message = call.read(types.SampleRequest)
        sampler = self.service.sampler(call, message.sampling_session_id or "")
        facts = self.service.bases.named(sampler.base_model).facts
        checked = sampling_request(message, facts.vocabulary, facts.longest)
        future = self.service.queue_sample(call, sampler, message.seq_id, checked)
        ids = [f"{future.request_id}:{number}" for number in range(checked.num_samples)]
        return types.UntypedAPIFuture(request_id=future.request_id, sample_sequence_ids=ids)

    async def retrieve_future(self, call: ClientCall) -> object:
        message = call.read(types.FutureRetrieveRequest)
        future = self.service.future(call, message.request_id)
        answer = await future.wait(POLL_S)
        model = self.service.models.get(future.owner)
        if answer is None and model is not None and self.service.close_hole(model, HOLE_S):
            answer = await future.wait(_FAILS_S)
        if answer is None:
            pending = {"type": "try_again", "request_id": message.request_id, "queue_state": "active"}
            if paused := self.service.paused or (model.order.missing if model else ""):
                pending |= {"queue_state": "paused_capacity", "queue_state_reason": paused}
            return JSONResponse(pending, 408)
        return Response(answer.body, media_type=answer.media_type)


def checked_ttl(ttl_s: int | None) -> int | None:
    """Seconds that a checkpoint is to last. Raises RefusedRequest outside of an hour to 10 years."""
    if ttl_s is not None and not 3600 <= ttl_s <= 10 * 366 * 86400:
        raise RefusedRequest(f"ttl_seconds is {ttl_s}; give 3600 (an hour) to 10 years, or leave it out.")
    return ttl_s


def require_base(service: Service, name: str, saved: SavedAdapter) -> None:
    """Raise RefusedRequest if a checkpoint is not one of the base model `name`."""
    base, held = service.bases.named(name), service.bases.named(saved.state["base_model"])
    if base is not held:
        raise RefusedRequest(
            f"{saved.uri} was trained on {held.names[0]}, not on {base.names[0]}. Name that base model, or leave it out."
        )


def check_room(service: Service, call: ClientCall, name: str) -> None:
    """End silent sessions while the tenant holds as many `name` as its limit says. Raises RefusedRequest if none is silent."""
    held: Mapping[str, ClientSession | ServedModel | ServedSampler] = getattr(service, name)
    limit = getattr(call.tenant.limits, name)
    while call.stored is None and sum(one.tenant.name == call.tenant.name for one in list(held.values())) >= limit:
        holders = set(held) if name == "sessions" else {getattr(one, "session_id", "") for one in list(held.values())}
        if not service.give_up(call.tenant, holders):
            raise RefusedRequest(f"The limit of this API key is {limit} {name}, which are in use. End a session first.")


def _time(seconds: float) -> datetime:
    return datetime.fromtimestamp(seconds, timezone.utc)


def _checkpoint(saved: SavedAdapter) -> types.Checkpoint:
    return types.Checkpoint(
        checkpoint_id=f"{saved.kind}/{saved.name}", checkpoint_type=KINDS[saved.kind], time=_time(saved.state["time"]),
        tinker_path=saved.uri, size_bytes=saved.num_bytes(), user_metadata=saved.state["user_metadata"],
        expires_at=None if saved.expires is None else _time(saved.expires), public=saved.is_public,
    )  # fmt: skip


def rows_of_page(call: ClientCall, rows: list[Row]) -> tuple[list[Row], types.Cursor]:
    """The rows from `offset` on, at most `limit`, and the cursor of the answer."""
    try:
        limit = int(call.query.get("limit", _LISTED))
        offset = int(call.query.get("offset", 0))
    except ValueError as error:
        raise RefusedRequest("limit and offset are numbers.") from error
    limit, offset = max(0, limit), max(0, offset)
    return rows[offset : offset + limit], types.Cursor(offset=offset, limit=limit, total_count=len(rows))


_COUNTED = ("models", "samplers", "waiting_requests", "waiting_tokens", "training_s", "sampling_s", "journal_s")
_SHOWN = 200  # models and samplers of an answer, the last used first


class StatusRoutes:
    """One method for each route."""

    def __init__(self, service: Service):
        self.service, self._site = service, Site([])

    async def status(self, call: ClientCall) -> object:
        return status(self.service, call.tenant)

    async def page(self, call: ClientCall) -> object:
        context = status(self.service, call.tenant)
        html = self._site.render("service.html", "/", names=self.service.bases.names, now=time.time(), **context)
        return HTMLResponse(html, headers={**HEADERS, "Cache-Control": "no-store"})

    async def metrics(self, call: ClientCall) -> object:
        state, samples = status(self.service, call.tenant), dict[str, list[tuple[dict[str, str], float]]]()
        for tenant, counts in state["tenants"].items():
            for name, count in counts.items():
                samples.setdefault(f"tinker_{name}", []).append(({"tenant": tenant}, count))
        samples["tinker_paused"] = [({}, int(bool(state["paused"])))]
        return Response(gauges(samples), media_type="text/plain; version=0.0.4")


def status(service: Service, tenant: Tenant) -> dict[str, Any]:
    """The tenants that `tenant` sees, with their models, samplers, waiting requests and seconds of computing; the models that
    train and the samplers, each with the requests that wait for it. `paused` says why answers wait."""
    waiting = [f for f in list(service.futures.values()) if f.answer is None and tenant.sees(f.tenant)]
    models = [m for m in list(service.models.values()) if tenant.sees(m.tenant.name)]
    samplers = [s for s in list(service.samplers.values()) if tenant.sees(s.tenant.name)]
    used = [row for one in service.computers for row in list(one.seconds.items()) if tenant.sees(row[0][0])]
    listed: list[tuple[str, str, float]] = [
        *((m.tenant.name, "models", 1) for m in models), *((s.tenant.name, "samplers", 1) for s in samplers),
        *((f.tenant, "waiting_requests", 1) for f in waiting), *((f.tenant, "waiting_tokens", f.tokens) for f in waiting),
        *((owner, kind, seconds) for (owner, kind), seconds in used),
    ]  # fmt: skip
    tenants: dict[str, dict[str, float]] = {}
    for owner, kind, count in sorted(listed):
        tenants.setdefault(owner, dict.fromkeys(_COUNTED, 0))[kind] += count
    queues, epoch = Counter(f.owner for f in waiting), time.time() - time.monotonic()
    model_rows = [
        {
            "model_id": m.model_id, "tenant": m.tenant.name, "rank": m.rank, "num_steps": m.num_steps or 0,
            "waiting_requests": queues[m.model_id], "last_request": m.last_request,
        }
        for m in sorted(models, key=lambda m: -m.last_request)[:_SHOWN]
    ]  # fmt: skip
    sampler_rows = [
        {
            "sampler_id": s.sampler_id, "tenant": s.tenant.name, "weights": s.digest, "model_path": s.model_path,
            "waiting_requests": queues[s.sampler_id], "last_request": s.last_use + epoch,
        }
        for s in sorted(samplers, key=lambda s: -s.last_use)[:_SHOWN]
    ]  # fmt: skip
    return {
        "tenants": tenants,
        "models": model_rows,
        "samplers": sampler_rows,
        "num_samplers": service.bases.num_samplers,
        "base_models": [
            {"name": base.names[0], "is_loaded": service.bases.loaded(base) is not None, "bytes": base.num_bytes}
            for base in service.bases.bases
        ],
        "paused": service.paused,
    }
