"""Keys of routing replay that contradict one another."""

from __future__ import annotations

from collections.abc import Iterator
from typing import TYPE_CHECKING

from verl.config.active_keys import runs_agents
from verl.config.schema import Problem, error

if TYPE_CHECKING:
    from verl.config.roots.ppo import PPOConfig
    from verl.config.sections.rollout import RolloutConfig

_MODE = "actor_rollout_ref.actor.router_replay.mode"
_RECORD = "actor_rollout_ref.rollout.enable_rollout_routing_replay"
_RECORDING = ("native", "vllm")  # rollout engines that return the experts of tokens


def check_routing(c: PPOConfig, set_keys: set[str]) -> Iterator[Problem]:
    """Needs of router_replay.mode."""
    actor, rollout = c.actor_rollout_ref.actor, c.actor_rollout_ref.rollout
    mode = actor.router_replay.mode
    if rollout.enable_rollout_routing_replay and mode != "R3":
        yield error(_RECORD, f"{_RECORD}=True records experts for {_MODE}=R3, and the mode is {mode}. Set one of them.")
    if mode == "disabled":
        return
    if mode == "R2" and c.algorithm.rollout_correction.bypass_mode:
        yield error(
            _MODE,
            f"{_MODE}=R2 replays the pass for old log-probs, which algorithm.rollout_correction.bypass_mode=True leaves out. "
            "Set the mode to R3.",
        )
    if mode == "R3":
        yield from _check_rollout(c, rollout)


def _check_rollout(c: PPOConfig, rollout: RolloutConfig) -> Iterator[Problem]:
    if rollout.name not in _RECORDING:
        yield error(
            _MODE,
            f"{_MODE}=R3 needs the experts that rollout chose, and actor_rollout_ref.rollout.name={rollout.name} does not "
            f"return them. Set the name to {' or '.join(_RECORDING)}.",
        )
    if runs_agents(c):
        yield error(
            _MODE, f"{_MODE}=R3 does not go with agents, whose turns have no record of experts. Set the mode to R2."
        )
    if rollout.name == "vllm" and rollout.stop:
        yield error(
            _MODE,
            f"{_MODE}=R3 does not go with stop strings in vLLM, which returns no experts of such a sample. Use "
            "actor_rollout_ref.rollout.stop_token_ids.",
        )
