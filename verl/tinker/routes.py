"""Routes of sessions, saved weights, sampling and results."""

from __future__ import annotations

import asyncio
from datetime import datetime, timezone
from typing import Any

import pydantic
from starlette.requests import Request
from starlette.responses import JSONResponse, Response
from tinker import types

from verl.tinker.checkpoints import KINDS, SavedAdapter
from verl.tinker.codec import sampling_request
from verl.tinker.messages import read_message
from verl.tinker.records import RefusedRequest
from verl.tinker.service import ServedSampler, Service

POLL_S = 25.0  # of the 45 s that the client waits
_LISTED = 20  # runs and checkpoints of a page, unless the client asks for another number


class _WeightsInfoRequest(pydantic.BaseModel):  # the SDK has no message for it
    tinker_path: str


class Routes:
    """One method for each route. A method returns a message of the SDK, a dict, a RequestFuture or a Response."""

    def __init__(self, service: Service):
        self.service = service

    async def health(self, request: Request) -> Any:
        return types.HealthResponse(status="ok")

    async def config(self, request: Request) -> Any:
        return types.ClientConfigResponse(fwdbwd_max_chunk_len=1024, sample_enable_stuck_detection=False)

    async def nothing(self, request: Request) -> Any:
        return {}

    async def capabilities(self, request: Request) -> Any:
        longest = self.service.bench.longest
        models = [
            types.SupportedModel(model_name=name, max_context_length=longest, trainable=True, sampleable=True)
            for name in self.service.names
        ]
        return types.GetServerCapabilitiesResponse(supported_models=models)

    async def create_session(self, request: Request) -> Any:
        return types.CreateSessionResponse(session_id=self.service.new_session())

    async def heartbeat(self, request: Request) -> Any:
        self.service.touch((await read_message(request, types.SessionHeartbeatRequest)).session_id)
        return types.SessionHeartbeatResponse()

    async def finish(self, request: Request) -> Any:
        self.service.finish(request.path_params["session_id"])
        return Response(status_code=204)

    async def telemetry(self, request: Request) -> Any:
        return types.TelemetryResponse(status="accepted")

    async def weights_info(self, request: Request) -> Any:
        saved = self.service.checkpoints.get((await read_message(request, _WeightsInfoRequest)).tinker_path)
        parts = self.service.checkpoints.facts(saved.model_id)["parts"]
        return types.WeightsInfoResponse(
            base_model=saved.state["base_model"], is_lora=True, lora_rank=saved.state["rank"],
            train_attn="attention" in parts, train_mlp="mlp" in parts, train_unembed="head" in parts,
        )  # fmt: skip

    async def list_checkpoints(self, request: Request) -> Any:
        model_id = request.path_params.get("model_id")
        if model_id is not None:
            self.service.checkpoints.facts(model_id)
        listed = [_checkpoint(saved) for saved in self.service.checkpoints.listed(model_id)]
        if model_id is not None:
            return types.CheckpointsListResponse(checkpoints=listed)
        page, cursor = _page(request, listed)
        return types.CheckpointsListResponse(checkpoints=page, cursor=cursor)

    async def delete_checkpoint(self, request: Request) -> Any:
        self.service.checkpoints.delete(request.path_params["model_id"], request.path_params["checkpoint_id"])
        return Response(status_code=204)

    async def training_run(self, request: Request) -> Any:
        return self._run(request.path_params["model_id"])

    async def training_runs(self, request: Request) -> Any:
        page, cursor = _page(request, self.service.checkpoints.models())
        return types.TrainingRunsResponse(training_runs=[self._run(name) for name in page], cursor=cursor)

    def _run(self, model_id: str) -> Any:
        facts = self.service.checkpoints.facts(model_id)
        live, newest = self.service.models.get(model_id), dict[str, types.Checkpoint]()
        for saved in self.service.checkpoints.listed(model_id):
            newest.setdefault(saved.kind, _checkpoint(saved))
        return types.TrainingRun(
            training_run_id=model_id, base_model=facts["base_model"], model_owner="local", is_lora=True,
            lora_rank=facts["rank"], last_request_time=_time(live.last_request if live else facts["created"]),
            last_checkpoint=newest.get("weights"), last_sampler_checkpoint=newest.get("sampler_weights"),
            user_metadata=facts["user_metadata"],
        )  # fmt: skip

    async def create_sampling_session(self, request: Request) -> Any:
        asked = await read_message(request, types.CreateSamplingSessionRequest)
        self.service.touch(asked.session_id)
        name, weights = asked.base_model, None
        if asked.model_path is not None:
            adapter = await asyncio.to_thread(self.service.checkpoints.load, asked.model_path, optimizer=False)
            weights, name = adapter.weights, self.service.checkpoints.get(asked.model_path).state["base_model"]
        base, sampler_id = self.service.base_model(name), f"{asked.session_id}:sample:{asked.sampling_session_seq_id}"
        self.service.samplers[sampler_id] = ServedSampler(sampler_id, asked.session_id, base, weights, asked.model_path)
        return types.CreateSamplingSessionResponse(sampling_session_id=sampler_id)

    async def get_sampler(self, request: Request) -> Any:
        sampler = self.service.sampler(request.path_params["sampler_id"])
        return types.GetSamplerResponse(
            sampler_id=sampler.sampler_id, base_model=sampler.base_model, model_path=sampler.model_path
        )

    async def sample(self, request: Request) -> Any:
        asked = await read_message(request, types.SampleRequest)
        sampler = self.service.sampler(asked.sampling_session_id or "")
        checked = sampling_request(asked, self.service.bench.vocabulary, self.service.bench.longest)
        future = self.service.queue_sample(sampler, asked.seq_id, request.state.digest, checked)
        ids = [f"{future.request_id}:{number}" for number in range(checked.num_samples)]
        return types.UntypedAPIFuture(request_id=future.request_id, sample_sequence_ids=ids)

    async def retrieve_future(self, request: Request) -> Any:
        asked = await read_message(request, types.FutureRetrieveRequest)
        future = self.service.futures.get(asked.request_id)
        if future is None:
            raise RefusedRequest(
                f"There is no request {asked.request_id[:80]!r}; it was answered long ago, or never made.", 404
            )
        answer = await future.wait(POLL_S)
        if answer is None:
            pending = {"type": "try_again", "request_id": asked.request_id, "queue_state": "active"}
            return JSONResponse(pending, 408)
        return Response(answer.body, media_type=answer.media_type)


def _time(seconds: float) -> datetime:
    return datetime.fromtimestamp(seconds, timezone.utc)


def _checkpoint(saved: SavedAdapter) -> Any:
    return types.Checkpoint(
        checkpoint_id=f"{saved.kind}/{saved.name}", checkpoint_type=KINDS[saved.kind], time=_time(saved.state["time"]),
        tinker_path=saved.uri, size_bytes=saved.num_bytes(), user_metadata=saved.state["user_metadata"],
    )  # fmt: skip


def _page(request: Request, rows: list[Any]) -> tuple[list[Any], Any]:
    """The rows from `offset` on, at most `limit`, and the cursor of the answer."""
    try:
        limit = int(request.query_params.get("limit", _LISTED))
        offset = int(request.query_params.get("offset", 0))
    except ValueError as error:
        raise RefusedRequest("limit and offset are numbers.") from error
    limit, offset = max(0, limit), max(0, offset)
    return rows[offset : offset + limit], types.Cursor(offset=offset, limit=limit, total_count=len(rows))
