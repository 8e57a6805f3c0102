"""A tool of an MCP server. Subclass it to read results in another way: `_parse_tool_result`."""

from typing import Any

from verl.tools.base_tool import BaseTool
from verl.tools.mcp_client import ToolServer
from verl.tools.schemas import OpenAIFunctionToolSchema, ToolResponse


class MCPBaseTool(BaseTool):
    """One tool of `server`. `config` has `timeout`, seconds of a call (30)."""

    server: ToolServer

    def __init__(self, config: dict[str, Any], tool_schema: OpenAIFunctionToolSchema | None = None):
        super().__init__(config, tool_schema)
        self.timeout = float(config.get("timeout", 30))

    async def execute(
        self, instance_id: str, parameters: dict[str, object], **kwargs: object
    ) -> tuple[ToolResponse, float, dict[str, Any]]:
        """See BaseTool. Raises RuntimeError with the server's words when it answers with an error."""
        result = await self.server.call(self.name, parameters, self.timeout)
        text, metrics = self._parse_tool_result(result["content"])
        if result.get("isError"):
            raise RuntimeError(text)
        return ToolResponse(text=text), 0.0, metrics

    def _parse_tool_result(self, content: list[dict[str, object]]) -> tuple[str, dict[str, object]]:
        """(answer, metrics) of the protocol's content blocks."""
        return " ".join(str(part["text"]) for part in content if part.get("type") == "text"), {}
