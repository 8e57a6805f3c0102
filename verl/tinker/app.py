"""The application: the routes that the official SDK calls, below /api/v1/. Built on Starlette; messages are the SDK's.

A request that takes time is answered with a future at once; `retrieve_future` waits for its result and answers 408 after
POLL_S seconds; the client then repeats it. Every 4xx has a JSON `detail`, and so has a route that does not exist (404).
"""

import asyncio
import base64
import contextlib
import hashlib
import logging
import sqlite3
from collections.abc import AsyncIterator, Awaitable, Callable, Mapping
from functools import partial

import pydantic
from starlette.applications import Starlette
from starlette.exceptions import HTTPException
from starlette.requests import ClientDisconnect, Request
from starlette.responses import JSONResponse, Response
from starlette.routing import Mount, Route
from starlette.staticfiles import StaticFiles
from tinker import types

from verl.page.server import STATIC, is_own_name
from verl.tinker.chat import ChatRoutes
from verl.tinker.codec import MAX_BYTES, TOO_LARGE, decompressed
from verl.tinker.journal import trouble
from verl.tinker.model_routes import ModelRoutes
from verl.tinker.queues import RequestFuture
from verl.tinker.records import RefusedRequest
from verl.tinker.recovery import recover
from verl.tinker.routes import Routes, StatusRoutes
from verl.tinker.served import ClientCall
from verl.tinker.service import Service
from verl.tinker.sharing import SharingRoutes
from verl.tinker.tenants import Tenant

log = logging.getLogger(__name__)

_SWEEP_S = 30.0
_FIRST_PART_S = 0.2  # for the beginning of a body that is refused for its length
_DOWNLOAD = "download/{until}/{signature}/{model_id}/{kind}/{name}/{file}"  # the signature stands for a key
_PAGE = "page"  # the route that a browser opens
_READS = {  # posts that write nothing, so they are answered while the disk is full
    "client/config", "client/dynamic_config", "telemetry", "session_heartbeat", "get_info", "weights_info", "retrieve_future",
}  # fmt: skip

Handler = Callable[[ClientCall], Awaitable[object]]


def application(service: Service) -> Starlette:
    """The application. Every request but healthz needs the key of a tenant."""
    routes, models, states, post, get = Routes(service), ModelRoutes(service), StatusRoutes(service), ["POST"], ["GET"]
    shared, chat = SharingRoutes(service), ChatRoutes(routes)
    openai: list[tuple[str, list[str], Handler]] = [
        ("models", get, chat.models), ("chat/completions", post, chat.chat), ("completions", post, chat.complete),
    ]  # fmt: skip
    run, checkpoint = "training_runs/{model_id}", "training_runs/{model_id}/checkpoints/{checkpoint_id:path}"
    table: list[tuple[str, list[str], Handler]] = [
        ("healthz", get, routes.health), ("client/config", post, routes.config),
        ("client/dynamic_config", post, routes.nothing), ("status", get, states.status), ("metrics", get, states.metrics),
        ("get_server_capabilities", get, routes.capabilities), ("create_session", post, routes.create_session),
        ("session_heartbeat", post, routes.heartbeat), ("sessions/{session_id}/finish", post, routes.finish),
        ("telemetry", post, routes.telemetry), ("create_model", post, models.create_model),
        ("get_info", post, models.get_info), ("forward_backward", post, models.forward_backward),
        ("optim_step", post, models.optim_step), ("save_weights", post, models.save_weights),
        ("save_weights_for_sampler", post, models.save_weights_for_sampler), ("load_weights", post, models.load_weights),
        ("weights_info", post, routes.weights_info), ("checkpoints", get, routes.list_checkpoints),
        (f"{checkpoint}/publish", post, shared.publish), (f"{checkpoint}/publish", ["DELETE"], shared.unpublish),
        (f"{checkpoint}/external_weights_urls", get, shared.urls), (_DOWNLOAD, get, shared.download),
        ("copy_weights", post, shared.copy), ("save_weights_external", post, models.save_weights_external),
        ("sessions", get, shared.sessions), ("sessions/search", post, shared.search),
        ("sessions/{session_id}", get, shared.session),
        (f"{run}/checkpoints", get, routes.list_checkpoints), (checkpoint, ["DELETE"], routes.delete_checkpoint),
        (f"{checkpoint}/ttl", ["PUT"], routes.set_ttl), (run, get, routes.training_run),
        ("training_runs", get, routes.training_runs),
        ("create_sampling_session", post, routes.create_sampling_session), ("samplers/{sampler_id}", get, routes.get_sampler),
        ("asample", post, routes.sample), ("retrieve_future", post, routes.retrieve_future),
    ]  # fmt: skip
    handlers = {path: handler for path, _, handler in table}
    served = Starlette(
        routes=[
            Route(f"/api/v1/{path}", partial(_answer, service, path, handler), methods=methods)
            for path, methods, handler in table
        ]
        # a request that is not served uses its number too, so that later requests of the model do not wait for it
        + [
            Route(
                "/api/v1/{path:path}", partial(_answer, service, "", _nowhere), methods=["GET", "PUT", "DELETE", *post]
            )
        ]
        + [
            Route(f"/v1/{path}", partial(_answer, service, f"/v1/{path}", handler), methods=methods)
            for path, methods, handler in openai
        ]
        + [Route("/", partial(_answer, service, _PAGE, states.page)), Mount("/static", StaticFiles(directory=STATIC))],
        exception_handlers={HTTPException: _http_error},
        lifespan=lambda served: _lifespan(service, served.state.handlers),
    )
    served.state.handlers = handlers
    return served


@contextlib.asynccontextmanager
async def _lifespan(service: Service, handlers: Mapping[str, Handler]) -> AsyncIterator[None]:
    await recover(service, handlers)

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


async def _answer(service: Service, route: str, handler: Handler, request: Request) -> Response:
    """Check key and size, read the body, call the handler, and write the journal; a RefusedRequest becomes its status. Unless
    the answer asks for a repetition, its number is used, whatever becomes of it: later ones would wait for it."""
    call: ClientCall | None = None
    try:
        try:
            call, refusal = await _call(service, route, request)
            if refusal is not None:
                raise refusal
            result = await handler(call)
        except Exception as error:
            if call is not None and not (isinstance(error, RefusedRequest) and error.retry_after_s is not None):
                service.use_number(call)
            raise
        finally:
            if service.journal.is_behind and request.method != "GET" and route not in _READS:
                await asyncio.to_thread(service.journal.flush)
    except RefusedRequest as error:
        headers = {} if error.retry_after_s is None else {"Retry-After": str(error.retry_after_s)}
        if error.status == 401 and route == _PAGE:
            headers["WWW-Authenticate"] = 'Basic realm="verl: any name, and the API key as the password"'
        if error.status == 413:  # the server would read what is still to come, and discard it
            headers["Connection"] = "close"
        body: dict[str, object] = {"detail": error.sentence}
        if route.startswith("/v1/"):  # as clients of OpenAI's API read it
            body["error"] = {"message": error.sentence, "type": "invalid_request_error"}
        return JSONResponse(body, error.status, headers)
    except ClientDisconnect:
        return Response(status_code=499)
    except sqlite3.Error as error:  # the request stays in memory, and the repeated one finds it there
        return JSONResponse({"detail": f"{trouble(error)} The request waits."}, 503, {"Retry-After": "2"})
    except Exception:  # a fault of the server shall not end in a traceback at the client
        log.exception("%s has failed.", request.url.path)
        return JSONResponse({"detail": "A fault in the server; its log has more."}, 500, {"x-should-retry": "false"})
    if isinstance(result, Response):
        return result
    if isinstance(result, RequestFuture):
        result = types.UntypedAPIFuture(request_id=result.request_id)
    if isinstance(result, dict):
        return JSONResponse(result)
    assert isinstance(result, pydantic.BaseModel)
    return Response(result.model_dump_json(exclude_none=True), media_type="application/json")


async def _call(service: Service, route: str, request: Request) -> tuple[ClientCall, RefusedRequest | None]:
    """The request, and why it is refused, if its body is too large or damaged: it has the beginning of the body then."""
    tenant = Tenant() if route in ("healthz", _DOWNLOAD) else _tenant(service, request)
    service.arriving[tenant.name] += 1  # it may be the request that others wait for
    try:
        raw, refusal = await _body(request)
    finally:
        service.arriving[tenant.name] -= 1
    body, unread = decompressed(raw, request.headers.get("content-encoding", ""))
    digest = hashlib.sha256(body).hexdigest()
    parameters = (request.path_params, request.query_params)
    address = str(request.base_url).rstrip("/")
    call = ClientCall(
        route, body, tenant, digest, *parameters, method=request.method, address=address, is_gone=request.is_disconnected
    )  # fmt: skip
    return call, refusal or unread


def _tenant(service: Service, request: Request) -> Tenant:
    """The tenant of a request's key: of the SDK, of Prometheus (a bearer token) or of a browser (a password)."""
    # a page elsewhere could point its name here
    if not service.tenants.has_keys and not is_own_name(request.headers.get("host", "")):
        raise RefusedRequest("This address is not one of this machine (Host). Use 127.0.0.1, or give keys=FILE.", 421)
    scheme, _, key = request.headers.get("authorization", "").partition(" ")
    # a browser adds no key to what another site's page sends, but a password that it knows
    if request.method != "GET" and "x-api-key" not in request.headers and _is_foreign(request):
        raise RefusedRequest(
            "A page of another site has sent this request (Origin). Send the API key as x-api-key.", 403
        )
    if scheme.lower() == "basic":
        with contextlib.suppress(ValueError):
            key = base64.b64decode(key, validate=True).decode().partition(":")[2]
    return service.tenants.of_key(request.headers.get("x-api-key", key))


def _is_foreign(request: Request) -> bool:
    """Whether a browser says that a page of another site has sent a request."""
    origin, site = (request.headers.get(name) for name in ("origin", "sec-fetch-site"))
    is_own = origin is None or origin.partition("://")[2] == request.headers.get("host")
    return not is_own or site not in (None, "same-origin", "none")


async def _body(request: Request) -> tuple[bytes, RefusedRequest | None]:
    """The body, or the beginning of a body that is too large, and the refusal. A body that says so is not waited for."""
    length, refusal = request.headers.get("content-length", "0"), RefusedRequest(TOO_LARGE, 413)
    if not length.isdigit() or int(length) > MAX_BYTES:
        with contextlib.suppress(asyncio.TimeoutError):
            return await asyncio.wait_for(anext(request.stream()), _FIRST_PART_S), refusal
        return b"", refusal
    parts, size = list[bytes](), 0
    async for part in request.stream():
        parts.append(part)
        size += len(part)
        if size > MAX_BYTES:
            return b"".join(parts), refusal
    return b"".join(parts), None


async def _nowhere(call: ClientCall) -> object:
    raise RefusedRequest(f"There is no route {call.method} /api/v1/{call.path['path'][:200]} in this version.", 404)


async def _http_error(request: Request, error: Exception) -> Response:
    assert isinstance(error, HTTPException)
    sentence = f"There is no route {request.method} {request.url.path[:200]} in this version."
    return JSONResponse({"detail": sentence if error.status_code in (404, 405) else error.detail}, error.status_code)
