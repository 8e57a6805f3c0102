"""The local runtime: every role in this process, on one device. A breakpoint works anywhere."""

from __future__ import annotations

import logging
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch

from verl.config import RolloutConfig, VerlConfig
from verl.controller.needs import Needs
from verl.controller.roles import Roles
from verl.data_proto.samples import SamplingParams
from verl.engines.api import ENGINES as TRAIN_ENGINES
from verl.engines.api import MicroBatching
from verl.models.load import eos_token_ids, load_tokenizer
from verl.parallel.device import resolve_device
from verl.rewards.managers import build_reward_manager
from verl.rollout.api import ENGINES as ROLLOUT_ENGINES
from verl.workers.critic import CriticWorker
from verl.workers.objectives import PolicyObjective, ValueObjective
from verl.workers.policy import ActorWorker, ReferenceWorker
from verl.workers.reward import RewardWorker
from verl.workers.rollout import RolloutWorker

log = logging.getLogger(__name__)


def sampling_params(config: RolloutConfig, *, validation: bool = False) -> SamplingParams:
    """The training or the validation draw of `config`; validation without do_sample is greedy."""
    stops: dict[str, Any] = {
        "stop": tuple(config.stop),
        "stop_token_ids": tuple(config.stop_token_ids),
        "ignore_eos": config.ignore_eos,
        "seed": config.seed,
    }
    if not validation:
        temperature = config.temperature if config.do_sample else 0.0
        return SamplingParams(
            n=config.n, temperature=temperature, top_p=config.top_p, top_k=config.top_k, min_p=config.min_p,
            max_new_tokens=config.response_length, **stops,
        )  # fmt: skip
    val = config.val_kwargs
    return SamplingParams(
        n=val.n, temperature=val.temperature if val.do_sample else 0.0, top_p=val.top_p, top_k=val.top_k, min_p=val.min_p,
        max_new_tokens=val.max_new_tokens or config.response_length, **stops,
    )  # fmt: skip


def micro_batching(section: Any, prefix: str = "", *, tokens_key: str = "max_token_len_per_gpu") -> MicroBatching:
    """By tokens when the section says use_dynamic_bsz or gives no row count, else by rows."""
    rows = getattr(section, f"{prefix}micro_batch_size_per_gpu") or getattr(section, f"{prefix}micro_batch_size")
    dynamic = getattr(section, f"{prefix}use_dynamic_bsz", getattr(section, "use_dynamic_bsz", False))
    if dynamic or rows is None:
        return MicroBatching(max_tokens=getattr(section, f"{prefix}{tokens_key}"))
    return MicroBatching(max_rows=rows)


def build_roles(config: VerlConfig, *, total_steps: int, data_sources: list[str], train: bool = True) -> Roles:
    """Load models, start reward processes, and wire the roles of `config` in this process.

    The rollout engine generates with the actor's own module: on one device there is one copy of the weights.
    """
    device = resolve_device(config.trainer.device)
    if config.trainer.deterministic:
        torch.use_deterministic_algorithms(True, warn_only=True)
        # a debugging aid that comes with it and writes every new tensor twice
        torch.utils.deterministic.fill_uninitialized_memory = False  # type: ignore[attr-defined]
    group = config.actor_rollout_ref
    tokenizer = load_tokenizer(group.model)
    needs = Needs.of(config)
    engine_class = TRAIN_ENGINES.get("local")
    reward = RewardWorker(build_reward_manager(config.reward, max_response_length=group.rollout.response_length))
    reward.manager.start(data_sources)
    try:
        policy = engine_class(
            model=group.model, engine=group.actor.fsdp_config, optim=group.actor.optim if train else None,
            kind="policy", device=device, total_steps=total_steps, trainable=train,
        )  # fmt: skip
        roles = Roles(
            rollout=_rollout(config, policy.module, tokenizer, reward),
            reward=reward,
            actor=_actor(config, policy) if train else None,
            reference=_reference(config, engine_class, device, total_steps) if train and needs.reference else None,
            critic=_critic(config, engine_class, device, total_steps) if train and needs.critic else None,
        )
    except BaseException:
        reward.close()
        raise
    roles.facts = {
        "device": str(device),
        "dtype": str(next(policy.module.parameters()).dtype).removeprefix("torch."),
        "parameters": sum(p.numel() for p in policy.module.parameters()),
        "threads": torch.get_num_threads(),
    }
    roles.checkpoints = {"actor": group.actor.checkpoint, "critic": config.critic.checkpoint}
    roles.save_pretrained = {
        name: _hf_files(engine.module, tokenizer) for name, engine in {**roles.engines(), "actor": policy}.items()
    }
    return roles


def _rollout(config: VerlConfig, module: torch.nn.Module, tokenizer: Any, reward: RewardWorker) -> RolloutWorker:
    rollout = config.actor_rollout_ref.rollout
    engine = ROLLOUT_ENGINES.get(rollout.name)(
        module, tokenizer, rollout, eos_token_ids=eos_token_ids(module, tokenizer), pad_token_id=tokenizer.pad_token_id
    )
    return RolloutWorker(
        engine,
        tokenizer,
        sampling_params(rollout),
        max_prompt_length=rollout.prompt_length,
        free_cache=rollout.free_cache_engine,
        score_stream=reward.submit,
    )


def _actor(config: VerlConfig, engine: Any) -> ActorWorker:
    group = config.actor_rollout_ref
    objective = PolicyObjective(
        group.actor, config.algorithm.rollout_correction, max_response_length=group.rollout.response_length
    )
    return ActorWorker(
        engine,
        group.actor,
        objective,
        micro=micro_batching(group.actor, "ppo_"),
        log_prob_micro=micro_batching(group.rollout, "log_prob_"),
        temperature=group.rollout.temperature or 1.0,
        rollout_n=group.rollout.n,
    )


def _reference(config: VerlConfig, engine_class: Any, device: torch.device, total_steps: int) -> ReferenceWorker:
    group = config.actor_rollout_ref
    engine = engine_class(
        model=group.model, engine=group.ref.fsdp_config, optim=None, kind="policy", device=device,
        total_steps=total_steps, trainable=False,
    )  # fmt: skip
    return ReferenceWorker(engine, micro_batching(group.ref, "log_prob_"), group.rollout.temperature or 1.0)


def _critic(config: VerlConfig, engine_class: Any, device: torch.device, total_steps: int) -> CriticWorker:
    critic, rollout = config.critic, config.actor_rollout_ref.rollout
    engine = engine_class(
        model=critic.model, engine=critic.fsdp, optim=critic.optim, kind="value", device=device, total_steps=total_steps
    )
    return CriticWorker(
        engine,
        critic,
        ValueObjective(critic, max_response_length=rollout.response_length),
        micro=micro_batching(critic, "ppo_"),
        forward_micro=_critic_forward_micro(critic),
        rollout_n=rollout.n,
    )


def _critic_forward_micro(critic: Any) -> MicroBatching:
    rows = critic.forward_micro_batch_size_per_gpu or critic.forward_micro_batch_size
    if critic.use_dynamic_bsz or rows is None:
        return MicroBatching(max_tokens=critic.forward_max_token_len_per_gpu)
    return MicroBatching(max_rows=rows)


def _hf_files(module: Any, tokenizer: Any) -> Callable[[Path], None]:
    """Writes what `from_pretrained` needs beside the weights."""

    def write(folder: Path) -> None:
        module.config.save_pretrained(folder)
        generation_config = getattr(module, "generation_config", None)
        if generation_config is not None:
            generation_config.save_pretrained(folder)
        tokenizer.save_pretrained(folder)

    return write
