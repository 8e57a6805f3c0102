"""Type hints and JSON schemas of a tool's arguments: schemas of classes, and arguments as values that schema and hint name."""

import dataclasses
import enum
import json
import types
import typing
from collections.abc import Callable, Mapping

from verl.foreign_text import quoted

Hint = typing.Any  # a type hint has no common type
Json = typing.Any  # a value of JSON
_TYPES = {str: "string", int: "integer", float: "number", bool: "boolean", list: "array", dict: "object"}
_MAX_DEPTH = 8  # of classes inside each other; a class may hold itself


def hints_of(function: Callable[..., object]) -> dict[str, Json]:
    """The type hints of a function; {} if a name in them cannot be found."""
    try:
        return typing.get_type_hints(function)
    except (NameError, TypeError):
        return {}


def describe_classes(properties: dict[str, Json], hints: Mapping[str, object]) -> None:
    """Give an argument the schema of its hint, if the hint holds an Enum, a TypedDict or a dataclass."""
    for name in properties.keys() & hints.keys():
        if _holds_class(hints[name]):
            properties[name] = {**properties[name], **_schema_of(hints[name])}


def as_hinted(value: Json, hint: Hint) -> Json:
    """A value of JSON as the hint says: a member of an Enum, an object of a dataclass, also inside of lists and objects."""
    parts = typing.get_args(hint)
    if value is None or not _holds_class(hint):
        return value
    if isinstance(hint, type) and issubclass(hint, enum.Enum):
        return hint(value)
    if fields := _fields(hint):
        values = {name: as_hinted(part, fields.get(name)) for name, part in value.items()}
        return hint(**values)
    if typing.get_origin(hint) in (typing.Union, types.UnionType):
        fitting = [part for part in parts if _fits(value, _schema_of(part))]
        return as_hinted(value, fitting[0]) if fitting else value
    if isinstance(value, list):
        return [as_hinted(part, parts[0]) for part in value]
    return {name: as_hinted(part, parts[1]) for name, part in value.items()}


def fitted(value: Json, schema: Json, name: str) -> Json:
    """The argument `name` as its schema says. The text of a number, truth value, list or object becomes one, and a number or
    truth value becomes its text if the schema has a text. Raises ValueError for any other value."""
    if not isinstance(schema, Mapping):
        return value
    if options := schema.get("anyOf") or schema.get("oneOf"):
        fitting = [option for option in options if _fits(value, option)]
        if not fitting and not (value is None and schema.get("nullable")):
            raise ValueError(f"the argument {name!r} is {quoted(value, 60)}, which no schema of it allows")
        return fitted(value, fitting[0], name) if fitting else value
    kinds = schema.get("type") or []
    kinds = [kinds] if isinstance(kinds, str) else list(kinds)
    if value is None and (not kinds or schema.get("nullable") or "null" in kinds):
        return value
    if kinds and not any(_is(value, kind) for kind in kinds):
        read = next((new for kind in kinds if _is(new := _read(value, kind), kind)), None)
        if read is None:
            raise ValueError(f"the argument {name!r} is {quoted(value, 60)}, not of type {' or '.join(kinds)}")
        value = read
    choices = schema.get("enum")
    if isinstance(choices, list) and value not in choices:
        raise ValueError(f"the argument {name!r} is {quoted(value, 60)}; it can be {quoted(choices, 120)}")
    if isinstance(value, list):
        return [fitted(part, schema.get("items"), f"{name}[{number}]") for number, part in enumerate(value)]
    return fitted_object(value, schema, f"{name}.") if isinstance(value, dict) else value


def fitted_object(values: dict[str, Json], schema: Mapping[str, Json], prefix: str = "") -> dict[str, Json]:
    """`fitted` of each field. Raises ValueError also for a required field that is missing."""
    required, properties = schema.get("required") or [], schema.get("properties") or {}
    if missing := [name for name in required if name not in values]:
        raise ValueError(f"the argument {prefix + missing[0]!r} is missing")
    additional = schema.get("additionalProperties")
    return {
        name: value
        if value is None and name not in required
        else fitted(value, properties.get(name, additional), prefix + name)
        for name, value in values.items()
    }


def _fits(value: object, schema: object) -> bool:
    try:
        fitted(value, schema, "")
    except ValueError:
        return False
    return True


def _is(value: object, kind: str) -> bool:
    if kind == "null":
        return value is None
    if kind == "number":
        return isinstance(value, int | float) and not isinstance(value, bool)
    cls = next((cls for cls, name in _TYPES.items() if name == kind), object)
    return isinstance(value, cls) and (kind == "boolean" or cls is object or not isinstance(value, bool))


def _read(value: Json, kind: str) -> object:
    """A value as another kind; the value itself if it is none."""
    if kind == "string":
        return json.dumps(value) if isinstance(value, bool | int | float) else value
    if kind == "integer" and isinstance(value, float) and value.is_integer():
        return int(value)
    if not isinstance(value, str):
        return value
    try:
        read = json.loads(value.lower() if kind == "boolean" else value)
    except (ValueError, RecursionError):
        return value
    return _read(read, kind) if isinstance(read, float) else read


def _holds_class(hint: object) -> bool:
    is_class = isinstance(hint, type) and issubclass(hint, enum.Enum)
    return is_class or bool(_fields(hint)) or any(map(_holds_class, typing.get_args(hint)))


def _fields(hint: Hint) -> dict[str, Json]:
    """Hints of the fields of a dataclass or a TypedDict; {} for anything else."""
    return (
        hints_of(hint)
        if isinstance(hint, type) and (dataclasses.is_dataclass(hint) or typing.is_typeddict(hint))
        else {}
    )


def _schema_of(hint: Hint, depth: int = 0) -> dict[str, Json]:
    parts, origin = typing.get_args(hint), typing.get_origin(hint) or hint
    if isinstance(hint, type) and issubclass(hint, enum.Enum):
        return _choices([member.value for member in hint])
    if origin is typing.Literal:
        return _choices(list(parts))
    if depth < _MAX_DEPTH and (fields := _fields(hint)):
        properties = {name: _schema_of(field, depth + 1) for name, field in fields.items()}
        return {"type": "object", "properties": properties, "required": _required(hint)}
    if origin in (typing.Union, types.UnionType):
        options = [_schema_of(part, depth) for part in parts if part is not types.NoneType]
        schema = options[0] if len(options) == 1 else {"anyOf": options}
        return {**schema, "nullable": True} if types.NoneType in parts else schema
    if origin in (list, set, tuple) and parts:
        return {"type": "array", "items": _schema_of(parts[0], depth)}
    if origin is dict and len(parts) == 2:
        return {"type": "object", "additionalProperties": _schema_of(parts[1], depth)}
    return {} if origin is typing.Any else {"type": _TYPES.get(typing.cast("type", origin), "object")}


def _required(cls: Hint) -> list[str]:
    if typing.is_typeddict(cls):
        return sorted(cls.__required_keys__)
    nothing = dataclasses.MISSING
    return [f.name for f in dataclasses.fields(cls) if f.default is nothing and f.default_factory is nothing]


def _choices(values: list[Json]) -> dict[str, Json]:
    kinds = sorted({_TYPES.get(type(value), "string") for value in values})
    return {"type": kinds[0] if len(kinds) == 1 else kinds, "enum": values}
