"""Tools from plain functions: `@function_tool` in the file that multi_turn.function_tool_path names (docs/agents.md)."""

from __future__ import annotations

import functools
import inspect
import json
from collections.abc import Callable
from typing import Any, cast

from verl.errors import ConfigError
from verl.tools.base_tool import BaseTool
from verl.tools.hints import as_hinted, describe_classes, hints_of
from verl.tools.schemas import OpenAIFunctionToolSchema, ToolResponse

MARK = "__verl_tool__"
Answer = tuple[ToolResponse, float, dict[str, object]]


def function_tool(function: Any = None, /, *, name: str | None = None, schema: object = None) -> Any:
    """Mark a function as a tool: `@function_tool`, `@function_tool("name")` or `@function_tool("name", schema={...})`. Without
    a schema its type hints and its docstring with `Args:` make one."""
    if isinstance(function, str) or function is None:
        tool_name = function if isinstance(function, str) else name

        def mark(wrapped: Callable[..., object]) -> Callable[..., Any]:
            return cast("Callable[..., Any]", function_tool(wrapped, name=tool_name, schema=schema))

        return mark
    setattr(function, MARK, FunctionTool(function, name, schema))
    return function


class FunctionTool(BaseTool):
    """A function as a tool. `path` is the file that it was loaded from, so that a sandboxed process can load it too."""

    def __init__(self, function: Callable[..., object], name: str | None = None, schema: object = None):
        self.function, self.config, self._schema = function, {}, schema
        self.path: str | None = None
        self._given_name = name
        self.name: str = name or str(getattr(function, "__name__", function))
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

    async def execute(self, instance_id: str, parameters: dict[str, object], **kwargs: object) -> Answer:
        returned = self.function(**self.values(parameters))
        return answer_of(await returned if inspect.isawaitable(returned) else returned)


def function_schema(
    function: Callable[..., object], name: str | None = None, schema: object = None
) -> OpenAIFunctionToolSchema:
    """The schema of a function. Raises ConfigError if its arguments cannot be described."""
    label = name or getattr(function, "__name__", str(function))
    kinds = [p.kind for p in inspect.signature(function).parameters.values()]
    if inspect.Parameter.VAR_POSITIONAL in kinds or inspect.Parameter.VAR_KEYWORD in kinds:
        raise ConfigError(
            f"The tool {label} takes *args or **kwargs, which no schema can describe; name its arguments."
        )
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
        text = answer if isinstance(answer, str) else json.dumps(answer, ensure_ascii=False, default=str)
        answer = ToolResponse(text=text)
    return answer, float(reward), metrics
