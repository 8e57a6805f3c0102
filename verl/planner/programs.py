"""Dataflow and workload of a training config, for each program: PPO and its family, fine-tuning, preferences, reward models."""

from __future__ import annotations

from pathlib import Path

from verl.config import PPOConfig, PreferenceConfig, RunConfig
from verl.config.active_keys import LABELLED_LOSSES, uses_critic, uses_reference
from verl.config.roots.preference import has_reference_role
from verl.config.roots.reward_model import PAIR_LOSSES, RMConfig
from verl.planner.dataflow import Dataflow
from verl.planner.request import WorkloadRequest, read_lengths, shape_of
from verl.planner.shapes import ModelShape
from verl.planner.step_time import layer_matmuls, mlp_matmuls
from verl.planner.workload import Lengths, Workload

_UNLIMITED = 8192  # tokens of the longest row where data.max_length sets no limit


def lora_parameters(shape: ModelShape, rank: int) -> int:
    """Parameters of adapters of `rank` on all matrices of attention and of the dense MLP."""
    sizes = [*layer_matmuls(shape, 1), *mlp_matmuls(shape, shape.shared_intermediate or shape.intermediate, 1)]
    return round(shape.num_layers * sum(rank * (n + k) for n, k in sizes))


def dataflow_of(config: RunConfig) -> Dataflow:
    """The roles and calls of the config of a program. Raises ConfigError for a model whose shape is not known."""
    if isinstance(config, PPOConfig):
        return _ppo(config)
    shape, rank = shape_of(config.model.path), config.model.lora_rank
    trainable = lora_parameters(shape, rank) if rank else None
    if isinstance(config, PreferenceConfig):
        # under LoRA the reference is the policy without its adapters
        own = has_reference_role(config) and not (rank and not config.ref.model_path)
        reference = shape_of(config.ref.model_path or config.model.path) if own else None
        return Dataflow.preference(shape, reference, trainable)
    return Dataflow.sft(shape, trainable, name="rm" if isinstance(config, RMConfig) else "sft")


def _ppo(config: PPOConfig) -> Dataflow:
    group = config.actor_rollout_ref
    actor = shape_of(group.model.path)
    rank = group.model.lora_rank
    critic = shape_of(config.critic.model.path) if uses_critic(config) else None
    reference = actor if uses_reference(config) and not rank else None
    judged = config.reward.reward_model
    reward = shape_of(judged.model_path) if judged.enable and judged.model_path else None
    taught = config.distillation.teachers() if config.distillation.enabled else {}
    several = config.data.train_batch_size > group.actor.ppo_mini_batch_size or group.actor.ppo_epochs > 1
    return Dataflow.ppo(
        actor,
        critic,
        reference,
        reward,
        {
            "teacher" if name == "teacher_model" else f"teacher_{name}": shape_of(str(one.model_path))
            for name, one in taught.items()
        },
        old_log_probs=several,
        trainable=lora_parameters(actor, rank) if rank else None,
    )


def workload_of(config: RunConfig, asked: WorkloadRequest) -> Workload:
    """The step of a config. Lengths that are not given are half the limits, with a wide distribution. Programs that train on
    given rows have the lengths of whole rows, less the prompt where `prompt_mean` is given."""
    if isinstance(config, PPOConfig):
        return _sampled(config, asked)
    longest = float(config.data.max_length or _UNLIMITED)
    prompt = asked.prompt_mean or 0.0
    pairs = (isinstance(config, PreferenceConfig) and not set(config.preference.losses) & set(LABELLED_LOSSES)) or (
        isinstance(config, RMConfig) and config.rm.loss in PAIR_LOSSES
    )
    return Workload(
        config.data.train_batch_size,
        2 if pairs else 1,
        prompt,
        _lengths(asked, max(longest - prompt, 1.0)),
        shares_prompts=True,
        image_tokens=asked.image_tokens or 0.0,
    )


def _sampled(config: PPOConfig, asked: WorkloadRequest) -> Workload:
    rollout, actor = config.actor_rollout_ref.rollout, config.actor_rollout_ref.actor
    prompts = config.data.train_batch_size
    updates = max(1, -(-prompts // actor.ppo_mini_batch_size))
    return Workload(
        prompts,
        rollout.n,
        asked.prompt_mean or rollout.prompt_length / 2,
        _lengths(asked, rollout.response_length),
        updates=updates,
        epochs=actor.ppo_epochs,
        prompt_longest=rollout.prompt_length,
        # a shuffled pass parts the samples of a prompt
        shares_prompts=not (actor.shuffle and updates > 1),
        image_tokens=asked.image_tokens or 0.0,
    )


def _lengths(asked: WorkloadRequest, limit: float) -> Lengths:
    if asked.samples is not None:
        return Lengths.from_samples(read_lengths(Path(asked.samples).expanduser()))
    if asked.response is not None:
        return Lengths.through(*asked.response)
    return Lengths.of(limit / 2, limit)
