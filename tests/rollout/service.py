"""A service for tests that answers like the recorded services, and keeps the requests it received."""

import contextlib
import json
import threading
from contextlib import contextmanager
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer

MODELS = {"data": [{"id": "served", "root": "somewhere/model"}]}


def choice(token_ids, log_probs, reason="length"):
    """One sample, as services of OpenAI's form answer."""
    return {"choices": [{"token_ids": token_ids, "logprobs": {"token_logprobs": log_probs}, "finish_reason": reason}]}


class Raw:
    """An answer as it goes over the wire, status line and all, in the chunks that `parts()` gives."""

    def __init__(self, parts):
        self.parts = parts


class Server(ThreadingHTTPServer):
    request_queue_size = 128  # with the default of 5, one in ten of 24 connections at a time is reset


class Service:
    """`answers[path]` is JSON, (status, text), a Raw, or a function of the request's body that gives one of these."""

    def __init__(self, answers, port=0):
        self.answers, self.requests, self.headers = answers, [], []
        self.lock = threading.Lock()
        service = self

        class Handler(BaseHTTPRequestHandler):
            def do_GET(self):
                self._answer({})

            def do_POST(self):
                self._answer(json.loads(self.rfile.read(int(self.headers["Content-Length"]))))

            def _answer(self, body):
                with service.lock:
                    service.requests.append((self.path, body))
                    service.headers.append(dict(self.headers))
                answer = service.answers.get(self.path, (404, "no such route"))
                answer = answer(body) if callable(answer) else answer
                if answer is None:  # the connection breaks
                    self.connection.close()
                    return
                if isinstance(answer, Raw):
                    with contextlib.suppress(OSError):  # the client has gone
                        for part in answer.parts():
                            self.wfile.write(part)
                            self.wfile.flush()
                    self.close_connection = True
                    return
                status, text = answer if isinstance(answer, tuple) else (200, json.dumps(answer))
                with contextlib.suppress(OSError):  # the client has gone
                    self.send_response(status)
                    self.end_headers()
                    self.wfile.write(text.encode())

            def log_message(self, *args):
                pass

        self.server = Server(("127.0.0.1", port), Handler)
        self.url = f"http://127.0.0.1:{self.server.server_port}"

    def bodies(self, path):
        return [body for route, body in self.requests if route == path]


@contextmanager
def running(answers):
    service = Service(answers)
    thread = threading.Thread(target=service.server.serve_forever, kwargs={"poll_interval": 0.01}, daemon=True)
    thread.start()
    try:
        yield service
    finally:
        service.server.shutdown()
        service.server.server_close()
        thread.join(5)
