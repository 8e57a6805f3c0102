"""The override syntax of Hydra scripts: `a.b=v`, `+a.b=v`, `++a.b=v`, `~a.b`, with lists, mappings, quotes and null."""

from __future__ import annotations

import re
from dataclasses import dataclass
from typing import Any

from verl.config.values import MAX_DEPTH
from verl.errors import ConfigError
from verl.foreign_text import clean, quoted

_OVERRIDE = re.compile(r"^(?P<mark>\+\+|\+|~)?(?P<key>[^=\s]+|[^=]+(?==))(?:=(?P<value>.*))?$", re.DOTALL)
_INT = re.compile(r"^[+-]?\d+$")
_FLOAT = re.compile(r"^[+-]?(\d+\.?\d*|\.\d+)([eE][+-]?\d+)?$")
_MAX_DIGITS = 400  # a longer number is beyond the range of every key
_WORDS = {"null": None, "none": None, "true": True, "false": False}
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
    # one dash before a key is a typo, which its unknown name will show; two make an option
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


def parse_value(text: str, place: str) -> object:
    """The value that `text` stands for; a word that is nothing else is a string. `place` is named in errors."""
    text = text.strip()
    if text[:1] in ("'", '"') and len(text) >= 2 and _end_of_quote(text, 0) == len(text) - 1:
        return re.sub(r"\\(['\"\\])", r"\1", text[1:-1])
    if text.startswith("["):
        return [parse_value(part, place) for part in _split(_inside(text, place), ",", place)]
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
