"""Specs of a run (verl/specs.py) from the config tree, since lower packages do not know the tree; and traces of chosen
steps."""

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path

from verl.config import AlgorithmConfig, PPOConfig, RayKwargsConfig, TrainerConfig, full_key
from verl.config.active_keys import brings_reward, runs_agents, uses_rewards
from verl.config.sections.trainer import GlobalProfilerConfig, ProfilerConfig
from verl.families import SCORE_METRICS
from verl.parallel.placement import Nodes, Placement
from verl.roles.api import ModelHandle, TraceSpec
from verl.specs import AgentSpec, RewardSpec, RolloutSpec, RunSpec


class Traces:
    """Starts and stops the traces of `roles`."""

    def __init__(self, config: GlobalProfilerConfig, roles: Sequence[ModelHandle]):
        self.steps, self.joins = set(config.steps or ()), config.profile_continuous_steps
        self.roles = roles

    @contextmanager
    def of(self, step: int) -> Iterator[None]:
        """Inside, step `step` runs; a trace continues into the next step if neighbours share one."""
        if step in self.steps and not (self.joins and step - 1 in self.steps):
            for role in self.roles:
                role.start_trace(f"step_{step}")
        try:
            yield
        except BaseException:
            self._stop()
            raise
        if step in self.steps and not (self.joins and step + 1 in self.steps):
            self._stop()

    def _stop(self) -> None:
        for role in self.roles:
            role.stop_trace()


def trace_spec(profiler: ProfilerConfig, config: GlobalProfilerConfig) -> TraceSpec | None:
    """The ranks of a role that write traces, and their folder; None without any."""
    if not profiler.enable or not config.steps:
        return None
    ranks = None if profiler.all_ranks else tuple(profiler.ranks or (0,))
    return TraceSpec(Path(config.save_path).expanduser().absolute(), ranks, config.tool == "torch_memory")


def run_spec(
    trainer: TrainerConfig, ray: RayKwargsConfig, collective_timeout_s: float, pools: tuple[int, ...] = ()
) -> RunSpec:
    """The facts that all roles of a run share."""
    folder = Path(trainer.default_local_dir).expanduser().absolute()
    return RunSpec(
        folder=folder,
        log_folder=Path(trainer.log_dir).expanduser().absolute() if trainer.log_dir else folder / "logs",
        device=trainer.device,
        deterministic=trainer.deterministic,
        start_timeout_s=trainer.ray_wait_register_center_timeout,
        call_timeout_s=trainer.call_timeout_s,
        collective_timeout_s=collective_timeout_s,
        ray=ray,
        pools=pools,
    )


def ppo_run_spec(config: PPOConfig) -> RunSpec:
    """`run_spec` of a run that generates."""
    trainer, rollout = config.trainer, config.actor_rollout_ref.rollout
    pools = (trainer.n_gpus_per_node, rollout.n_gpus_per_node) if trainer.nnodes == rollout.nnodes == 1 else ()
    return run_spec(trainer, config.ray_kwargs, config.actor_rollout_ref.nccl_timeout, pools)


def rollout_spec(config: PPOConfig) -> RolloutSpec:
    """Generation, with agents if the config asks for them."""
    group = config.actor_rollout_ref
    return RolloutSpec(
        group.rollout,
        group.model,
        group.actor.fsdp_config.dtype,
        group.actor.fsdp_config.master_rounding,
        agent_spec(config) if runs_agents(config) else None,
        _devices_key(config),
    )


def agent_spec(config: PPOConfig) -> AgentSpec:
    """Agents, whether or not the config asks for them."""
    return AgentSpec(config.actor_rollout_ref.rollout, config.data, config.reward, config)


def reward_spec(config: PPOConfig) -> RewardSpec:
    """The scores of a run."""
    reward, group = config.reward, config.actor_rollout_ref
    scores_any = (
        reward.custom_reward_function.path or reward.reward_model.enable or reward.reward_manager.source != "register"
    )
    return RewardSpec(
        reward,
        group.model,
        group.rollout.response_length,
        _parts_read(config.algorithm),
        needs_answer=not (scores_any or uses_rewards(config)),
        turn_rewards=group.rollout.agent.turn_rewards,
        only_built_in=brings_reward(config),
    )


def placement_of(config: PPOConfig, num_devices: int | None = None, teachers: Sequence[str] = ()) -> Placement:
    """The placement of a run with roles for `teachers`; `num_devices` processes were started by a launcher."""
    trainer, rollout, distillation = config.trainer, config.actor_rollout_ref.rollout, config.distillation
    pools: dict[tuple[str, ...], Nodes] = {("rollout",): Nodes(rollout.nnodes, rollout.n_gpus_per_node)}
    if teachers:
        pools[tuple(teachers)] = Nodes(distillation.nnodes, distillation.n_gpus_per_node)
    training = Nodes(trainer.nnodes, trainer.n_gpus_per_node)
    return Placement.of(training, pools, trainer.placement, num_devices=num_devices, teachers=teachers)


def _devices_key(config: PPOConfig) -> str:
    rollout, trainer = config.actor_rollout_ref.rollout, config.trainer
    if "rollout" in trainer.placement:
        return "trainer.placement"
    prefix, counts = (full_key("rollout"), rollout) if rollout.nnodes else ("trainer", trainer)
    return f"{prefix}.nnodes={counts.nnodes} x {prefix}.n_gpus_per_node={counts.n_gpus_per_node}"


def _parts_read(algorithm: AlgorithmConfig) -> tuple[str, ...]:
    """Names of the numbers that the algorithm reads for every sample, in addition to its score."""
    rewards = algorithm.gdpo_reward_keys or [] if algorithm.adv_estimator == "gdpo" else []
    compared = [algorithm.filter_groups.metric] if algorithm.filter_groups.enable else []
    return tuple(n for n in rewards if n != "score") + tuple(
        str(n) for n in compared if n not in (None, *SCORE_METRICS)
    )
