"""Keys of agents that contradict one another."""

from __future__ import annotations

from collections.abc import Iterator
from typing import TYPE_CHECKING

from verl.config.active_keys import runner_of, runs_agents, trains_branches, uses_critic
from verl.config.schema import Problem, error, warning
from verl.families import ADVANTAGES, engine_facts, needs_engine

if TYPE_CHECKING:
    from verl.config.roots.ppo import PPOConfig

ROLLOUT = "actor_rollout_ref.rollout"
ENABLE = f"{ROLLOUT}.multi_turn.enable"
LAST_PORT = 65535
LOOP = f"{ROLLOUT}.agent.default_agent_loop"


def check_agents(c: PPOConfig, set_keys: set[str]) -> Iterator[Problem]:
    """Agents that could not act, and what does not work with them."""
    estimator = c.algorithm.adv_estimator
    if not runs_agents(c):
        if estimator in ADVANTAGES.reading("turn_ids"):
            yield warning(
                "algorithm.adv_estimator",
                f"algorithm.adv_estimator={estimator} gives credit to turns, and the samples of this run have one each. Set "
                f"{ENABLE}=True with tools, or {ROLLOUT}.agent.environment.",
            )
        return
    rollout = c.actor_rollout_ref.rollout
    multi_turn, agent = rollout.multi_turn, rollout.agent
    loop = agent.default_agent_loop
    if multi_turn.enable and loop == "single_turn_agent" and not agent.agent_loop_config_path:
        yield error(
            LOOP,
            f"{ENABLE}=True, but {LOOP}=single_turn_agent: every sample would be a single turn, without tools. Remove the "
            "second, or set it to tool_agent.",
        )
    runner = runner_of(agent)
    needed = {"environment_agent": ("environment", agent.environment), "endpoint_agent": ("runner", runner)}
    if loop in needed and not needed[loop][1]:
        yield error(LOOP, f"{LOOP}={loop} needs {ROLLOUT}.agent.{needed[loop][0]}.")
    files = (multi_turn.tool_config_path, multi_turn.function_tool_path, multi_turn.interaction_config_path)
    if loop == "tool_agent" and not any(files) and not agent.agent_loop_config_path:
        yield error(
            ENABLE,
            f"{ENABLE}=True, but there are neither tools nor interactions: samples would be single turns. In {ROLLOUT}, set "
            "multi_turn.tool_config_path, function_tool_path or interaction_config_path, or agent.agent_loop_config_path.",
        )
    if rollout.prefetch_num and rollout.partial_rollout and runner:
        yield error(
            f"{ROLLOUT}.partial_rollout",
            f"{ROLLOUT}.partial_rollout=True pauses episodes while the weights change and takes them from their beginning "
            f"again, which {runner} may not repeat. Set partial_rollout=False; prefetch_num alone "
            "makes its episodes ahead of training.",
        )
    num_ranks = c.trainer.nnodes * c.trainer.n_gpus_per_node
    if runner and agent.gateway_port and agent.gateway_port + num_ranks - 1 > LAST_PORT:
        yield error(
            f"{ROLLOUT}.agent.gateway_port",
            f"{ROLLOUT}.agent.gateway_port={agent.gateway_port} is the port of the first of {num_ranks} ranks, and the last "
            f"rank would have {agent.gateway_port + num_ranks - 1}. Choose at most {LAST_PORT + 1 - num_ranks}, or 0.",
        )
    facts, size = engine_facts(rollout.name), f"{ROLLOUT}.tensor_model_parallel_size"
    if facts.divides_model and facts.is_in_run and rollout.tensor_model_parallel_size > 1:
        yield error(
            size,
            f"{needs_engine(f'{size} above 1 with agents', 'starts_process')}. {rollout.name} plays episodes with a whole "
            f"model on each device. Set {size}=1, or {ROLLOUT}.name.",
        )


def check_branches(c: PPOConfig, set_keys: set[str]) -> Iterator[Problem]:
    """Keys that give tokens of an episode different advantages, with agent.branches=all."""
    if not trains_branches(c):
        return
    key, algorithm = f"{ROLLOUT}.agent.branches", c.algorithm
    estimator = algorithm.adv_estimator
    odd = {
        f"algorithm.adv_estimator={estimator}": uses_critic(c) or estimator in ADVANTAGES.reading("turn_ids"),
        "algorithm.use_kl_in_reward=True": algorithm.use_kl_in_reward, "algorithm.use_pf_ppo=True": algorithm.use_pf_ppo,
        "algorithm.stages": bool(algorithm.stages), "distillation.enabled=True": c.distillation.enabled,
    }  # fmt: skip
    for name in [name for name, is_odd in odd.items() if is_odd]:
        yield error(
            key, f"{key}=all gives each conversation the one advantage of its episode, and {name} does not. Remove one."
        )
