"""A reward model of the run at an address of this machine, for a reward function that asks it itself.

The paths are those of SGLang (`/generate` with input_ids or text) and of OpenAI (`/v1/chat/completions`). Requests that arrive
together share a generation. Replies are greedy unless a request has a temperature; then a prompt has one reply too.
"""

import itertools
import json
import logging
import queue
import threading
import zlib
from collections.abc import Sequence
from concurrent.futures import Future
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from typing import Any, NamedTuple, TypeAlias

import torch

from verl.data.prompts import render_chat
from verl.data.schema import messages_of
from verl.data_proto.samples import Completion, PromptRequest, SamplingParams
from verl.errors import ConfigError, DataError, ModelError, is_failure
from verl.roles.judges import EngineJudge, warn_of_cut_replies

log = logging.getLogger(__name__)

_GATHERING_S = 0.01  # requests within this time share a generation
_MAX_BODY = 64 * 2**20

# errors that a question is the cause of
_OF_A_QUESTION = (
    ConfigError, DataError, ModelError, ValueError, TypeError, KeyError, AttributeError, RecursionError
)  # fmt: skip

Body: TypeAlias = dict[str, Any]


class _Request(NamedTuple):
    prompt_ids: tuple[int, ...]
    params: SamplingParams
    answer: Future[Completion]


class JudgeServer:
    """Serves `judge` from its construction to `close`; both end the engine with it."""

    def __init__(self, judge: EngineJudge):
        self.judge, self._requests = judge, queue.SimpleQueue[_Request | None]()
        self._server = ThreadingHTTPServer(("127.0.0.1", 0), _handler(self))
        self._server.daemon_threads = True
        self._threads = [
            threading.Thread(target=target, name=f"judge-{name}", daemon=True)
            for name, target in (("listen", self._server.serve_forever), ("samples", self._sample))
        ]
        for thread in self._threads:
            thread.start()

    @property
    def address(self) -> str:
        """host:port."""
        host, port = self._server.server_address[:2]
        return f"{host!s}:{port}"

    def close(self) -> None:
        """End the server, and then the engine."""
        self._server.shutdown()
        self._server.server_close()
        self._requests.put(None)
        self._threads[-1].join(timeout=60.0)
        self.judge.close()

    def generate(self, body: Body) -> Body:
        """The answer of SGLang's /generate. Raises ModelError, ValueError, TypeError or KeyError for a bad request."""
        ids = body.get("input_ids") or self.judge.tokenizer(str(body["text"]))["input_ids"]
        ids = ids["input_ids"] if isinstance(ids, dict) else ids  # of a chat template of transformers 5
        settings = dict(body.get("sampling_params") or {})
        done = self._reply(ids, settings.get("max_new_tokens"), {**body, **settings})
        meta: Body = {"prompt_tokens": len(ids), "completion_tokens": len(done.token_ids)}
        meta["finish_reason"] = {"type": done.finish_reason}
        return {"text": self._text(done), "output_ids": done.token_ids, "meta_info": meta}

    def chat(self, body: Body) -> Body:
        """The answer of /v1/chat/completions."""
        messages = messages_of(body["messages"])
        text = render_chat(self.judge.tokenizer, messages, "a judge's question", add_generation_prompt=True)
        ids = self.judge.tokenizer(text, add_special_tokens=False)["input_ids"]
        done = self._reply(ids, body.get("max_completion_tokens", body.get("max_tokens")), body)
        message = {"role": "assistant", "content": self._text(done)}
        usage = {"prompt_tokens": len(ids), "completion_tokens": len(done.token_ids)}
        usage["total_tokens"] = sum(usage.values())
        choice = {"index": 0, "message": message, "finish_reason": done.finish_reason}
        return {"object": "chat.completion", "model": body.get("model", ""), "choices": [choice], "usage": usage}

    def _text(self, done: Completion) -> str:
        return str(self.judge.tokenizer.decode(done.token_ids, skip_special_tokens=True))

    def _reply(self, ids: Sequence[int], limit: int | None, settings: Body) -> Completion:
        plain = self.judge.params
        for name, usual in (("n", 1), ("best_of", 1), ("stream", False), ("logprobs", False)):
            if (value := settings.get(name)) not in (None, usual):
                raise ValueError(
                    f"{name}={value!r} is not available: a question to a judge has one whole reply. Leave it out."
                )
        params = SamplingParams(
            temperature=float(settings.get("temperature") or plain.temperature),
            top_p=float(settings.get("top_p") or 1.0),
            max_new_tokens=min(int(limit or plain.max_new_tokens), plain.max_new_tokens),
        )
        request = _Request(tuple(int(token) for token in ids), params, Future())
        self._requests.put(request)
        return request.answer.result()

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
            together.sort(key=lambda request: repr(request.params))
            for _, group in itertools.groupby(together, key=lambda request: request.params):
                self._answer(list(group))
            if self._requests.empty():
                self.judge.release()
            if ends:
                return

    @torch.no_grad()
    def _answer(self, group: list[_Request]) -> None:
        distinct = {request.prompt_ids: number for number, request in enumerate(group)}
        requests = [
            PromptRequest(number, ids, random_ordinal=zlib.crc32(repr(ids).encode()))
            for ids, number in distinct.items()
        ]
        try:
            done = {c.ordinal: c for c in self.judge.engine.generate(requests, group[0].params, step=0)}
        except BaseException as error:  # handed to those who wait
            if len(group) > 1 and is_failure(error):  # of one of them
                for request in group:
                    self._answer([request])
                return
            for request in group:
                request.answer.set_exception(error)
            if not is_failure(error):
                raise
            return
        if any(c.finish_reason == "length" for c in done.values()):
            warn_of_cut_replies(group[0].params.max_new_tokens)
        for request in group:
            request.answer.set_result(done[distinct[request.prompt_ids]])


def _handler(server: JudgeServer) -> type[BaseHTTPRequestHandler]:
    answers = {"/generate": server.generate, "/v1/chat/completions": server.chat}

    class Handler(BaseHTTPRequestHandler):
        protocol_version = "HTTP/1.1"
        timeout = 20.0  # of a read; then the connection is closed

        def do_POST(self) -> None:
            length = self.headers.get("Content-Length", "")
            try:
                if self.path not in answers:
                    self._reply(404, {"error": {"message": f"There are {', '.join(answers)}."}})
                elif not length.isdecimal() or int(length) > _MAX_BODY:
                    self._reply(
                        400, {"error": {"message": f"A request needs a Content-Length of at most {_MAX_BODY}."}}
                    )
                else:
                    self._reply(200, answers[self.path](json.loads(self.rfile.read(int(length)))))
            except _OF_A_QUESTION as error:
                self._reply(400, {"error": {"message": f"{type(error).__name__}: {error}"}})
            except Exception as error:  # the fault is not the function's: its run says what happened
                log.exception("A question to the judge could not be answered.")
                self._reply(500, {"error": {"message": f"{type(error).__name__}: {error}"}})

        def do_GET(self) -> None:
            self._reply(200 if self.path in ("/health", "/v1/models") else 404, {"object": "list", "data": []})

        def _reply(self, status: int, body: object) -> None:
            content = json.dumps(body).encode()
            self.close_connection |= status != 200  # its body may not be read
            self.send_response(status)
            self.send_header("Content-Type", "application/json")
            self.send_header("Content-Length", str(len(content)))
            self.end_headers()
            self.wfile.write(content)

        def log_message(self, *_: object) -> None:
            """Requests are not logged."""

    return Handler
