"""Values of keys: the override syntax of Hydra scripts, and making a value fit the declared type of its key."""

import math
import os
import re
import types
import typing
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

from verl.errors import ConfigError
from verl.foreign_text import clean, quoted, valid_utf8

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
        if option is not type(None) and type(value) is (typing.get_origin(option) or option):
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


def _convert_one(value: object, option: object, text: str | None) -> object:
    origin = typing.get_origin(option) or option
    if origin is list:
        (inner,) = typing.get_args(option) or (Any,)
        if isinstance(value, str) and inner is not str and value[:1] + value[-1:] == "[]":  # a list in quotes
            value = parse_value(value, value)
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


# builder of a data set, path, object of a Python file or split of a data set
_REFERENCE = re.compile(r"((?:stream:)?(?:(?:json|parquet|arrow|csv|text):)?)(.*?)((?:[:@].*)?)", re.DOTALL)
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


def absolute_path(value: Any, is_here: Callable[[str], bool]) -> Any:
    """A name of a file or folder, or a list of them, from the root if `is_here` holds for it. Other texts name modules, and
    models and data sets of the hub."""
    if isinstance(value, list | tuple):
        return [absolute_path(entry, is_here) for entry in value]
    if isinstance(value, dict):
        return {name: absolute_path(entry, is_here) if name == "path" else entry for name, entry in value.items()}
    if not value or not _is_path(value) or value.startswith("~") or "://" in value:
        return value
    match = None if is_here(value) else _REFERENCE.fullmatch(value)
    before, path, after = match.groups("") if match else ("", value, "")
    named = os.path.dirname(path) or "." if before else path  # a builder reads a pattern
    return f"{before}{os.path.abspath(path)}{after}" if is_here(named) else value


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


def nested(values: Mapping[str, object], section: type[dict[str, Any]] = dict) -> dict[str, Any]:
    """The tree of values by their dotted keys, with a `section` for each mapping."""
    root: dict[str, Any] = {}
    for path, value in values.items():
        *parents, name = path.split(".")
        node = root
        for parent in parents:
            node = node.setdefault(parent, section())
        node[name] = value
    return root


def merge(base: object, update: object) -> object:
    """`update` over `base`; mappings are merged key by key, everything else is replaced."""
    if isinstance(base, dict) and isinstance(update, dict):
        return {**base, **{k: merge(base.get(k), v) for k, v in update.items()}}
    return update


_OVERRIDE = re.compile(r"^(?P<mark>\+\+|\+|~)?(?P<key>[^=\s]+|[^=]+(?==))(?:=(?P<value>.*))?$", re.DOTALL)
_INT = re.compile(r"^[+-]?\d+$")
_FLOAT = re.compile(r"^[+-]?(\d+\.?\d*|\.\d+)([eE][+-]?\d+)?$")
_MAX_DIGITS = 400  # a longer number is beyond the range of every key
_WORDS = {"null": None, "none": None, "true": True, "false": False}
_JINJA = ("{%", "{{", "{#")  # a chat template, and never a mapping
_CLOSING = {"[": "]", "{": "}", "(": ")"}


@dataclass(frozen=True)
class Override:
    key: str
    value: Any
    text: str | None  # the value as written when it is a plain unquoted word, for keys that hold text
    delete: bool = False


def parse_override(argument: str) -> Override:
    """One command-line argument as an Override. Raises ConfigError when it is not of that form."""
    match = _OVERRIDE.match(argument.strip())
    # one dash before a key is a typo: its unknown name will show that; two make an option
    if match is None or argument.startswith("--") or (argument.startswith("-") and "=" not in argument):
        raise ConfigError(
            f"The argument {quoted(argument)} is not of the form key=value. Write for example trainer.total_epochs=1."
        )
    mark, key, value = match["mark"], match["key"], match["value"]
    argument = clean(argument)
    if mark == "~":
        return Override(key, None, None, delete=True)
    if value is None and key.endswith((".yaml", ".yml")):
        raise ConfigError(f"The argument {argument!r} is a YAML file. Give it with --config-path {argument}.")
    if value is None:
        raise ConfigError(f"The argument {argument!r} has no value. Write {key}=VALUE, or {key}=null for none.")
    value = value.strip()
    plain = value[:1] not in ("'", '"', "[", "{")
    return Override(key, parse_value(value, argument), value if plain else None)


def escape_references(value: object) -> object:
    """A resolved value as a reader resolves it to the same: a `${` that is left is text."""
    if isinstance(value, str):
        return re.sub(r"(\\*)\$\{", r"\1\1\\${", value)
    if isinstance(value, dict):
        return {escape_references(k): escape_references(v) for k, v in value.items()}
    return [escape_references(v) for v in value] if isinstance(value, list | tuple) else value


def written(text: str, *, is_path: bool = False) -> str:
    """The value of an override that stands for this very text, whatever characters it has."""
    text = str(escape_references(escape_path(text) if is_path else text))
    return "'" + re.sub(r"(['\\])", r"\\\1", text) + "'"


def parse_value(text: str, place: str) -> object:
    """The value that `text` stands for; a word that is nothing else is a string. `place` is named in errors."""
    text = text.strip()
    if text[:1] in ("'", '"') and len(text) >= 2 and _end_of_quote(text, 0) == len(text) - 1:
        return re.sub(r"\\(['\"\\])", r"\1", text[1:-1])
    if text.startswith("["):
        return [parse_value(part, place) for part in _split(_inside(text, place), ",", place)]
    if text.startswith(_JINJA):
        return text
    if text.startswith("{"):
        return dict(_entry(part, place) for part in _split(_inside(text, place), ",", place))
    return _word(text)


def _word(text: str) -> object:
    if text.lower() in _WORDS:
        return _WORDS[text.lower()]
    if _INT.match(text) and len(text) < _MAX_DIGITS:
        return int(text)
    if _FLOAT.match(text):
        return float(text)
    if text.lower().lstrip("+-") in ("inf", ".inf", "nan", ".nan"):
        return float(text.replace(".", ""))
    return text


def _entry(part: str, place: str) -> tuple[object, object]:
    parts = _split(part, ":", place, limit=1)
    if len(parts) != 2:
        raise ConfigError(f"In {place!r}, the entry {part.strip()!r} is not of the form name:value.")
    name = parse_value(parts[0], place)
    return str(name), parse_value(parts[1], place)


def _inside(text: str, place: str) -> str:
    if not text.endswith(_CLOSING[text[0]]):
        raise ConfigError(
            f"In {place!r}, the bracket '{text[0]}' is not closed. Quote the whole argument for the shell."
        )
    return text[1:-1]


def _end_of_quote(text: str, start: int) -> int:
    """Index of the quote that closes the one at `start`, or -1."""
    position = start + 1
    while position < len(text):
        if text[position] == "\\":
            position += 1
        elif text[position] == text[start]:
            return position
        position += 1
    return -1


def _split(text: str, separator: str, place: str, limit: int = -1) -> list[str]:
    """`text` cut at separators outside of quotes and brackets; empty text gives no parts."""
    parts: list[str] = []
    expected: list[str] = []
    start = position = 0
    while position < len(text):
        char = text[position]
        if char in "'\"":
            position = _end_of_quote(text, position)
            if position < 0:
                raise ConfigError(f"In {place!r}, a quotation mark is not closed.")
        elif char in _CLOSING:
            expected.append(_CLOSING[char])
            if len(expected) > MAX_DEPTH:
                raise ConfigError(f"In {place!r}, brackets are nested more than {MAX_DEPTH} deep.")
        elif expected and char == expected[-1]:
            expected.pop()
        elif char in "]})":
            raise ConfigError(f"In {place!r}, the bracket '{char}' closes nothing.")
        elif char == separator and not expected and limit != len(parts):
            parts.append(text[start:position])
            start = position + 1
        position += 1
    if expected:
        raise ConfigError(f"In {place!r}, a bracket is not closed with '{expected[-1]}'.")
    last = text[start:]
    return [*parts, last] if last.strip() or (parts and separator == ":") else parts
