"""Names of the existing verl's agent loops that have no counterpart: here each rank's rollout worker runs its episodes."""

from __future__ import annotations

from typing import Any

from verl.errors import ConfigError
from verl.tools.tool_registry import load_class


class _NoManager:
    def __init__(self, *args: Any, **kwargs: Any):
        raise ConfigError(
            f"{type(self).__name__} is not used in this version: the rollout worker of each rank runs its episodes. Subclass "
            "AgentLoopBase and declare it in rollout.agent.agent_loop_config_path, or set rollout.agent.runner."
        )


class AgentLoopManager(_NoManager):
    """See _NoManager."""


class AgentLoopWorker(_NoManager):
    """See _NoManager."""


async def get_trajectory_info(step: int, index: list[Any], validate: bool) -> list[dict[str, Any]]:
    """For each row: step, sample index, number among the rows of its index, and whether it validates."""
    numbers: dict[Any, int] = {}
    rows = []
    for value in index:
        numbers[value] = numbers.get(value, -1) + 1
        rows.append({"step": step, "sample_index": value, "rollout_n": numbers[value], "validate": validate})
    return rows


def get_tool_class(cls_name: str) -> type[Any]:
    """The class `package.module.Class`. Raises ConfigError."""
    return load_class(cls_name, "get_tool_class")  # type: ignore[no-any-return]


def get_interaction_class(cls_name: str) -> type[Any]:
    """The class `package.module.Class`. Raises ConfigError."""
    return load_class(cls_name, "get_interaction_class")  # type: ignore[no-any-return]
