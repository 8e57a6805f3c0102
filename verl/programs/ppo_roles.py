"""Roles and requirements of PPO and its family, from the config."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from functools import partial
from typing import Any, Literal

from verl.algorithms.advantages import requires
from verl.config import ModelConfig, PPOConfig
from verl.config.active_keys import uses_critic, uses_reference, uses_rewards
from verl.config.sections.actor import ActorConfig, CriticConfig
from verl.config.sections.distillation import TeacherConfig
from verl.config.sections.trainer import steps_between
from verl.engines.api import MicroBatching
from verl.programs.specs import placement_of, ppo_run_spec, reward_spec, rollout_spec, trace_spec
from verl.roles.api import ModelHandle, RewardHandle, Roles, RoleSpec, RoleSpecs, RolloutHandle, WeightSync, settings_of
from verl.roles.guards import StepGuard
from verl.roles.objectives.distillation import DistillationObjective
from verl.roles.objectives.policy import (
    PolicyObjective,
    ValueObjective,
    all_rows,
    rows_with_advantage,
    skips_zero_advantages,
)
from verl.roles.updates import MiniBatchSchedule

OldLogProbs = Literal["update", "rollout", "recompute"]


@dataclass(frozen=True)
class Needs:
    """Requirements of a configuration; decided once per run."""

    critic: bool
    reference: bool
    greedy_baseline: bool  # one greedy sample per prompt (ReMax)
    sum_pi_squared: bool  # optimal token baseline
    turn_ids: bool  # credit to turns
    correction: bool  # importance weights or rejection between sampler and trainer
    bypass: bool  # the sampler's log-probs are the old ones
    credit: bool  # advantages; not if only a teacher trains
    ratio: bool  # probability ratios to the old policy

    @classmethod
    def of(cls, config: PPOConfig) -> Needs:
        columns = requires(config.algorithm.adv_estimator)
        correction = config.algorithm.rollout_correction
        return cls(
            # the config cannot look into a user's estimator: its arguments decide
            critic=uses_critic(config) and (bool(config.critic.enable) or "values" in columns),
            reference=uses_reference(config),
            greedy_baseline="reward_baselines" in columns,
            sum_pi_squared="sum_pi_squared" in columns,
            turn_ids="turn_ids" in columns,
            correction=bool(correction.rollout_is or correction.rollout_rs),
            bypass=bool(correction.bypass_mode),
            credit=uses_rewards(config),
            ratio=uses_rewards(config) or config.distillation.distillation_loss.use_policy_gradient,
        )


def old_log_prob_source(config: PPOConfig, needs: Needs, *, sampler_is_exact: bool) -> OldLogProbs:
    """The source of old log-probs, cheapest first.

    update: one optimizer step per batch, so the old policy is the current one and its log-probs fall out of the update;
    rollout: the sampler's own, when they equal the trainer's to rounding (or bypass mode says so);
    recompute: a forward pass.
    """
    actor, rollout = config.actor_rollout_ref.actor, config.actor_rollout_ref.rollout
    if not needs.ratio and not config.algorithm.use_kl_in_reward:
        return "update"
    if needs.bypass:
        return "rollout"
    if needs.sum_pi_squared or needs.correction:
        return "recompute"
    rows_per_step = config.data.train_batch_size * rollout.n
    num_updates = actor.ppo_epochs * -(-rows_per_step // (actor.ppo_mini_batch_size * rollout.n))
    if num_updates == 1 and not config.algorithm.use_kl_in_reward:
        return "update"
    if actor.router_replay.mode == "R2":  # this pass records the experts
        return "recompute"
    return "rollout" if sampler_is_exact and rollout.calculate_log_probs else "recompute"


@dataclass(frozen=True)
class PPORoles:
    """The handles of a run by their part in PPO. `critic` and `reference` are None if the algorithm has no use for them,
    `actor` in an evaluation."""

    rollout: RolloutHandle
    reward: RewardHandle
    weights: WeightSync
    actor: ModelHandle | None = None
    critic: ModelHandle | None = None
    reference: ModelHandle | None = None
    teachers: Mapping[str, ModelHandle] = field(default_factory=dict)

    @classmethod
    def of(cls, roles: Roles) -> PPORoles:
        assert roles.rollout is not None
        assert roles.reward is not None
        assert roles.weights is not None
        models = {name: roles.models.get(name) for name in ("actor", "critic", "reference")}
        teachers = {name: handle for name, handle in roles.models.items() if name not in models}
        return cls(roles.rollout, roles.reward, roles.weights, **models, teachers=teachers)


def ppo_roles(config: PPOConfig, *, train: bool = True) -> RoleSpecs:
    """The roles of a run. An evaluation has no separate models, since the rollout loads the policy."""
    models: list[RoleSpec] = []
    if train:
        needs = Needs.of(config)
        models += [_actor(config)]
        models += [_reference(config)] if needs.reference else []
        models += [_critic(config)] if needs.critic else []
        models += [_teacher(config, name, teacher) for name, teacher in _teachers(config).items()]
    return RoleSpecs(
        tuple(models),
        partial(placement_of, config, teachers=tuple(map(role_of, _teachers(config)))),
        ppo_run_spec(config),
        rollout_spec(config),
        reward_spec(config),
    )


def _actor(config: PPOConfig) -> RoleSpec:
    group, correction = config.actor_rollout_ref, config.algorithm.rollout_correction
    actor = group.actor

    def objective(guard: StepGuard) -> PolicyObjective:
        settings: dict[str, Any] = {"max_response_length": group.rollout.response_length, "guard": guard}
        if config.distillation.enabled:
            return DistillationObjective(config.distillation.distillation_loss, actor, correction, **settings)
        return PolicyObjective(actor, correction, **settings)

    skips = skips_zero_advantages(actor, correction) and not config.distillation.enabled
    return RoleSpec(
        "actor",
        "lm",
        group.model,
        actor.fsdp_config,
        actor.optim,
        objective,
        strategy=actor.strategy,
        settings=settings_of(actor),
        engine_keys=("actor_rollout_ref.actor.fsdp_config", "actor_model.fsdp_config", "fsdp_config", ""),
        micro=micro_batching(actor, "ppo_"),
        forward_micro=micro_batching(group.rollout, "log_prob_"),
        temperature=group.rollout.temperature or 1.0,
        schedule=mini_batches(actor, config.actor_rollout_ref.rollout.n, rows_with_advantage if skips else all_rows),
        checkpoint=actor.checkpoint,
        checkpoints_to_keep=config.trainer.max_actor_ckpt_to_keep,
        guards=config.trainer.guards,
        freezes_vision_tower=actor.freeze_vision_tower,
        rounds=actor.qat if actor.qat.enable else None,
        router_replay=actor.router_replay.mode,
        trace=trace_spec(actor.profiler, config.global_profiler),
        measure_every=steps_between(config.trainer.test_freq),
    )


def _reference(config: PPOConfig) -> RoleSpec:
    group = config.actor_rollout_ref
    return RoleSpec(
        "reference",
        "lm",
        group.model,  # with the adapters that training starts from
        group.ref.fsdp_config,
        shares="actor" if group.model.lends_its_base else None,
        memory_map=group.ref.memory_map,
        strategy=group.ref.strategy,
        settings=settings_of(group.ref),
        engine_keys=("actor_rollout_ref.ref.fsdp_config",),
        trace=trace_spec(group.ref.profiler, config.global_profiler),
        forward_micro=micro_batching(group.ref, "log_prob_"),
        temperature=group.rollout.temperature or 1.0,
    )


def _teachers(config: PPOConfig) -> dict[str, TeacherConfig]:
    return config.distillation.teachers() if config.distillation.enabled else {}


def role_of(teacher: str) -> str:
    """The role of a teacher of distillation.teacher_models."""
    return "teacher" if teacher == "teacher_model" else f"teacher_{teacher}"


def _teacher(config: PPOConfig, name: str, teacher: TeacherConfig) -> RoleSpec:
    student = config.actor_rollout_ref.model
    ref = config.actor_rollout_ref.ref
    key = f"distillation.teacher_models.{name}"
    # engines with settings are on the policy's devices, and a pool is beside them
    has_pool = config.distillation.nnodes > 0 and settings_of(ref) is not None
    return RoleSpec(
        role_of(name),
        "lm",
        ModelConfig(
            path=str(teacher.model_path), trust_remote_code=student.trust_remote_code, external_lib=student.external_lib
        ),
        replace(ref.fsdp_config, dtype=teacher.inference.dtype),
        strategy="fsdp2" if has_pool else ref.strategy,
        settings=None if has_pool else settings_of(ref),
        engine_keys=(f"{key}.inference", "actor_rollout_ref.ref.fsdp_config"),
        forward_micro=MicroBatching(max_tokens=teacher.inference.max_num_batched_tokens),
        temperature=teacher.inference.temperature or 1.0,
    )


def _critic(config: PPOConfig) -> RoleSpec:
    critic, length = config.critic, config.actor_rollout_ref.rollout.response_length

    def objective(guard: StepGuard) -> ValueObjective:
        return ValueObjective(critic, max_response_length=length, guard=guard)

    rows = critic.forward_micro_batch_size_per_gpu or critic.forward_micro_batch_size
    by_tokens = critic.use_dynamic_bsz or rows is None
    return RoleSpec(
        "critic",
        "token_value",
        critic.model,
        critic.fsdp,
        critic.optim,
        objective,
        strategy=critic.strategy,
        settings=settings_of(critic),
        engine_keys=("critic.fsdp", "critic.fsdp_config"),
        trace=trace_spec(critic.profiler, config.global_profiler),
        micro=micro_batching(critic, "ppo_"),
        forward_micro=MicroBatching(max_tokens=critic.forward_max_token_len_per_gpu)
        if by_tokens
        else MicroBatching(max_rows=rows),
        schedule=mini_batches(critic, config.actor_rollout_ref.rollout.n),
        checkpoint=critic.checkpoint,
        checkpoints_to_keep=config.trainer.max_critic_ckpt_to_keep,
        guards=config.trainer.guards,
        measure_every=steps_between(config.trainer.test_freq),
    )


def mini_batches(section: ActorConfig | CriticConfig, per_prompt: int, needed: Any = None) -> MiniBatchSchedule:
    """Of the prompts of `section`, each with `per_prompt` samples."""
    return MiniBatchSchedule(
        size=section.ppo_mini_batch_size * per_prompt,
        epochs=section.ppo_epochs,
        shuffle=section.shuffle,
        seed=section.data_loader_seed,
        needed=needed,
    )


def micro_batching(section: object, prefix: str = "") -> MicroBatching:
    """By tokens when the section sets use_dynamic_bsz or gives no row count, else by rows."""
    rows = getattr(section, f"{prefix}micro_batch_size_per_gpu") or getattr(section, f"{prefix}micro_batch_size")
    dynamic = getattr(section, f"{prefix}use_dynamic_bsz", getattr(section, "use_dynamic_bsz", False))
    if dynamic or rows is None:
        return MicroBatching(max_tokens=getattr(section, f"{prefix}max_token_len_per_gpu"))
    return MicroBatching(max_rows=rows)
