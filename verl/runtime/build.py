"""The workers of one process: models, engines and reward processes for the roles that are placed on its device."""

from __future__ import annotations

import os
from collections.abc import Callable
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist

from verl.config import CheckpointConfig, VerlConfig
from verl.engines.api import ENGINES as TRAIN_ENGINES
from verl.engines.api import MicroBatching, TrainEngine
from verl.engines.groups import Groups
from verl.models.load import eos_token_ids, load_tokenizer
from verl.rewards.managers import build_reward_manager
from verl.roles.critic import CriticWorker
from verl.roles.objectives import PolicyObjective, ValueObjective, skips_zero_advantages
from verl.roles.policy import ActorWorker, ReferenceWorker
from verl.roles.reward import RewardWorker
from verl.roles.reward_model import build_reward_model
from verl.roles.rollout import RolloutWorker
from verl.roles.step_guard import StepGuard
from verl.roles.trained import Keeping
from verl.roles.updates import MiniBatchSchedule
from verl.rollout.api import ENGINES as ROLLOUT_ENGINES
from verl.rollout.api import RolloutEngine
from verl.rollout.rollout_model import copy_group
from verl.rollout.weight_version import PassiveRollout
from verl.runtime.rank import Seat, engine_roles, engine_section, shares_reference
from verl.runtime.sampling import sampling_params
from verl.runtime.weight_copies import load_replica, own_copy, skeleton


def build_workers(seat: Seat) -> dict[str, Any]:
    """The workers of `seat` by role. Reward processes start first, so that a wrong reward function costs no model load."""
    config = seat.config
    _set_determinism(config)
    tokenizer = load_tokenizer(config.actor_rollout_ref.model)
    workers: dict[str, Any] = {}
    if seat.holds("reward"):
        workers["reward"] = _reward(seat, tokenizer)
    try:
        for role in engine_roles(seat):
            if role == "reference" and shares_reference(config):
                if seat.holds("actor"):
                    workers[role] = _adapterless(seat, workers["actor"])
                continue
            if seat.holds(role):
                workers[role] = _BUILDERS[role](seat)
            else:
                _help_make_groups(seat, role)
        group = None if seat.has_own_weights else copy_group(seat.rollout_mesh(), seat.timeout_s)
        if seat.holds("rollout"):
            workers["rollout"] = _rollout(seat, tokenizer, group, workers)
    except BaseException:
        if "reward" in workers:
            workers["reward"].close()
        raise
    return workers


def schedule_of(config: VerlConfig, role: str) -> MiniBatchSchedule | None:
    """Which rows each optimizer step of `role` takes; None for a role that does not train."""
    sections: dict[str, Any] = {"actor": config.actor_rollout_ref.actor, "critic": config.critic}
    section = sections.get(role)
    if section is None:
        return None
    return MiniBatchSchedule(
        size=section.ppo_mini_batch_size * config.actor_rollout_ref.rollout.n,
        epochs=section.ppo_epochs,
        shuffle=section.shuffle,
        seed=section.data_loader_seed,
        skips_zero_advantages=role == "actor" and skips_zero_advantages(section, config.algorithm.rollout_correction),
    )


def _set_determinism(config: VerlConfig) -> None:
    if config.trainer.deterministic:
        # read when CUDA's matrix library starts: without it, its products may take their sums in any order
        os.environ.setdefault("CUBLAS_WORKSPACE_CONFIG", ":4096:8")
        torch.use_deterministic_algorithms(True, warn_only=True)
        # a debugging aid that comes with it and writes every new tensor twice
        torch.utils.deterministic.fill_uninitialized_memory = False  # type: ignore[attr-defined]


def _help_make_groups(seat: Seat, role: str) -> None:
    """Process groups are made by all processes of a run, those that will not be in them too."""
    mesh = seat.mesh(role)
    if mesh is not None:
        engine = engine_section(seat.config, role)
        Groups(mesh, seat.device.type, engine.expert_parallel_size, seat.timeout_s)


def _engine(seat: Seat, role: str, section: Any, *, trains: bool, head: str = "lm") -> TrainEngine:
    """One device holds the model: the local engine. Several: the one that the strategy names."""
    config, mesh = seat.config, seat.mesh(role)
    settings: dict[str, Any] = {
        "model": config.critic.model if role == "critic" else config.actor_rollout_ref.model,
        "engine": engine_section(config, role),
        "optim": section.optim if trains else None,
        "head": head,
        "device": seat.device,
        "total_steps": seat.total_steps,
        "trainable": trains,
    }
    if mesh is None:
        return TRAIN_ENGINES.get("local")(**settings)
    return TRAIN_ENGINES.get(section.strategy)(mesh=mesh, timeout_s=seat.timeout_s, **settings)


def _actor(seat: Seat) -> ActorWorker:
    config, group = seat.config, seat.config.actor_rollout_ref
    schedule = schedule_of(config, "actor")
    assert schedule is not None
    engine, guard = _engine(seat, "actor", group.actor, trains=seat.train), StepGuard(config.trainer.guards)
    return ActorWorker(
        engine,
        group.actor,
        PolicyObjective(
            group.actor,
            config.algorithm.rollout_correction,
            max_response_length=group.rollout.response_length,
            guard=guard,
        ),
        micro=micro_batching(group.actor, "ppo_"),
        log_prob_micro=micro_batching(group.rollout, "log_prob_"),
        temperature=group.rollout.temperature or 1.0,
        schedule=schedule,
        keeping=_keeping(seat, "actor", group.actor.checkpoint, engine.module),
        guard=guard,
        measures=partial(_is_measured, seat.config.trainer.test_freq, seat.total_steps),
    )


def _reference(seat: Seat) -> ReferenceWorker:
    group = seat.config.actor_rollout_ref
    engine = _engine(seat, "reference", group.ref, trains=False)
    return ReferenceWorker(engine, micro_batching(group.ref, "log_prob_"), group.rollout.temperature or 1.0)


def _adapterless(seat: Seat, actor: ActorWorker) -> ReferenceWorker:
    """The reference policy of LoRA training: the actor's own weights without the adapters, no second copy."""
    group = seat.config.actor_rollout_ref
    micro = micro_batching(group.ref, "log_prob_")
    return ReferenceWorker(actor.engine, micro, group.rollout.temperature or 1.0, without_adapters=True)


def _critic(seat: Seat) -> CriticWorker:
    critic = seat.config.critic
    schedule = schedule_of(seat.config, "critic")
    assert schedule is not None
    engine, guard = (
        _engine(seat, "critic", critic, trains=True, head="token_value"),
        StepGuard(seat.config.trainer.guards),
    )
    return CriticWorker(
        engine,
        critic,
        ValueObjective(critic, max_response_length=seat.config.actor_rollout_ref.rollout.response_length, guard=guard),
        micro=micro_batching(critic, "ppo_"),
        forward_micro=_critic_forward_micro(critic),
        schedule=schedule,
        keeping=_keeping(seat, "critic", critic.checkpoint, engine.module),
        guard=guard,
        measures=partial(_is_measured, seat.config.trainer.test_freq, seat.total_steps),
    )


_BUILDERS: dict[str, Callable[[Seat], Any]] = {"actor": _actor, "reference": _reference, "critic": _critic}


def _reward(seat: Seat, tokenizer: Any) -> RewardWorker:
    config, scoring = seat.config, _scoring_ranks(seat)
    share = config.reward.num_workers // len(scoring) if seat.rank in scoring else 0
    section = replace(config.reward, num_workers=max(1, share))
    manager = build_reward_manager(section, max_response_length=config.actor_rollout_ref.rollout.response_length)
    manager.start(seat.data_sources)
    try:
        model = None
        if config.reward.reward_model.enable:
            model = build_reward_model(
                config.reward.reward_model,
                tokenizer,
                seat.device,
                start_timeout_s=config.trainer.ray_wait_register_center_timeout,
                call_timeout_s=config.actor_rollout_ref.nccl_timeout,
            )
        return RewardWorker(manager, model, tokenizer)
    except BaseException:
        manager.close()
        raise


def _scoring_ranks(seat: Seat) -> list[int]:
    """The ranks that get samples to score. Beside the rollout these are the ranks that answer for a copy of the policy."""
    devices, mesh = seat.placement.devices, seat.rollout_mesh()
    if devices["reward"] == devices["rollout"]:
        return [mesh.ranks[index] for index in mesh.collectors()]
    return list(devices["reward"])


def _rollout(seat: Seat, tokenizer: Any, group: dist.ProcessGroup | None, workers: dict[str, Any]) -> RolloutWorker:
    """The engine generates with the actor's own module where that is whole and here: then there is one copy of the weights."""
    rollout, devices = seat.config.actor_rollout_ref.rollout, seat.placement.devices
    replica, own = None, {}
    build_engine: Callable[..., RolloutEngine] = PassiveRollout
    if seat.engine_plan.runs_engine(seat.rank):
        build_engine = ROLLOUT_ENGINES.get(rollout.name)
    if seat.has_own_weights:
        copy = own_copy(seat.config, seat.device, seat.engine_plan, _visible_devices(seat))
        module, own = skeleton(seat.config, copy.dtype), {"own": copy}
    elif seat.shares_weights and "actor" in workers:
        module = workers["actor"].engine.module
    else:
        replica = load_replica(seat.config, seat.device, group)
        module = replica.module
    engine = build_engine(
        module,
        tokenizer,
        rollout,
        eos_token_ids=eos_token_ids(module, tokenizer),
        pad_token_id=tokenizer.pad_token_id,
        **own,
    )
    streams = devices["reward"] == devices["rollout"] and seat.rank in _scoring_ranks(seat)
    return RolloutWorker(
        engine,
        tokenizer,
        sampling_params(rollout),
        max_prompt_length=rollout.prompt_length,
        free_cache=rollout.free_cache_engine,
        score_stream=workers["reward"].submit if streams else None,
        replica=replica,
        rank=devices["rollout"].index(seat.rank),
    )


def _visible_devices(seat: Seat) -> tuple[str, ...]:
    """Of this rank's engine process, in the order of its ranks; () to let the engine find its own."""
    return tuple(seat.device_names[rank] for rank in seat.engine_plan.replica_of(seat.rank).ranks if seat.device_names)


def micro_batching(section: Any, prefix: str = "", *, tokens_key: str = "max_token_len_per_gpu") -> MicroBatching:
    """By tokens when the section says use_dynamic_bsz or gives no row count, else by rows."""
    rows = getattr(section, f"{prefix}micro_batch_size_per_gpu") or getattr(section, f"{prefix}micro_batch_size")
    dynamic = getattr(section, f"{prefix}use_dynamic_bsz", getattr(section, "use_dynamic_bsz", False))
    if dynamic or rows is None:
        return MicroBatching(max_tokens=getattr(section, f"{prefix}{tokens_key}"))
    return MicroBatching(max_rows=rows)


def _is_measured(every: int, last: int, step: int) -> bool:
    """As the model is validated: in every so many steps, and the last one."""
    return step == last or (every > 0 and step % every == 0)


def _critic_forward_micro(critic: Any) -> MicroBatching:
    rows = critic.forward_micro_batch_size_per_gpu or critic.forward_micro_batch_size
    if critic.use_dynamic_bsz or rows is None:
        return MicroBatching(max_tokens=critic.forward_max_token_len_per_gpu)
    return MicroBatching(max_rows=rows)


def _keeping(seat: Seat, role: str, config: CheckpointConfig, module: Any) -> Keeping:
    tokenizer = load_tokenizer(seat.config.actor_rollout_ref.model)

    def hf_files(folder: Path) -> None:
        module.config.save_pretrained(folder)
        generation_config = getattr(module, "generation_config", None)
        if generation_config is not None:
            generation_config.save_pretrained(folder)
        tokenizer.save_pretrained(folder)

    return Keeping(role, config, hf_files, writes=seat.rank == seat.placement.devices[role][0])
