"""The policy of a run at an address, for agents that a fit of a script starts outside of the run: OpenAI's chat completions
and completions. `RayPPOTrainer.async_rollout_manager.server_addresses` and `llm_server_manager` have the address.

An answer has prompt_token_ids and token_ids, and with "logprobs" the log-probabilities, as vLLM's with return_token_ids. The
policy samples as the run says. Requests that arrive together share a generation. A conversation continues the very tokens of
its earlier turns in the same step.
"""

from __future__ import annotations

import asyncio
import contextlib
import hmac
import itertools
import json
import logging
import queue
import secrets
import socket
import threading
from collections import Counter, OrderedDict
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import Future
from dataclasses import replace
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from operator import attrgetter
from types import SimpleNamespace
from typing import TYPE_CHECKING, Any, NamedTuple, TypeAlias, cast

import torch

from verl.agents.continuity import ChatContinuity
from verl.agents.gateway import formats
from verl.agents.gateway.app import MAX_BODY, reachable
from verl.agents.gateway.sessions import ContextFullError, EndpointSession, RequestError, read_body
from verl.agents.images import EpisodeImages
from verl.agents.parsers import ToolParser
from verl.data_proto.merge import object_array
from verl.data_proto.proto import DataProto
from verl.data_proto.samples import SamplingParams
from verl.data_proto.token_ids import num_embeddings
from verl.errors import ConfigError, VerlError, is_failure
from verl.families import engine_facts
from verl.models.load import eos_token_ids_of
from verl.parallel.framing import listening_socket, most_connections
from verl.roles.rollout import UNSCORED, sampling_params

if TYPE_CHECKING:
    from verl.compat.own_fit import FitRun

log = logging.getLogger(__name__)

_GATHERING_S = 0.01  # requests within this time share a generation
_SILENT_S = 20.0  # a client that sends nothing of its request for so long has gone
_MOST_WAITING = 4096  # connections without a whole request


Body: TypeAlias = dict[str, Any]
Connection: TypeAlias = "socket.socket | tuple[bytes, socket.socket]"  # the latter of UDP, in the type of the base


class _Request(NamedTuple):
    prompt_ids: list[int]
    params: SamplingParams
    answer: Future[SimpleNamespace]

    @property
    def rules(self) -> tuple[object, ...]:
        """Equal for the requests of a generation."""
        return self.params.max_new_tokens, self.params.stop, self.params.grammar


class PolicyEndpoint:
    """Serves from its construction to `close`. `run` samples; `step` is the step in progress, which keys the random numbers."""

    def __init__(self, run: FitRun, step: Callable[[], int]):
        self._run, self._step, self._numbers = run, step, itertools.count()
        rollout, data = run.config.actor_rollout_ref.rollout, run.config.data
        self._params, self._max_prompt_length = sampling_params(rollout), rollout.prompt_length
        self._limits_requests = engine_facts(rollout.name).limits_requests
        tokenizer = run.loop.data.tokenizer
        self._num_tokens = num_embeddings(tokenizer)
        self._continuity = ChatContinuity(tokenizer, data.apply_chat_template_kwargs)
        self._parser = ToolParser.get_tool_parser(rollout.multi_turn.format, tokenizer)
        stops = {*eos_token_ids_of(run.config.actor_rollout_ref.model, tokenizer), *rollout.stop_token_ids}
        self._stop_token_ids = frozenset(stops)
        self._sessions: tuple[int, EndpointSession] | None = None  # step -> its conversations
        self._is_closed = False
        self._requests: queue.SimpleQueue[_Request | None] = queue.SimpleQueue()
        self._token = secrets.token_urlsafe(24)
        host, port = rollout.agent.gateway_host, rollout.agent.gateway_port
        try:
            listening = listening_socket(host, port, 2048)
        except OSError as error:
            raise ConfigError(
                f"The endpoint for agents cannot listen on {host}:{port} ({error.strerror}). Set "
                "actor_rollout_ref.rollout.agent.gateway_port=0 for a free port."
            ) from error
        self._place = listening.getsockname()[:2]
        self._server = _Server(self._place, _handler(self))
        self._server.socket.close()
        self._server.socket = listening
        for name, target in (("http", self._server.serve_forever), ("samples", self._sample)):
            threading.Thread(target=target, name=f"endpoint-{name}", daemon=True).start()

    @property
    def address(self) -> str:
        """host:port/s/TOKEN, behind which clients put /v1; no other process knows the token."""
        host, port = reachable(str(self._place[0])), self._place[1]
        return f"{f'[{host}]' if ':' in host else host}:{port}/s/{self._token}"

    def close(self) -> None:
        """End both threads; requests without an answer get an error."""
        self._server.shutdown()
        self._server.server_close()
        self._requests.put(None)
        self._is_closed = True

    def path_of(self, path: str) -> str:
        """The path behind the token; "" with another token."""
        prefix = f"/s/{self._token}"
        return path[len(prefix) :] if hmac.compare_digest(path[: len(prefix)].encode(), prefix.encode()) else ""

    def chat(self, body: Body) -> Body:
        """The answer to a request of POST /v1/chat/completions. Raises RequestError."""
        turns = asyncio.run(self._session().chat(*formats.chat_request(body)))
        return formats.chat_response(turns, body)

    def completions(self, body: Body) -> Body:
        """The same of POST /v1/completions."""
        request = formats.completion_request(body, self._continuity.encode)
        return formats.completion_response(asyncio.run(self._session().complete(*request, is_first=False)), body)

    def _session(self) -> EndpointSession:
        """The conversations of this step: another step has other weights."""
        step = self._step()
        if self._sessions is None or self._sessions[0] != step:
            task = SimpleNamespace(media=None, limit=self._params.max_new_tokens)
            episode: Any = SimpleNamespace(generate=self.generate, task=task, faults=Counter(), conversations={})
            images, limits = EpisodeImages(None, None), self._limits_requests
            session = EndpointSession(
                "", episode, self._continuity, self._parser, self._stop_token_ids, "", images, limits
            )
            self._sessions = step, session
        return self._sessions[1]

    async def generate(
        self, prompt_ids: Sequence[int], max_tokens: int | None, *, is_first: bool | None = None, media: object = None,
        stop: tuple[str, ...] = (), grammar: str = "",
    ) -> SimpleNamespace:  # fmt: skip
        """As `Episode.generate`, in the event loop of the request's thread."""
        if media:
            raise RequestError("this endpoint takes no images")
        if len(prompt_ids) > self._max_prompt_length:
            raise ContextFullError(
                f"the prompt has {len(prompt_ids)} tokens, and data.max_prompt_length is {self._max_prompt_length}"
            )
        if not prompt_ids or not all(0 <= token < self._num_tokens for token in prompt_ids):
            raise RequestError(f"the prompt is empty, or has a token beyond the {self._num_tokens} tokens of the model")
        limit, stops = self._params.max_new_tokens, (*self._params.stop, *stop)
        limit = min(max_tokens or limit, limit)
        params = replace(self._params, n=1, max_new_tokens=limit, stop=stops, grammar=grammar)
        request = _Request(list(prompt_ids), params, Future())
        self._requests.put(request)
        answer = asyncio.wrap_future(request.answer)
        while not answer.done() and not self._is_closed:
            await asyncio.wait([answer], timeout=1.0)
        if not answer.done():
            raise RequestError("the run has ended")
        return answer.result()

    def _sample(self) -> None:
        """Answer requests until `close`."""
        while (first := self._requests.get()) is not None:
            together, ends = [first], False
            while not ends:
                try:
                    more = self._requests.get(timeout=_GATHERING_S)
                except queue.Empty:
                    break
                ends = more is None
                together += [more] if more is not None else []
            together.sort(key=attrgetter("rules"))
            for _, group in itertools.groupby(together, key=attrgetter("rules")):
                self._answer(list(group))
            if ends:
                return

    def _answer(self, group: Sequence[_Request]) -> None:
        """Sample the answers of a group with equal rules."""
        ordinals = torch.tensor([next(self._numbers) for _ in group])
        prompts = object_array([tuple(request.prompt_ids) for request in group])
        batch = DataProto.from_dict({"ordinal": ordinals}, {"prompt_token_ids": prompts})
        try:
            samples = self._run.outside_samples(batch, self._step(), group[0].params, UNSCORED)
        except BaseException as error:  # handed to those who wait
            for request in group:
                request.answer.set_exception(error)
            if not is_failure(error):
                raise
            return
        columns, reasons = samples.batch, samples.non_tensor_batch["finish_reason"]
        for row, request in enumerate(group):
            mask = columns["response_mask"][row].bool()
            token_ids, log_probs = columns["responses"][row][mask], columns["rollout_log_probs"][row][mask]
            turn = SimpleNamespace(sample=0, token_ids=token_ids.tolist(), log_probs=log_probs.tolist())
            turn.finish_reason = str(reasons[row])
            request.answer.set_result(turn)


class _Server(ThreadingHTTPServer):
    """A thread for each connection. Of too many that wait for a request, the one that has waited longest is closed."""

    def __init__(self, place: tuple[str, int], handler: type[BaseHTTPRequestHandler]):
        super().__init__(place, handler, bind_and_activate=False)
        self._waiting: OrderedDict[Connection, None] = OrderedDict()  # the longest waiting first

    def process_request(self, request: Connection, client_address: object) -> None:
        self._waiting[request] = None
        if len(self._waiting) > min(_MOST_WAITING, most_connections() // 2):
            with contextlib.suppress(KeyError, OSError):  # it is answered or has ended meanwhile
                longest, _ = self._waiting.popitem(last=False)
                cast("socket.socket", longest).shutdown(socket.SHUT_RDWR)  # ends its thread
        super().process_request(request, client_address)

    def shutdown_request(self, request: Connection) -> None:
        self._waiting.pop(request, None)
        super().shutdown_request(request)

    @contextlib.contextmanager
    def answering(self, request: Connection) -> Iterator[None]:
        """The request on this connection has come."""
        self._waiting.pop(request, None)
        yield
        self._waiting[request] = None


def _handler(endpoint: PolicyEndpoint) -> type[BaseHTTPRequestHandler]:
    answers = {"/v1/chat/completions": endpoint.chat, "/v1/completions": endpoint.completions}

    class Handler(BaseHTTPRequestHandler):
        protocol_version = "HTTP/1.1"
        timeout = _SILENT_S  # of a read; then the connection is closed
        server: _Server

        def do_POST(self) -> None:
            length, path = self.headers.get("Content-Length", ""), endpoint.path_of(self.path)
            try:
                if path not in answers:
                    self._reply(404, {"error": {"message": "The address has another token, or there is no such path."}})
                    return
                if not length.isdecimal() or len(length) > 12 or int(length) > MAX_BODY:
                    raise RequestError(f"the request needs a Content-Length of at most {MAX_BODY} bytes")
                body = read_body(self.rfile.read(int(length)))
                if body.get("stream"):
                    raise RequestError("stream is not available here; leave it out")
                with self.server.answering(self.connection):
                    answer = answers[path](body)
                self._reply(200, answer)
            except (VerlError, ValueError, RecursionError) as error:
                code = getattr(error, "code", None)
                self._reply(400, {"error": {"message": f"{error}", "type": "invalid_request_error", "code": code}})
            except TimeoutError:
                self.close_connection = True
            except Exception as error:  # the fault is not the agent's: its run says what happened
                log.exception("A request of an agent could not be answered.")
                self._reply(500, {"error": {"message": f"{type(error).__name__}: {error}", "type": "server_error"}})

        def do_GET(self) -> None:
            models = [{"id": formats.MODEL, "object": "model", "created": 0, "owned_by": "verl"}]
            is_known = endpoint.path_of(self.path) == "/v1/models"
            self._reply(200 if is_known else 404, {"object": "list", "data": models if is_known else []})

        def _reply(self, status: int, body: object) -> None:
            content = json.dumps(body, allow_nan=False).encode()
            self.close_connection |= status != 200  # its body may not be read
            with contextlib.suppress(ConnectionError, TimeoutError):  # the agent has gone
                self.send_response(status)
                self.send_header("Content-Type", "application/json")
                self.send_header("Content-Length", str(len(content)))
                self.end_headers()
                self.wfile.write(content)

        def log_message(self, *_: object) -> None:
            """Requests are not logged."""

    return Handler
