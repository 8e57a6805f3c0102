"""Our side of agents_peers.py: turns of a fixed number of tokens, each of which is a call of the tool."""

from __future__ import annotations

import json
from typing import Any

from agents_task import ARGUMENTS, TOOL, TURN_TOKENS, Library, setting

from verl.agents.environments import EnvironmentAgentLoop
from verl.agents.parsers import ToolParser
from verl.tools.schemas import FunctionCall

__all__ = ["EveryTurn", "FixedTurns", "Library"]


@ToolParser.register("every_turn_of_a_benchmark")
class EveryTurn(ToolParser):
    """Every turn is one call."""

    def parse(self, text: str, tools: Any) -> tuple[str, list[FunctionCall]]:
        return text, [FunctionCall(TOOL, json.dumps(ARGUMENTS))]


class FixedTurns(EnvironmentAgentLoop):
    """The loop of environments, each turn of so many tokens."""

    async def run(self, sampling_params: dict[str, Any], **kwargs: Any) -> Any:
        return await super().run({**sampling_params, "max_tokens": int(setting(TURN_TOKENS))}, **kwargs)
