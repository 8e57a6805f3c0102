"""JSON over HTTP with a total deadline, a limit on the size of an answer, a bearer token and repetitions."""

import asyncio
import functools
import ipaddress
import json
import os
import ssl
import threading
import time
from concurrent.futures import Future
from concurrent.futures import TimeoutError as FutureTimeout

import httpx

from verl.config import full_key
from verl.errors import ConfigError, DeadlineError, ModelError, RefusedError, UnreachableError
from verl.foreign_text import clean
from verl.reshard.link import address_towards
from verl.rollout.http.answers import Answer

# of an answer, and for each of its tokens: they come with their texts, log-probs and the names of all these
_MOST_BYTES, _TOKEN_BYTES = 4 << 20, 1 << 10
_NO_ROUTE = 404
_AS_ASKED = (400, 413, 422)  # refused for what was asked
_TRY_AGAIN = (429, 502, 503, 504)  # busy, or not there yet
_FIRST_WAIT_S = 0.25
_LONGEST_WAIT_S = 8.0
_MOST_ASKED_S = 30.0  # of a wait that the service asks for (Retry-After)
_CONNECT_S = 10.0  # for a service to accept a connection, repetitions included
_IDLE_S = 2.0  # of a connection before it is closed here; servers wait longer (uvicorn: 5 s)
_GRACE_S = 5.0  # for a request that is past its deadline to be dropped


class Client:
    """Calls of the service at `url`. `token_env` names the environment variable with its bearer token, which a service on
    another machine must have; `keys` is the section of the config that errors name. Raises ConfigError for an address or a
    token that cannot be used."""

    def __init__(self, url: str, *, token_env: str, timeout_s: float, num_retries: int, keys: str = "rollout.service"):
        self.keys, self.url = full_key(keys), url.rstrip("/")
        self.timeout_s, self.num_retries = timeout_s, num_retries
        self._token_env, token = token_env, bearer_token(self.url, token_env, keys)
        self._loop, self._running = _loop(), set[Future[tuple[int, bytes, float]]]()
        self._http = httpx.AsyncClient(
            headers={
                "Accept-Encoding": "identity",  # the size of compressed content is not known before it is read
                "Content-Type": "application/json",
                **({"Authorization": f"Bearer {token}"} if token else {}),
            },
            limits=httpx.Limits(max_connections=None, keepalive_expiry=_IDLE_S),
            trust_env=False,  # no proxy between a run and its service
            verify=tls_context(),
        )

    def own_address(self) -> str:
        """The address of this host that its connections to the service come from. Raises OSError."""
        url = httpx.URL(self.url)
        return address_towards(url.host, url.port or (443 if url.scheme == "https" else 80))

    def get(self, path: str, *, may_lack: bool = False) -> Answer:
        """See `post`."""
        return self._parsed("GET", path, self._call("GET", path, None, 0, may_lack=may_lack))

    def post(self, path: str, body: dict[str, object], *, num_tokens: int = 0, may_lack: bool = False) -> Answer:
        """The JSON of the answer with at most `num_tokens` tokens; {} for an empty answer. With `may_lack` also {} if the
        service has no such route.

        Raises UnreachableError when the service cannot be reached (within 10 s if it takes no connection), and DeadlineError
        when its answer is not complete in time, both after `num_retries` repetitions. Raises ConfigError when it refuses the
        token, RefusedError for a request that it does not take, and ModelError for any other refusal, an answer that is too
        long, or text that is not JSON.
        """
        content = self._call("POST", path, json.dumps(body).encode(), num_tokens, may_lack=may_lack)
        return self._parsed("POST", path, content)

    def command(self, path: str, body: dict[str, object], *, may_lack: bool = False) -> None:
        """As `post`, for an answer that need not be JSON."""
        self._call("POST", path, json.dumps(body).encode(), 0, may_lack=may_lack)

    def cancel(self) -> None:
        """Drop the requests under way; their callers get CancelledError."""
        for request in list(self._running):
            request.cancel()

    def _call(self, method: str, path: str, body: bytes | None, num_tokens: int, *, may_lack: bool = False) -> bytes:
        most_bytes = _MOST_BYTES + num_tokens * _TOKEN_BYTES
        connect_until: float | None = None  # of attempts since a connection was there
        asked_s = 0.0
        for attempt in range(self.num_retries + 1):
            last = attempt == self.num_retries
            if attempt:
                time.sleep(max(asked_s, min(_LONGEST_WAIT_S, _FIRST_WAIT_S * 2 ** (attempt - 1))))
            connect_until = connect_until or time.monotonic() + _CONNECT_S
            try:
                status, content, asked_s = self._exchange(method, path, body, connect_until, most_bytes)
            except (httpx.ConnectError, httpx.ConnectTimeout) as error:
                if last or time.monotonic() >= connect_until:
                    raise self._unreachable(error, method, path, attempt + 1) from error
                continue
            except TimeoutError:
                if last:
                    raise DeadlineError(
                        f"{method} {self.url}{path} was not answered within {self.timeout_s:g} s, {attempt + 1} times. Raise "
                        f"{self.keys}.timeout_s, or look at the service."
                    ) from None
            except httpx.TransportError as error:
                if last:
                    raise self._unreachable(error, method, path, attempt + 1) from error
            else:
                if may_lack and status == _NO_ROUTE:
                    return b""
                if status not in _TRY_AGAIN or last:
                    self._require_success(method, path, status, content)
                    return content
            connect_until = None
        raise AssertionError("every last attempt returns or raises")

    def _exchange(
        self, method: str, path: str, body: bytes | None, connect_until: float, most_bytes: int
    ) -> tuple[int, bytes, float]:
        """Status and content of one answer, and the seconds that it asks to wait. Raises TimeoutError when it is not complete
        within `timeout_s`, also if a part of it has come."""
        content = self._content(method, path, body, max(0.1, connect_until - time.monotonic()), most_bytes)
        request = asyncio.run_coroutine_threadsafe(asyncio.wait_for(content, self.timeout_s), self._loop)
        self._running.add(request)
        try:
            return request.result(self.timeout_s + _GRACE_S)
        except (asyncio.TimeoutError, FutureTimeout):  # names of TimeoutError; separate classes before Python 3.11
            raise TimeoutError from None
        finally:
            request.cancel()
            self._running.discard(request)

    async def _content(
        self, method: str, path: str, body: bytes | None, connect_s: float, most_bytes: int
    ) -> tuple[int, bytes, float]:
        timeout = httpx.Timeout(None, connect=connect_s)
        async with self._http.stream(method, self.url + path, content=body, timeout=timeout) as answer:
            if answer.headers.get("Content-Encoding", "identity") != "identity":
                raise ModelError(
                    f"The service at {self.url} answered {method} {path} in an encoding that was not asked for; it is not read."
                )
            content = bytearray()
            async for part in answer.aiter_raw():
                content += part
                if len(content) > most_bytes:
                    raise ModelError(
                        f"The service at {self.url} answered {method} {path} with more than {most_bytes:,} bytes, which "
                        "no such answer has; look at its log."
                    )
            wait = answer.headers.get("Retry-After", "")
            asked_s = min(_MOST_ASKED_S, float(wait)) if wait.isascii() and wait.isdigit() else 0.0
            return answer.status_code, bytes(content), asked_s

    def _unreachable(self, error: BaseException, method: str, path: str, attempts: int) -> UnreachableError:
        times = "once" if attempts == 1 else f"{attempts} times"
        return UnreachableError(
            f"The service at {self.url} cannot be reached ({type(error).__name__}: {clean(str(error))}); {method} "
            f"{path} was tried {times}. Start it, or correct {self.keys}.url."
        )

    def _require_success(self, method: str, path: str, status: int, content: bytes) -> None:
        if status in (401, 403):
            raise ConfigError(
                f"The service at {self.url} refused {method} {path} ({status}): set the environment variable "
                f"{self._token_env} to its token, if it does not say otherwise: {_shown(content)}"
            )
        if not 200 <= status < 300:
            kind = RefusedError if status in _AS_ASKED else ModelError
            raise kind(f"The service at {self.url} refused {method} {path} with {status}: {_shown(content)}")

    def _parsed(self, method: str, path: str, content: bytes) -> Answer:
        try:
            value = json.loads(content) if content.strip() else {}
        except (ValueError, RecursionError):
            raise ModelError(
                f"{method} {self.url}{path} did not answer with JSON, but with: {_shown(content)}"
            ) from None
        return Answer(self.url, f"{method} {path}", value)


def _shown(content: bytes) -> str:
    return clean(content[:2000].decode(errors="replace").strip())


@functools.cache
def _loop() -> asyncio.AbstractEventLoop:
    """The event loop of this process's clients, on its own thread. A request is a task of the loop: a deadline can cancel it
    at any point: httpx's own deadlines start again with each byte that arrives."""
    loop = asyncio.new_event_loop()
    threading.Thread(target=loop.run_forever, name="verl-http", daemon=True).start()
    return loop


@functools.cache
def tls_context() -> ssl.SSLContext:
    """The certificates that this process's clients trust (SSL_CERT_FILE, SSL_CERT_DIR); reading them takes 20 ms."""
    return httpx.create_ssl_context()


def bearer_token(url: str, token_env: str, keys: str = "rollout.service") -> str:
    """The token of the service at `url` in the environment, "" for none. Raises ConfigError as a Client does."""
    token, host = os.environ.get(token_env, ""), _host(url, full_key(keys))
    if not token and not is_loopback(host):
        raise ConfigError(
            f"The service at {url} is on another machine and must ask for a token: set the environment variable "
            f"{token_env} to it."
        )
    if not (token.isascii() and token.isprintable()):
        raise ConfigError(f"The environment variable {token_env} has characters that no token has; set it again.")
    return token


def _host(url: str, keys: str) -> str:
    """The host of an address."""
    try:
        parsed = httpx.URL(url)
    except (httpx.InvalidURL, UnicodeError):
        parsed = httpx.URL()
    if parsed.scheme not in ("http", "https") or not parsed.host or not 0 < (parsed.port or 80) < 1 << 16:
        raise ConfigError(f"{keys}.url={clean(url)} is not an address like http://127.0.0.1:8000.")
    return parsed.host


def is_loopback(host: str) -> bool:
    """Whether `host` can only be this machine."""
    try:
        return host == "localhost" or ipaddress.ip_address(host).is_loopback
    except ValueError:
        return False
