"""A request as routes read it: it comes from a client, or after a kill from the journal."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import TypeVar

import pydantic

from verl.tinker.journal import AcceptedRequest
from verl.tinker.queues import WireAnswer
from verl.tinker.records import RefusedRequest
from verl.tinker.tenants import Tenant

Message = TypeVar("Message", bound=pydantic.BaseModel)


@dataclass(frozen=True)
class ClientCall:
    """`path` and `query` are parameters of the URL, `digest` the SHA-256 of `body`. `stored` is the journal's entry."""

    route: str
    body: bytes
    tenant: Tenant
    digest: str
    path: Mapping[str, str] = field(default_factory=dict)
    query: Mapping[str, str] = field(default_factory=dict)
    stored: AcceptedRequest | None = None


def read_message(call: ClientCall, kind: type[Message]) -> Message:
    """The body as a message of the SDK."""
    try:
        return kind.model_validate_json(call.body)
    except pydantic.ValidationError as error:
        first = error.errors(include_url=False, include_input=False)[0]
        place = ".".join(map(str, first["loc"]))
        raise RefusedRequest(
            f"The body is no {kind.__name__}: {place + ': ' if place else ''}{first['msg']}."
        ) from error


def as_answer(message: pydantic.BaseModel) -> WireAnswer:
    """A message as the result of a future."""
    return WireAnswer(message.model_dump_json(exclude_none=True).encode())
