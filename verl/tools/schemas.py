"""Records of tools: the JSON schema that the model reads, a call that it made, and the answer of a tool.

Fields and methods match the existing verl's pydantic models, so that tools written for it run.
"""

from __future__ import annotations

import dataclasses
import json
from dataclasses import dataclass, field
from typing import Any, TypeVar

from verl.foreign_text import clean

R = TypeVar("R", bound="Record")
MAX_NAME = 100  # characters of a tool's name that a message repeats


class Record:
    """A dataclass that reads and writes plain objects."""

    @classmethod
    def model_validate(cls: type[R], values: object) -> R:
        """The record of an object; fields that it does not know are left out. Raises ValueError for anything else."""
        if isinstance(values, cls):
            return values
        if not isinstance(values, dict):
            raise ValueError(f"{cls.__name__} must be an object, not a {type(values).__name__}.")
        names = {f.name for f in dataclasses.fields(cls)}  # type: ignore[arg-type]
        try:
            return cls(**{name: value for name, value in values.items() if name in names})
        except TypeError as error:
            raise ValueError(f"{cls.__name__}: {error}") from error

    def model_dump(self, *, exclude_none: bool = False, exclude_unset: bool = False, **_: object) -> dict[str, Any]:
        """As an object. `exclude_unset` also leaves out None, since the fields that were set are not recorded."""
        values: dict[str, Any] = dataclasses.asdict(self)  # type: ignore[call-overload]
        return dict(_without_none(values)) if exclude_none or exclude_unset else values

    def model_dump_json(self, **settings: Any) -> str:
        return json.dumps(self.model_dump(**settings), ensure_ascii=False)


def _without_none(value: object) -> Any:
    if isinstance(value, dict):
        return {name: _without_none(inner) for name, inner in value.items() if inner is not None}
    return [_without_none(inner) for inner in value] if isinstance(value, list) else value


@dataclass
class OpenAIFunctionPropertySchema(Record):
    """One argument. Anything else that a JSON schema may hold is kept in `more`."""

    type: str | list[str] | None = None
    description: str | None = None
    enum: list[Any] | None = None


@dataclass
class OpenAIFunctionParametersSchema(Record):
    """The arguments of a function as a JSON schema; `properties` holds the schema of each argument as it was written."""

    type: str = "object"
    properties: dict[str, Any] = field(default_factory=dict)
    required: list[str] = field(default_factory=list)


@dataclass
class OpenAIFunctionSchema(Record):
    """Name, description and arguments of a function."""

    name: str
    description: str = ""
    parameters: OpenAIFunctionParametersSchema = field(default_factory=OpenAIFunctionParametersSchema)
    strict: bool = False

    def __post_init__(self) -> None:
        if self.parameters is None or isinstance(self.parameters, dict):
            self.parameters = OpenAIFunctionParametersSchema.model_validate(self.parameters or {})


@dataclass
class OpenAIFunctionToolSchema(Record):
    """A tool as chat templates and OpenAI's service know it: {"type": "function", "function": {...}}."""

    type: str = "function"
    function: OpenAIFunctionSchema = field(default_factory=lambda: OpenAIFunctionSchema(""))

    def __post_init__(self) -> None:
        if isinstance(self.function, dict):
            self.function = OpenAIFunctionSchema.model_validate(self.function)

    def for_template(self) -> dict[str, Any]:
        """The object that a chat template reads."""
        function = self.function
        return {
            "type": self.type,
            "function": {
                "name": function.name,
                "description": function.description,
                "parameters": function.parameters.model_dump(exclude_none=True),
            },
        }


def text_tool(name: str, description: str, argument: str, what: str, **more: object) -> OpenAIFunctionToolSchema:
    """The schema of a tool that takes one argument, a text unless `more` says another type."""
    parameters = {"properties": {argument: {"type": "string", "description": what, **more}}, "required": [argument]}
    return OpenAIFunctionToolSchema.model_validate(
        {"function": {"name": name, "description": description, "parameters": parameters}}
    )


@dataclass
class OpenAIFunctionParsedSchema(Record):
    """A call with its arguments as JSON text."""

    name: str
    arguments: str


@dataclass
class OpenAIFunctionCallSchema(Record):
    """A call with its arguments as an object."""

    name: str
    arguments: dict[str, Any] = field(default_factory=dict)

    @staticmethod
    def from_openai_function_parsed_schema(
        parsed_schema: OpenAIFunctionParsedSchema,
    ) -> tuple[OpenAIFunctionCallSchema, bool]:
        """(the call, whether its text was no JSON object: then it has no arguments)."""
        try:
            arguments = FunctionCall(parsed_schema.name, parsed_schema.arguments).parsed()
        except (ValueError, RecursionError):
            return OpenAIFunctionCallSchema(parsed_schema.name), True
        return OpenAIFunctionCallSchema(parsed_schema.name, arguments), False


@dataclass
class OpenAIFunctionToolCall(Record):
    """A call in a message of OpenAI's."""

    id: str
    type: str = "function"
    function: OpenAIFunctionCallSchema = field(default_factory=lambda: OpenAIFunctionCallSchema(""))

    def __post_init__(self) -> None:
        if isinstance(self.function, dict):
            self.function = OpenAIFunctionCallSchema.model_validate(self.function)


@dataclass
class FunctionCall(Record):
    """A call as the model wrote it. `arguments` is JSON text, perhaps wrong; `id` is set by formats that have ids. A call
    that could not be read has `error`, the sentence for the model, and its text as `arguments`."""

    name: str
    arguments: str
    id: str | None = None
    error: str | None = None

    def in_message(self) -> dict[str, Any]:
        """The call in a message of OpenAI's."""
        function = {"type": "function", "function": {"name": self.name, "arguments": self.arguments}}
        return {"id": self.id, **function} if self.id else function

    def fault(self) -> str | None:
        """The reason why the call cannot be read, for the model."""
        try:
            self.parsed()
        except (ValueError, RecursionError) as error:
            return self.error or f"Invalid JSON in arguments for '{clean(self.name, MAX_NAME)}': {clean(error, 200)}"
        return self.error

    def parsed(self) -> dict[str, Any]:
        """The arguments. Raises ValueError with the reason when they are not a JSON object."""
        arguments = json.loads(self.arguments) if self.arguments.strip() else {}
        if not isinstance(arguments, dict):
            raise ValueError(f"they are a {type(arguments).__name__}, not an object")
        return arguments


@dataclass
class ToolResponse(Record):
    """The answer of a tool: a text, and images and videos as in rows of data."""

    text: str | None = None
    image: list[Any] | None = None
    video: list[Any] | None = None

    def is_empty(self) -> bool:
        return not (self.text or self.image or self.video)

    def is_text_only(self) -> bool:
        return bool(self.text) and not (self.image or self.video)
