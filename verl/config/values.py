"""Making a given value fit the declared type of its key."""

from __future__ import annotations

import math
import os
import re
import types
import typing
from typing import Any

from verl.foreign_text import valid_utf8

MAX_DEPTH = 50  # of lists and mappings inside each other

_NAMES = {int: "a whole number", float: "a number", bool: "True or False", str: "text"}


class Misfit(Exception):
    """The value cannot become the declared type; the message names the expected type."""


def convert(value: object, annotation: object, text: str | None = None) -> object:
    """`value` as `annotation` wants it. `text` is how the user wrote it, kept for keys that hold text.

    Raises Misfit when there is no such value.
    """
    if annotation is Any:
        return value
    options = _options(annotation)
    if value is None:
        if type(None) in options:
            return None
        raise Misfit(expected(annotation))
    for option in options:  # an exact type first, so that a text key that may also be a number keeps numbers
        if option is not type(None) and _is_exactly(value, option):
            return _convert_one(value, option, text)
    for option in options:
        try:
            return _convert_one(value, option, text)
        except Misfit:
            continue
    raise Misfit(expected(annotation))


def expected(annotation: object) -> str:
    """Values that an annotation allows, in words."""
    words = []
    for option in _options(annotation):
        origin = typing.get_origin(option) or option
        if option is type(None):
            words.append("null")
        elif origin is list:
            words.append(
                "a list" if not typing.get_args(option) else f"a list of {expected(typing.get_args(option)[0])}"
            )
        else:
            words.append("a mapping" if origin is dict else _NAMES.get(option, str(option)))
    return " or ".join(words)


def _options(annotation: object) -> tuple[Any, ...]:
    if isinstance(annotation, types.UnionType) or typing.get_origin(annotation) is typing.Union:
        return typing.get_args(annotation)
    return (annotation,)


def _is_exactly(value: object, option: object) -> bool:
    return type(value) is (typing.get_origin(option) or option)


def _convert_one(value: object, option: object, text: str | None) -> object:
    origin = typing.get_origin(option) or option
    if origin is list:
        (inner,) = typing.get_args(option) or (Any,)
        items = value if isinstance(value, list | tuple) else [value]
        if isinstance(value, dict):
            raise Misfit(expected(option))
        try:
            return [convert(item, inner) for item in items]
        except Misfit:
            raise Misfit(expected(option)) from None
    if origin is dict and isinstance(value, dict):
        return value
    if option in (int, float, bool, str) and not isinstance(value, list | dict | tuple):
        return _scalar(value, option, text)
    raise Misfit(expected(option))


def _scalar(value: Any, kind: type, text: str | None) -> object:
    if kind is str:
        return text if text is not None and not isinstance(value, str) else str(value)
    if kind is bool:
        if isinstance(value, bool):
            return value
        if isinstance(value, str) and value.lower() in ("true", "false"):
            return value.lower() == "true"
        raise Misfit(_NAMES[bool])
    if isinstance(value, bool):
        raise Misfit(_NAMES[kind])
    try:
        number = float(value)
    except (TypeError, ValueError, OverflowError):
        raise Misfit(_NAMES[kind]) from None
    if kind is float:
        return number
    if not math.isfinite(number) or number != int(number):
        raise Misfit(_NAMES[int])
    return int(value) if isinstance(value, int) else int(number)


def unusable_text(value: object) -> str | None:
    """The first text in `value`, of entries too, that no file or name can hold: with half a character or a NUL; or None."""
    waiting = [value]
    while waiting:
        item = waiting.pop()
        if isinstance(item, str):
            if "\0" in item or item != valid_utf8(item):
                return item
        elif isinstance(item, dict):
            waiting += [*item, *item.values()]
        elif isinstance(item, list | tuple):
            waiting += item
    return None


_VARIABLE = re.compile(r"\$(?:(\$)(?!\{)|([A-Za-z_]\w*))")


def expand_path(value: Any) -> object:
    """A name of a file or folder, or a list of them, with $NAME replaced. `$$` stands for a dollar sign.

    Readers replace `~`, so that a saved config holds for other users too; `./~` begins with a tilde. Raises Misfit for an empty
    name, a variable that is not set, and an unknown user.
    """
    if isinstance(value, list | tuple):
        return [expand_path(entry) for entry in value]
    if isinstance(value, dict):
        return {name: expand_path(entry) if name == "path" else entry for name, entry in value.items()}
    if not _is_path(value):
        return value
    if not value:
        raise Misfit("the name of a file or folder")
    path = _VARIABLE.sub(_variable, value)
    if os.path.expanduser(path).startswith("~"):
        raise Misfit("a path of a user of this machine (./~ is a name that begins with a tilde)")
    return path


def escape_path(value: Any) -> object:
    """The inverse of `expand_path`: the path that it expands to `value`."""
    if isinstance(value, list | tuple):
        return [escape_path(entry) for entry in value]
    if isinstance(value, dict):
        return {name: escape_path(entry) if name == "path" else entry for name, entry in value.items()}
    return re.sub(r"\$(?=[$A-Za-z_])", "$$", value) if _is_path(value) else value


def _is_path(value: object) -> bool:
    """Whether a value of a key of paths is one: templates are given as text too, and an agent as `command: ...`."""
    if not isinstance(value, str) or value.startswith("command:"):
        return False
    return "\n" not in value and "{" not in value.replace("${", "")


def _variable(match: re.Match[str]) -> str:
    if match[1]:
        return "$"
    if match[2] not in os.environ:
        raise Misfit(f"a path whose variables are set: {match[2]} is not ($$ is a dollar sign)")
    return os.environ[match[2]]


def merge(base: object, update: object) -> object:
    """`update` over `base`; mappings are merged key by key, everything else is replaced."""
    if isinstance(base, dict) and isinstance(update, dict):
        return {**base, **{k: merge(base.get(k), v) for k, v in update.items()}}
    return update
