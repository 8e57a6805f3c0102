"""JSON over HTTP with a deadline, a bearer token and repetitions."""

from __future__ import annotations

import ipaddress
import json
import os
import time
from typing import Any
from urllib.parse import urlsplit

import httpx

from verl.errors import ConfigError, DeadlineError, ModelError, UnreachableError

_TRY_AGAIN = (429, 502, 503, 504)  # busy, or not there yet
_FIRST_WAIT_S = 0.25
_LONGEST_WAIT_S = 8.0
_CONNECT_S = 10.0  # for a service to accept a connection, repetitions included


class Client:
    """Calls of the service at `url`. `token_env` names the environment variable with its bearer token, which a service on
    another machine must have; `keys` is the section of the config that errors name. Raises ConfigError for an address that
    cannot be used."""

    def __init__(
        self,
        url: str,
        *,
        token_env: str,
        timeout_s: float,
        num_retries: int,
        keys: str = "actor_rollout_ref.rollout.service",
    ):
        parts = urlsplit(url)
        if parts.scheme not in ("http", "https") or not parts.hostname:
            raise ConfigError(f"{keys}.url={url} is not an address like http://127.0.0.1:8000.")
        self._keys = keys
        self.url, self.timeout_s, self.num_retries = url.rstrip("/"), timeout_s, num_retries
        self._token_env = token_env
        token = os.environ.get(token_env, "")
        if not token and not is_loopback(parts.hostname):
            raise ConfigError(
                f"The service at {self.url} is on another machine and must ask for a token: set the environment variable "
                f"{token_env} to it."
            )
        self._http = httpx.Client(
            headers={"Authorization": f"Bearer {token}"} if token else {},
            limits=httpx.Limits(max_connections=None, max_keepalive_connections=0),
            trust_env=False,  # no proxy between a run and its service
        )

    def get(self, path: str) -> Any:
        """See `post`."""
        return self._call("GET", path, None)

    def post(self, path: str, body: dict[str, Any]) -> Any:
        """The JSON of the answer; {} for an empty answer.

        Raises UnreachableError when the service cannot be reached (after 10 s at the latest where it takes no connection) and
        DeadlineError when it does not answer in time, both after `num_retries` repetitions, ConfigError when it refuses the
        token, ModelError for any other refusal.
        """
        return self._call("POST", path, body)

    def _call(self, method: str, path: str, body: dict[str, Any] | None) -> Any:
        connect_until: float | None = None  # of attempts since a connection was there
        for attempt in range(self.num_retries + 1):
            last = attempt == self.num_retries
            if attempt:
                time.sleep(min(_LONGEST_WAIT_S, _FIRST_WAIT_S * 2 ** (attempt - 1)))
            connect_until = connect_until or time.monotonic() + _CONNECT_S
            timeout = httpx.Timeout(self.timeout_s, connect=max(0.1, connect_until - time.monotonic()), pool=None)
            try:
                answer = self._http.request(method, self.url + path, json=body, timeout=timeout)
            except (httpx.ConnectError, httpx.ConnectTimeout) as error:
                if last or time.monotonic() >= connect_until:
                    raise self._unreachable(error, method, path, attempt + 1) from error
                continue
            except httpx.TimeoutException:
                if last:
                    raise DeadlineError(
                        f"{method} {self.url}{path} was not answered within {self.timeout_s:g} s, {attempt + 1} times. Raise "
                        f"{self._keys}.timeout_s, or look at the service."
                    ) from None
            except httpx.TransportError as error:
                if last:
                    raise self._unreachable(error, method, path, attempt + 1) from error
            else:
                if answer.status_code not in _TRY_AGAIN or last:
                    return self._accepted(method, path, answer)
            connect_until = None
        raise AssertionError("every last attempt returns or raises")

    def _unreachable(self, error: BaseException, method: str, path: str, attempts: int) -> UnreachableError:
        times = "once" if attempts == 1 else f"{attempts} times"
        return UnreachableError(
            f"The service at {self.url} cannot be reached ({type(error).__name__}: {error}); {method} {path} was tried "
            f"{times}. Start it, or correct {self._keys}.url."
        )

    def _accepted(self, method: str, path: str, answer: httpx.Response) -> Any:
        status, text = answer.status_code, answer.text.strip()
        if status in (401, 403):
            raise ConfigError(
                f"The service at {self.url} refused {method} {path} ({status}): set the environment variable "
                f"{self._token_env} to its token."
            )
        if not answer.is_success:
            raise ModelError(f"The service at {self.url} refused {method} {path} with {status}: {text[:300]}")
        if not text:
            return {}
        try:
            return json.loads(text)
        except ValueError:
            raise ModelError(f"{method} {self.url}{path} did not answer with JSON, but with: {text[:100]}") from None


def is_loopback(host: str) -> bool:
    """Whether `host` can only be this machine."""
    try:
        return host == "localhost" or ipaddress.ip_address(host).is_loopback
    except ValueError:
        return False
