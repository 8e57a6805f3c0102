"""The application: the routes that the official SDK calls, below /api/v1/. Built on Starlette; messages are the SDK's.

A request that takes time is answered with a future at once; `retrieve_future` waits for its result and answers 408 after
POLL_S seconds, which the client repeats. Every 4xx has a JSON `detail`, and so has a route that does not exist (404).
"""

from __future__ import annotations

import asyncio
import contextlib
import hashlib
import hmac
import logging
from collections.abc import AsyncIterator, Awaitable, Callable
from functools import partial
from typing import Any

from starlette.applications import Starlette
from starlette.exceptions import HTTPException
from starlette.requests import ClientDisconnect, Request
from starlette.responses import JSONResponse, Response
from starlette.routing import Route
from tinker import types

from verl.tinker.codec import MAX_BYTES, decompressed
from verl.tinker.model_routes import ModelRoutes
from verl.tinker.queues import RequestFuture
from verl.tinker.records import RefusedRequest
from verl.tinker.routes import Routes
from verl.tinker.service import Service

log = logging.getLogger(__name__)

_SWEEP_S = 30.0

Handler = Callable[[Request], Awaitable[Any]]


def application(service: Service, key_hashes: frozenset[str] = frozenset()) -> Starlette:
    """The application. With `key_hashes`, SHA-256 in hex of keys, every request but healthz needs one of these keys."""
    routes, models, post, get = Routes(service), ModelRoutes(service), ["POST"], ["GET"]
    run, checkpoint = "training_runs/{model_id}", "training_runs/{model_id}/checkpoints/{checkpoint_id:path}"
    table: list[tuple[str, list[str], Handler]] = [
        ("healthz", get, routes.health), ("client/config", post, routes.config),
        ("client/dynamic_config", post, routes.nothing),
        ("get_server_capabilities", get, routes.capabilities), ("create_session", post, routes.create_session),
        ("session_heartbeat", post, routes.heartbeat), ("sessions/{session_id}/finish", post, routes.finish),
        ("telemetry", post, routes.telemetry), ("create_model", post, models.create_model),
        ("get_info", post, models.get_info), ("forward_backward", post, models.forward_backward),
        ("optim_step", post, models.optim_step), ("save_weights", post, models.save_weights),
        ("save_weights_for_sampler", post, models.save_weights_for_sampler), ("load_weights", post, models.load_weights),
        ("weights_info", post, routes.weights_info), ("checkpoints", get, routes.list_checkpoints),
        (f"{run}/checkpoints", get, routes.list_checkpoints), (checkpoint, ["DELETE"], routes.delete_checkpoint),
        (run, get, routes.training_run), ("training_runs", get, routes.training_runs),
        ("create_sampling_session", post, routes.create_sampling_session), ("samplers/{sampler_id}", get, routes.get_sampler),
        ("asample", post, routes.sample), ("retrieve_future", post, routes.retrieve_future),
    ]  # fmt: skip
    return Starlette(
        routes=[
            Route(f"/api/v1/{path}", partial(_answer, handler, key_hashes), methods=methods)
            for path, methods, handler in table
        ],
        exception_handlers={HTTPException: _http_error},
        lifespan=lambda app: _lifespan(service),
    )


@contextlib.asynccontextmanager
async def _lifespan(service: Service) -> AsyncIterator[None]:
    async def sweep() -> None:
        while True:
            await asyncio.sleep(_SWEEP_S)
            service.sweep()

    task = asyncio.get_running_loop().create_task(sweep())
    try:
        yield
    finally:
        task.cancel()
        await asyncio.to_thread(service.close)


async def _answer(handler: Handler, key_hashes: frozenset[str], request: Request) -> Response:
    """Check key and size, read the body, call the handler; a RefusedRequest becomes its status with a detail."""
    try:
        if key_hashes and not request.url.path.endswith("/healthz"):
            _require_key(request.headers.get("x-api-key", ""), key_hashes)
        request.state.body = decompressed(await _body(request), request.headers.get("content-encoding", ""))
        request.state.digest = hashlib.sha256(request.state.body).hexdigest()
        result = await handler(request)
    except RefusedRequest as error:
        return JSONResponse({"detail": error.sentence}, error.status)
    except ClientDisconnect:
        return Response(status_code=499)
    except Exception:  # a fault of the server shall not end in a traceback at the client
        log.exception("%s has failed.", request.url.path)
        return JSONResponse({"detail": "A fault in the server; its log has more."}, 500, {"x-should-retry": "false"})
    if isinstance(result, Response):
        return result
    if isinstance(result, RequestFuture):
        result = types.UntypedAPIFuture(request_id=result.request_id)
    if isinstance(result, dict):
        return JSONResponse(result)
    return Response(result.model_dump_json(exclude_none=True), media_type="application/json")


async def _body(request: Request) -> bytes:
    """The body, refused before it is read whole where it is too large."""
    parts, size = [], 0
    async for part in request.stream():
        size += len(part)
        if size > MAX_BYTES:
            raise RefusedRequest(f"The body has more than {MAX_BYTES >> 20} MiB. Send fewer rows in a request.", 413)
        parts.append(part)
    return b"".join(parts)


def _require_key(key: str, key_hashes: frozenset[str]) -> None:
    digest = hashlib.sha256(key.encode()).hexdigest()
    if not any(hmac.compare_digest(digest, known) for known in key_hashes):
        raise RefusedRequest("This API key is not one of the server's. Set TINKER_API_KEY.", 401)


async def _http_error(request: Request, error: Exception) -> Response:
    assert isinstance(error, HTTPException)
    sentence = f"There is no route {request.method} {request.url.path[:200]} in this version."
    return JSONResponse({"detail": sentence if error.status_code in (404, 405) else error.detail}, error.status_code)
