"""Tools from plain functions: `@function_tool` in the file that multi_turn.function_tool_path names (docs/agents.md)."""

from __future__ import annotations

import asyncio
import functools
import inspect
import json
import re
from collections.abc import Awaitable, Callable
from typing import Any, cast

from verl.errors import ConfigError
from verl.tools.base_tool import BaseTool
from verl.tools.hints import as_hinted, describe_classes, hints_of
from verl.tools.schemas import OpenAIFunctionToolSchema, ToolResponse

MARK = "__verl_tool__"
Answer = tuple[ToolResponse, float, dict[str, object]]
FUNCTION_TOOL_REGISTRY: dict[str, FunctionTool] = {}  # the last marked function of each name
_PLAIN = (dict, list, tuple, int, float, type(None))


class ToolConfigError(ConfigError, ValueError):
    """A function cannot be a tool."""


def function_tool(function: Any = None, /, *, name: str | None = None, schema: object = None) -> Any:
    """Mark a function as a tool: `@function_tool`, `@function_tool("name")` or `@function_tool("name", schema={...})`. Without
    a schema its type hints and its docstring with `Args:` make one."""
    if isinstance(function, str) or function is None:
        tool_name = function if isinstance(function, str) else name

        def mark(wrapped: Callable[..., object]) -> Callable[..., Any]:
            return cast("Callable[..., Any]", function_tool(wrapped, name=tool_name, schema=schema))

        return mark
    tool = FunctionTool(function, name, schema)
    _require_described(tool, has_schema=schema is not None)
    before = FUNCTION_TOOL_REGISTRY.get(tool.name)
    if before is not None and _is_other_of_module(function, before.function):
        raise ToolConfigError(
            f"The tool {tool.name!r} is already registered for another function of this file. Rename one."
        )
    FUNCTION_TOOL_REGISTRY[tool.name] = tool
    setattr(function, MARK, tool)
    return function


def _is_other_of_module(function: object, before: object) -> bool:
    """Whether a module has two functions for one tool; a cell of a notebook that runs again defines the same one."""
    module, other = ((getattr(f, "__module__", None), getattr(f, "__qualname__", str(f))) for f in (function, before))
    return module[0] == other[0] and module[1] != other[1]


def _require_fixed(name: str, signature: inspect.Signature) -> None:
    """Raise ToolConfigError for `*args` and `**kwargs`."""
    for parameter in signature.parameters.values():
        if parameter.kind in (parameter.VAR_POSITIONAL, parameter.VAR_KEYWORD):
            raise ToolConfigError(
                f"The tool {name} has the variadic parameter {parameter}, which no schema can describe; name its arguments."
            )


def _require_described(tool: FunctionTool, *, has_schema: bool) -> None:
    """Raise ToolConfigError for a function whose schema cannot be made. (transformers, which makes it, imports slowly.)"""
    _require_fixed(tool.name, tool.signature)
    if has_schema:
        return
    label, parameters = f"The tool {tool.name}", tool.signature.parameters.values()
    text = inspect.getdoc(tool.function)
    fix = "Describe it, or pass schema= to function_tool."
    if not text:
        raise ToolConfigError(f"{label} has no docstring, from which the model reads what it does. {fix}")
    for parameter in parameters:
        if parameter.annotation is parameter.empty and parameter.name in ("self", "cls"):
            raise ToolConfigError(f"{label} is a method, and no call has its object. Mark a function.")
        if parameter.annotation is parameter.empty:
            raise ToolConfigError(f"{label} is missing a type hint for {parameter.name}. {fix}")
        if not re.search(rf"^\s*{parameter.name}\s*(\(.*?\))?\s*:", text, re.MULTILINE):
            raise ToolConfigError(f"{label} has no description for the argument {parameter.name} under Args:. {fix}")


class FunctionTool(BaseTool):
    """A function as a tool. `path` is the file that it was loaded from, so that a sandboxed process can load it too."""

    def __init__(self, function: Callable[..., object], name: str | None = None, schema: object = None):
        self.function, self.config, self._schema = function, {}, schema
        self.path: str | None = None
        self._given_name = name
        self.name: str = name or str(getattr(function, "__name__", type(function).__name__))
        self.signature = inspect.signature(function)

    @functools.cached_property
    def tool_schema(self) -> OpenAIFunctionToolSchema:  # type: ignore[override]
        """Made when it is first read: a sandboxed process calls the function without it, and starts faster."""
        schema = function_schema(self.function, self._given_name, self._schema)
        self.name = schema.function.name
        return schema

    def values(self, arguments: dict[str, Any]) -> dict[str, Any]:
        """The arguments of a call as the hints of the function say."""
        hints = hints_of(self.function)
        return {name: as_hinted(value, hints.get(name)) for name, value in arguments.items()}

    @property
    def fn(self) -> Callable[..., object]:
        return self.function

    @property
    def is_async(self) -> bool:
        return inspect.iscoroutinefunction(self.function)

    async def call(self, arguments: dict[str, object]) -> object:
        """The value that the function returns; a plain one runs on a thread."""
        values = self.values(arguments)
        returned = self.function(**values) if self.is_async else asyncio.to_thread(self.function, **values)
        return await cast("Awaitable[object]", returned)

    async def execute(self, instance_id: str, parameters: dict[str, object], **kwargs: object) -> Answer:
        returned = self.function(**self.values(parameters))
        return answer_of(await returned if inspect.isawaitable(returned) else returned)


def function_schema(
    function: Callable[..., object], name: str | None = None, schema: object = None
) -> OpenAIFunctionToolSchema:
    """The schema of a function. Raises ConfigError if its arguments cannot be described."""
    label = name or getattr(function, "__name__", str(function))
    _require_fixed(str(label), inspect.signature(function))
    if schema is None:
        from transformers.utils import get_json_schema

        try:
            schema = get_json_schema(function)
            describe_classes(schema["function"]["parameters"]["properties"], hints_of(function))
        except Exception as error:  # its own exception types, and any of an odd annotation
            raise ConfigError(
                f"The tool {label} has no usable signature: {error}. Give each argument a type hint and a line under Args: in "
                "the docstring, or pass schema= to function_tool."
            ) from error
    try:
        validated = OpenAIFunctionToolSchema.model_validate(schema)
    except ValueError as error:
        raise ConfigError(f"The schema of the tool {label} cannot be used: {error}") from error
    if name is not None:
        validated.function.name = name
    return validated


def answer_of(answer: object) -> Answer:
    """The result of a function as (answer, reward, metrics): a text, a picture, an object, a ToolResponse, or one of them with
    a reward and metrics. Raises ValueError for a reward or metrics of another type."""
    reward: object = 0.0
    metrics: object = {}
    if isinstance(answer, tuple):
        if not 1 <= len(answer) <= 3:
            raise ValueError(f"it returned {len(answer)} values; return the answer, the reward and metrics")
        reward = answer[1] if len(answer) > 1 and answer[1] is not None else 0.0
        metrics = answer[2] if len(answer) > 2 and answer[2] is not None else {}
        answer = answer[0]
    reward = reward.tolist() if hasattr(reward, "tolist") else reward  # of numpy and torch
    if not isinstance(reward, int | float) or not isinstance(metrics, dict):
        raise ValueError("its second value must be a number, the reward, and its third a dict of metrics")
    if hasattr(answer, "convert"):  # a picture of PIL
        answer = ToolResponse(image=[answer])
    if not isinstance(answer, ToolResponse):
        text = json.dumps(answer, ensure_ascii=False, default=str) if isinstance(answer, _PLAIN) else str(answer)
        answer = ToolResponse(text=text)
    return answer, float(reward), metrics
