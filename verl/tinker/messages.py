"""Bodies of requests as messages of the SDK, and messages as answers."""

from __future__ import annotations

from typing import TypeVar

import pydantic
from starlette.requests import Request

from verl.tinker.queues import WireAnswer
from verl.tinker.records import RefusedRequest

Message = TypeVar("Message", bound=pydantic.BaseModel)


async def read_message(request: Request, kind: type[Message]) -> Message:
    """The body as a message of the SDK."""
    try:
        return kind.model_validate_json(request.state.body)
    except pydantic.ValidationError as error:
        first = error.errors(include_url=False, include_input=False)[0]
        place = ".".join(map(str, first["loc"]))
        raise RefusedRequest(
            f"The body is no {kind.__name__}: {place + ': ' if place else ''}{first['msg']}."
        ) from error


def as_answer(message: pydantic.BaseModel) -> WireAnswer:
    """A message as the result of a future."""
    return WireAnswer(message.model_dump_json(exclude_none=True).encode())
