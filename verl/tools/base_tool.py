"""Base class of tools: create an instance for an episode, execute calls, release it."""

from typing import Any
from uuid import uuid4

from verl.tools.schemas import OpenAIFunctionToolSchema, ToolResponse


class BaseTool:
    """A user's tool. `config` is its section of the YAML file; `tool_schema` is the part that the model reads. One object
    serves all episodes at the same time: keep the state of an episode by its `instance_id`. Methods may be plain functions,
    and then run in a thread."""

    def __init__(self, config: dict[str, Any], tool_schema: OpenAIFunctionToolSchema | None = None):
        self.config = config
        schema = tool_schema if tool_schema is not None else self.get_openai_tool_schema()
        if schema is None:
            raise ValueError(f"{type(self).__name__} has no schema: give tool_schema in the YAML file.")
        self.tool_schema = OpenAIFunctionToolSchema.model_validate(schema)
        self.name = self.tool_schema.function.name

    def get_openai_tool_schema(self) -> OpenAIFunctionToolSchema:
        """The part of this tool that the model reads."""
        return getattr(self, "tool_schema", None)  # type: ignore[return-value]

    async def create(self, instance_id: str | None = None, **kwargs: Any) -> tuple[str, ToolResponse]:
        """Begin an episode: (id of its instance, an answer that is not used). kwargs has create_kwargs of the row."""
        return instance_id or str(uuid4()), ToolResponse()

    async def execute(
        self, instance_id: str, parameters: dict[str, Any], **kwargs: object
    ) -> tuple[ToolResponse, float, dict[str, Any]]:
        """(answer, reward of the call, metrics). kwargs has agent_data, and execute_kwargs of the row."""
        return ToolResponse(text="Updated the tool state."), 0.0, {}

    async def calc_reward(self, instance_id: str, **kwargs: object) -> float:
        """The reward of the state that the episode has reached."""
        return 0.0

    async def release(self, instance_id: str, **kwargs: object) -> None:
        """End of the episode."""
