"""`actor_rollout_ref.rollout.multi_turn`: turns with tools."""

from dataclasses import dataclass

from verl.config.keys import ALWAYS, Family, Section, ours, used
from verl.families import TOOL_PARSERS

TOOLS = "existing releases put the tools into every prompt"


@dataclass(frozen=True)
class MultiTurnConfig(Section):
    enable: bool = used(False, "several turns with tools: rows that name no agent loop run tool_agent", when=ALWAYS)
    max_assistant_turns: int | None = used(None, "most turns of the model in an episode", ge=1)
    max_user_turns: int | None = used(None, "most turns of tools and users in an episode", ge=0)
    max_parallel_calls: int = used(1, "tool calls of one turn that run; others are answered: not run", ge=1)
    max_tool_response_length: int = used(256, "longest tool response, in characters", ge=1)
    tool_response_truncate_side: str = used(
        "middle", "side on which a longer one is cut, as in data.truncation", choices=("left", "middle", "right")
    )
    tool_config_path: str | None = used(None, "YAML file that declares tools", strict=TOOLS, path=True)
    function_tool_path: str | None = used(
        None, "Python file of functions that are tools, or file.py:name for one of them", strict=TOOLS, path=True
    )
    interaction_config_path: str | None = used(None, "YAML file that declares interactions", path=True)
    tokenization_sanity_check_mode: str = used(
        "strict",
        "whether a chat template that rewrites earlier turns is looked for at start; what trains was sampled in any case",
        choices=("strict", "ignore_strippable", "disable"),
    )
    format: str = used("hermes", "format of tool calls", family=Family("tool parser", TOOL_PARSERS, plugins=True))
    num_repeat_rollouts: int | None = used(None, "repeats of one trajectory")
    tool_timeout_s: float = ours(
        60.0, "seconds that one tool call may take; a longer one is answered with an error", gt=0
    )
    tool_sandbox: bool = ours(
        True,
        "run tools that are functions in sandboxed processes with the limits of reward functions; False: in the process of "
        "the run. Tools that are classes always run there",
    )
