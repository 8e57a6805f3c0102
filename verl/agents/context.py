"""Parts of a run that its agent loops use."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, TypeAlias

if TYPE_CHECKING:
    from verl.agents.continuity import ChatContinuity
    from verl.agents.gateway.app import Gateway
    from verl.agents.interactions import BaseInteraction
    from verl.agents.matches import Matches
    from verl.agents.tool_calls import ToolCalls
    from verl.rewards.sandbox.limits import Limits
    from verl.specs import AgentSpec

Runner: TypeAlias = "Callable[..., Any] | list[str]"  # a function of the user's, or the words of a command


@dataclass(frozen=True)
class AgentContext:
    """The parts that all episodes of a rank share; `environments` and `interactions` by name. `gateway` and `runner` are set
    where agents talk to an endpoint, `limits` where such an agent is a command."""

    spec: AgentSpec
    continuity: ChatContinuity
    tool_calls: ToolCalls
    stop_token_ids: frozenset[int]
    matches: Matches
    environments: dict[str, Callable[..., object]]
    interactions: dict[str, BaseInteraction]
    gateway: Gateway | None
    runner: Runner | None
    limits: Limits | None
