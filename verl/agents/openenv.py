"""Environments of an OpenEnv server: `rollout.agent.environment=openenv:http://HOST:PORT`.

The model's text is an action: the JSON object that the server's schema asks for, or the text of its only required field. The
package `openenv` talks to the server, with a session for each episode. `extra_info.reset` of a row has arguments of reset.
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from typing import Any, TypeAlias

import httpx

from verl.config import full_key
from verl.errors import ConfigError, MissingExtraError
from verl.foreign_text import clean

Schema: TypeAlias = dict[str, Any]  # a JSON schema
_TIMEOUT_S = 10.0
_OF_STEPS = ("done", "reward", "metadata")  # entries of an observation that are no observation


class OpenEnv:
    """The server at `url`; it makes one object for each episode. Raises MissingExtraError, and ConfigError without a server
    there."""

    def __init__(self, url: str):
        label = f"{full_key('rollout.agent.environment')}=openenv:{url}"
        try:
            from openenv import GenericEnvClient
        except ImportError as error:
            raise MissingExtraError(label, "openenv", "openenv") from error
        self.url, self._client = url.rstrip("/"), GenericEnvClient
        try:
            answer = httpx.get(f"{self.url}/schema", timeout=_TIMEOUT_S).raise_for_status().json()
            self.schema: Schema = answer["action"]
        except (httpx.HTTPError, httpx.InvalidURL, ValueError, LookupError, TypeError) as error:
            raise ConfigError(
                f"{label}: no OpenEnv server tells its schema there ({type(error).__name__}: {clean(error, 100)}). Start it, "
                "or correct the address."
            ) from error

    def __call__(self) -> _Episode:
        """An episode."""
        return _Episode(self._client(base_url=self.url).sync(), self.schema)


class _Episode:
    """Gymnasium's kind of environment."""

    def __init__(self, client: Any, schema: Schema):
        self.client, self.schema = client, schema

    def reset(self, seed: int | None = None, **row: Any) -> str:
        """The first observation, and the form of actions if they are more than a text."""
        self.client.connect()
        arguments = {"seed": seed, **((row.get("extra_info") or {}).get("reset") or {})}
        observation = _text(self.client.reset(**arguments).observation)
        return observation if self._only_field() else f"{observation}\n\nAnswer with one JSON object: {self._form()}"

    def step(self, text: str) -> tuple[str, float, bool, bool, dict[str, object]]:
        """Act; a text that is no action costs a turn and is answered with the form of actions."""
        action = self._action(text)
        if action is None:
            return f"This is no action. Answer with one JSON object: {self._form()}", 0.0, False, False, {}
        result = self.client.step(action)
        return _text(result.observation), float(result.reward or 0.0), bool(result.done), False, {}

    def close(self) -> None:
        """End the session."""
        self.client.close()

    def _action(self, text: str) -> dict[str, object] | None:
        inner = text.strip().removeprefix("```json").strip("`").strip()
        try:
            parsed = json.loads(inner)
        except (ValueError, RecursionError):
            parsed = None
        if isinstance(parsed, dict):
            return parsed
        field = self._only_field()
        return {field: text.strip()} if field else None

    def _only_field(self) -> str | None:
        required = self.schema.get("required") or []
        properties = self.schema.get("properties") or {}
        is_text = len(required) == 1 and (properties.get(required[0]) or {}).get("type", "string") == "string"
        return str(required[0]) if is_text else None

    def _form(self) -> str:
        fields = {k: v for k, v in (self.schema.get("properties") or {}).items() if k != "metadata"}
        return json.dumps({"properties": fields, "required": self.schema.get("required") or []})


def _text(observation: object) -> str:
    """Its only text, else JSON."""
    if not isinstance(observation, Mapping):
        return str(observation)
    entries = {k: v for k, v in observation.items() if k not in _OF_STEPS and v is not None}
    values = list(entries.values())
    return values[0] if len(values) == 1 and isinstance(values[0], str) else json.dumps(entries, default=str)
