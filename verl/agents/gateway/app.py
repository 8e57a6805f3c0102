"""The gateway: an endpoint of OpenAI's and Anthropic's form inside of the run, for training agents of any kind.

    POST {base}/chat/completions      with tools, streamed or not
    POST {base}/completions
    POST {base}/responses             a translation to chat completions
    POST {base}/messages              Anthropic's, a translation to chat completions
    GET  {base}/models
    POST {base}/reward                {"reward": 1.0, "info": {}}

{base} is http://127.0.0.1:port/s/SESSION/v1, or http://127.0.0.1:port/v1 for requests with SESSION as `model`: one client
can then serve all episodes. The policy samples as the run says: temperature and the like of a request are not looked at. Built
on Starlette and uvicorn, the extra `agents`.
"""

from __future__ import annotations

import asyncio
import contextlib
import hmac
import ipaddress
import json
import logging
import secrets
import socket
from collections.abc import AsyncIterator, Awaitable, Callable
from functools import partial
from typing import TYPE_CHECKING, Any

from verl.agents.gateway import formats
from verl.agents.gateway.sessions import EndpointSession, RequestError, read_body
from verl.config import full_key
from verl.errors import ConfigError, DataError, MissingExtraError, UnreachableError
from verl.parallel.framing import listening_socket
from verl.tracking.logs import adopt_loggers

if TYPE_CHECKING:
    from starlette.applications import Starlette
    from starlette.requests import Request
    from starlette.responses import Response

log = logging.getLogger(__name__)

START_TIMEOUT_S = 30.0
MAX_BODY = 32 << 20  # bytes
MAX_REWARD = 1e308  # of a request: the range of a float; the end of the episode checks reward.max_abs_score

Handler = Callable[[EndpointSession, dict[str, Any]], Awaitable[Any]]


class Gateway:
    """The server, on the event loop that runs the episodes. Raises MissingExtraError without Starlette and uvicorn."""

    def __init__(self, host: str, port: int):
        try:
            import starlette.applications
            import uvicorn

            from verl.parallel.connections import PatientProtocol
        except ImportError:
            raise MissingExtraError(full_key("rollout.agent.runner"), "agents", "uvicorn") from None
        del starlette
        self.token = secrets.token_urlsafe(24)
        self.sessions: dict[str, EndpointSession] = {}  # of the episodes that run, by the id in their addresses
        try:
            self._socket = listening_socket(host, port, 2048)
        except OSError as error:
            raise ConfigError(
                f"The endpoint for agents cannot listen on {host}:{port} ({error.strerror}). Set "
                f"{full_key('rollout.agent.gateway_port')}=0 for a free port."
            ) from error
        self.host, self.port = self._socket.getsockname()[:2]
        adopt_loggers("uvicorn", "starlette", "asyncio")
        self._config = uvicorn.Config(
            _application(self),
            http=PatientProtocol,
            log_config=None,  # else it would get handlers again
            log_level="warning",
            access_log=False,
            lifespan="off",
            timeout_graceful_shutdown=1,
        )
        self._new_server = uvicorn.Server
        self._server = uvicorn.Server(self._config)
        self._task: asyncio.Task[None] | None = None

    def base_url(self, session: EndpointSession, host: str | None = None) -> str:
        """The address of a session, for an OpenAI client on this machine or, if the endpoint listens on all addresses, on
        any. `host`: another way to the same port."""
        host = host or reachable(self.host)
        return f"http://{f'[{host}]' if ':' in host else host}:{self.port}/s/{session.id}/v1"

    @contextlib.asynccontextmanager
    async def serving(self, listening: socket.socket) -> AsyncIterator[None]:
        """Serve a further socket, and close it at the end."""
        server = self._new_server(self._config)
        task = asyncio.get_running_loop().create_task(server.serve(sockets=[listening]))
        try:
            yield
        finally:
            server.should_exit = True
            await asyncio.wait([task], timeout=3.0)

    async def start(self) -> None:
        """Serve; returns once requests are answered. Raises UnreachableError."""
        self._task = asyncio.get_running_loop().create_task(self._server.serve(sockets=[self._socket]))
        try:
            await asyncio.wait_for(self._started(), START_TIMEOUT_S)
        except asyncio.TimeoutError:
            raise UnreachableError(
                f"The endpoint for agents on {self.host}:{self.port} did not start within {START_TIMEOUT_S:g} s."
            ) from None

    async def _started(self) -> None:
        while not self._server.started:
            if self._task is not None and self._task.done():
                raise UnreachableError(f"The endpoint for agents on {self.host}:{self.port} did not start.")
            await asyncio.sleep(0.01)

    async def stop(self) -> None:
        self._server.should_exit = True
        if self._task is not None:
            await asyncio.wait([self._task], timeout=3.0)


def reachable(host: str) -> str:
    """The address of a socket bound to `host`: this machine's address if `host` stands for all addresses."""
    try:
        bound = ipaddress.ip_address(host)
    except ValueError:  # a name
        return host
    if not bound.is_unspecified:
        return host
    kind, elsewhere = (socket.AF_INET6, "2001:db8::1") if bound.version == 6 else (socket.AF_INET, "192.0.2.1")
    with socket.socket(kind, socket.SOCK_DGRAM) as probe, contextlib.suppress(OSError):
        probe.connect((elsewhere, 9))  # sends nothing: the kernel looks up the way to an address of documentation
        return str(probe.getsockname()[0])
    return "::1" if bound.version == 6 else "127.0.0.1"


def _application(gateway: Gateway) -> Starlette:
    from starlette.applications import Starlette
    from starlette.requests import ClientDisconnect
    from starlette.responses import JSONResponse, StreamingResponse
    from starlette.routing import Route

    def refusal(status: int, sentence: str, code: str | None = None) -> Response:
        kind = "authentication_error" if status == 401 else "invalid_request_error"
        return JSONResponse({"error": {"message": sentence, "type": kind, "code": code}}, status)

    def route(handler: Handler) -> Callable[[Request], Awaitable[Response]]:
        async def answer(request: Request) -> Response:
            key = request.headers.get("authorization", "").removeprefix("Bearer ") or request.headers.get(
                "x-api-key", ""
            )
            if not hmac.compare_digest(key.encode(), gateway.token.encode()):
                return refusal(401, "The API key is not the key of this run.")
            try:
                body = await _body(request)
                session = gateway.sessions.get(request.path_params.get("session", str(body.get("model"))))
                if session is None:
                    return refusal(404, "There is no such session: its episode has ended.")
                content = f"{request.url.path} {json.dumps(body, sort_keys=True)}"
                reply = await session.answered(content, partial(handler, session, body), request.is_disconnected)
            except (RequestError, DataError) as error:
                return refusal(400, f"{str(error).removesuffix('.')}.", getattr(error, "code", None))
            except ClientDisconnect:
                return refusal(400, "The request is not complete.")  # the client is gone
            if isinstance(reply, dict):
                try:
                    return JSONResponse(reply)
                except ValueError:  # NaN or half a character, of a field that the answer repeats
                    return refusal(400, "The answer repeats a field of the request that JSON cannot hold.")
            return StreamingResponse(reply, media_type="text/event-stream")

        return answer

    routes = [
        Route(f"{base}/{path}", route(handler), methods=["POST"])
        for base in ("/s/{session}/v1", "/v1")
        for path, handler in HANDLERS.items()
    ]
    routes.append(Route("/s/{session}/v1/models", route(_models), methods=["GET"]))
    return Starlette(routes=routes)


async def _body(request: Request) -> dict[str, object]:
    if request.method == "GET":
        return {}
    chunks, size = [], 0
    async for chunk in request.stream():
        size += len(chunk)
        if size > MAX_BODY:
            raise RequestError(f"the request has more than {MAX_BODY >> 20} MiB")
        chunks.append(chunk)
    return read_body(b"".join(chunks))


async def _chat(session: EndpointSession, body: dict[str, object]) -> object:
    answers = await session.chat(*formats.chat_request(body))
    if body.get("stream"):
        return _events(formats.chat_chunks(answers, body))
    return formats.chat_response(answers, body)


async def _completions(session: EndpointSession, body: dict[str, object]) -> object:
    encode = partial(session.continuity.encode, add_special_tokens=True)
    answers = await session.complete(*formats.completion_request(body, encode), is_first=False)
    for answer in answers:
        session.num_turns[answer.branch] += 2
    reply = formats.completion_response(answers, body)
    return _events([reply]) if body.get("stream") else reply


async def _responses(session: EndpointSession, body: dict[str, object]) -> object:
    (answer,) = await session.chat(*formats.responses_request(body))
    return formats.responses_response(answer, body)


async def _anthropic(session: EndpointSession, body: dict[str, object]) -> object:
    (answer,) = await session.chat(*formats.anthropic_request(body))
    if body.get("stream"):
        return _named_events(formats.anthropic_events(answer, body))
    return formats.anthropic_response(answer, body)


async def _models(session: EndpointSession, body: dict[str, object]) -> dict[str, object]:
    return {"object": "list", "data": [{"id": formats.MODEL, "object": "model", "created": 0, "owned_by": "verl"}]}


async def _reward(session: EndpointSession, body: dict[str, object]) -> dict[str, object]:
    reward, info = body.get("reward"), body.get("info")
    if isinstance(reward, bool) or not isinstance(reward, int | float) or not abs(reward) <= MAX_REWARD:
        raise RequestError("`reward` must be a finite number")
    if info is not None and not isinstance(info, dict):
        raise RequestError("`info` must be an object")
    session.reward, session.info = float(reward), dict(info or {})
    return {"ok": True}


HANDLERS: dict[str, Handler] = {
    "chat/completions": _chat,
    "completions": _completions,
    "responses": _responses,
    "messages": _anthropic,
    "reward": _reward,
}


async def _events(chunks: list[dict[str, object]]) -> AsyncIterator[str]:
    for chunk in chunks:
        yield f"data: {json.dumps(chunk)}\n\n"
    yield "data: [DONE]\n\n"


async def _named_events(events: list[dict[str, object]]) -> AsyncIterator[str]:
    for event in events:
        yield f"event: {event['type']}\ndata: {json.dumps(event)}\n\n"
