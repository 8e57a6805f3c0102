"""Memory and disk of a run: estimates from shapes, and checks against the free memory and disk.

Estimates are within about a quarter: they catch a wrong order of magnitude.
"""

import math
import shutil
from collections.abc import Iterator, Mapping
from dataclasses import replace
from operator import add
from pathlib import Path
from typing import Any

from verl.cli.checklist import Subject
from verl.cli.report import Level, Line, fail, passed, skip, warn
from verl.config import FSDPConfig, PPOConfig, PreferenceConfig, RolloutConfig, SFTConfig
from verl.config.active_keys import (
    REUSED_SHARE,
    reuse_obstacle,
    runs_on_several_devices,
    starts_engine,
    uses_critic,
    uses_reference,
)
from verl.config.roots.preference import has_reference_role
from verl.config.sections.actor import ActorConfig
from verl.config.sections.model import ModelConfig
from verl.config.sections.trainer import AFTER_EACH_EPOCH
from verl.families import DEFAULT_ROLLOUT, engine_facts
from verl.models.memory import (
    FLOAT32,
    WEIGHT,
    ParallelLayout,
    Recompute,
    kept_activations,
    kv_bytes_per_token,
    memory,
    optimizer_bytes,
    recorded_activations,
    state_bytes,
)
from verl.models.shapes import ModelShape
from verl.parallel.memory import available_memory, memory_limit
from verl.rollout.api import keeps_keys

ADAM_STATES = 2 * FLOAT32
# a Python process with PyTorch and transformers; a reward worker with its scorers
PROCESS_BYTES = 700_000_000
REWARD_WORKER_BYTES = 60_000_000
_CHUNK_ELEMENTS = 1 << 26  # of logits that exist at once (verl/models/log_probs.py)
_ENGINE = "rollout engine or gradients and activations"
_ENGINE_OVER_WEIGHTS = 1.25  # least memory of a rollout engine over its weights
_TIGHT = 0.8  # above this share of the free memory the estimate may be too low


def trained_bytes(num_parameters: int, width: int) -> int:
    """Bytes of weights of `width` bytes, float32 gradients, and what AdamW keeps."""
    return num_parameters * (width + FLOAT32 + optimizer_bytes(width))


def host_bytes(engine: FSDPConfig, num_parameters: int, width: int) -> int:
    """Bytes of `trained_bytes` that the engine of one GPU keeps in host memory."""
    masters = 2 * FLOAT32 if engine.param_offload and width < FLOAT32 else 0  # and their gradients
    return num_parameters * (masters + (ADAM_STATES if engine.optimizer_offload else 0))


def bytes_for_restarts(config: PPOConfig, num_parameters: int, width: int) -> int:
    """Bytes of the weights that a host keeps for rollout engines that are lost (verl/reshard/delivery.py)."""
    rollout = config.actor_rollout_ref.rollout
    restarts = engine_facts(rollout.name).restarts and rollout.mode == "async" and rollout.max_engine_restarts
    return num_parameters * width if restarts else 0


def checkpoint_bytes(num_parameters: int, contents: list[str]) -> int:
    """Bytes of float32 weights and AdamW's states, if `contents` includes them."""
    weights = FLOAT32 if {"model", "hf_model"} & set(contents) else 0
    return num_parameters * (weights + (ADAM_STATES if "optimizer" in contents else 0))


def cache_bytes(
    model: ModelShape, rollout: RolloutConfig, num_samples: int, samples_per_prompt: int, width: int
) -> int:
    """Bytes of keys and values of `num_samples` concurrent samples; the samples of a prompt share its keys and values."""
    num_prompts = -(-num_samples // max(1, samples_per_prompt))
    tokens = num_samples * rollout.response_length + num_prompts * rollout.prompt_length
    states = state_bytes(model) * (num_samples + num_prompts)
    return int(kv_bytes_per_token(model, 1, width, rollout.kv_cache_dtype) * tokens + states)


def activation_bytes(model: ModelShape, num_tokens: int, width: int, recompute: Recompute) -> int:
    """Bytes that a micro-batch of `num_tokens` tokens adds: activations kept for the backward pass, and the buffers of the
    current layer and of a chunk of logits."""
    layout = ParallelLayout(zero=0, recompute=recompute, logit_chunk=_CHUNK_ELEMENTS // max(model.vocab, 1) or 1)
    return int(memory(model, layout, tokens=num_tokens, width=width).transient)


def memory_needed(
    config: PPOConfig,
    policy: ModelShape,
    critic: ModelShape | None,
    width: int,
    *,
    engine_bytes: int = 0,
    offloads: bool = False,
) -> dict[str, int]:
    """Bytes by purpose at the peak of a step, with all roles on one device. `engine_bytes`: memory that the rollout engine
    reserves (0: it generates in the trainer's memory). `offloads`: on a GPU, the keys of offload free memory."""
    group, data = config.actor_rollout_ref, config.data
    rollout, actor = group.rollout, group.actor
    trained = [("actor", policy, actor.fsdp_config)]
    if uses_critic(config) and critic is not None:
        trained.append(("critic", critic, config.critic.fsdp))
    parts = {}
    for role, shape, engine in trained:
        on_host = host_bytes(engine, shape.num_parameters, width) if offloads else 0
        parts[role] = trained_bytes(shape.num_parameters, width) - on_host
    if uses_reference(config) and not config.actor_rollout_ref.model.lends_its_base:
        parts["reference"] = policy.num_parameters * width
    samples = min(rollout.max_num_seqs, data.train_batch_size * rollout.n)
    cache = cache_bytes(policy, rollout, samples, rollout.n, width)
    active = activation_bytes(policy, _trained_tokens(config), width, _recompute(group.model, on_gpu=offloads))
    if engine_bytes:
        on_host = offloads and actor.fsdp_config.param_offload and width < FLOAT32
        gradients = 0 if on_host else FLOAT32 * policy.num_parameters  # there are none while it generates
        parts["actor"] -= gradients
        together = max if rollout.free_cache_engine else add
        parts[_ENGINE] = together(engine_bytes, gradients + active)
    elif rollout.free_cache_engine:  # the cache and the activations are never held together
        parts["KV cache" if cache > active else "activations"] = max(cache, active)
    else:
        parts["KV cache"], parts["activations"] = cache, active
    pauses = rollout.partial_rollout or rollout.in_flight_updates
    if keeps_keys(rollout) and pauses and not offloads:  # a GPU's are in the host's memory
        unfinished = rollout.prefetch_num * data.train_batch_size * rollout.n
        unfinished = min(unfinished, rollout.max_num_seqs) if rollout.in_flight_updates else unfinished
        parts["KV cache of unfinished responses"] = cache_bytes(policy, rollout, unfinished, 1, width)
    saved = [(actor, policy), *([(config.critic, critic)] if "critic" in parts and critic is not None else [])]
    if size := sum(_background_save_bytes(role, shape) for role, shape in saved):
        parts["copy for async_save"] = size
    parts["processes"] = PROCESS_BYTES + config.reward.num_workers * REWARD_WORKER_BYTES
    return parts


def memory_of_fine_tuning(
    config: SFTConfig | PreferenceConfig, model: ModelShape, width: int, on_host: int = 0, *, on_gpu: bool = False
) -> dict[str, int]:
    """Bytes by purpose at the peak of a step on given rows, on one device; `on_host` of the state are in host memory."""
    tokens = _trained_tokens(config)
    parts = {
        "model": trained_bytes(model.num_parameters, width) - on_host,
        "activations": activation_bytes(model, tokens, width, _recompute(config.model, on_gpu=on_gpu)),
        "processes": PROCESS_BYTES,
    }
    if (
        isinstance(config, PreferenceConfig)
        and has_reference_role(config)
        and (config.ref.model_path or not config.model.lends_its_base)
    ):
        parts["reference"] = model.num_parameters * width
    if size := _background_save_bytes(config, model):
        parts["copy for async_save"] = size
    return parts


def _trained_tokens(config: PPOConfig | SFTConfig | PreferenceConfig) -> int:
    """Tokens of the largest micro-batch that trains."""
    if isinstance(config, PPOConfig):
        rollout, actor = config.actor_rollout_ref.rollout, config.actor_rollout_ref.actor
        length = rollout.prompt_length + rollout.response_length
        return min(_micro_batch_tokens(actor, length), actor.ppo_mini_batch_size * rollout.n * length)
    data = config.data
    if not data.use_dynamic_bsz and data.micro_batch_size_per_gpu and data.max_length:
        return data.micro_batch_size_per_gpu * data.max_length
    return data.max_token_len_per_gpu


def _recompute(model: ModelConfig, *, on_gpu: bool) -> Recompute:
    return "host" if on_gpu and model.enable_activation_offload and model.recompute == "full" else model.recompute


def input_bytes(config: PPOConfig | SFTConfig | PreferenceConfig, model: ModelShape, width: int) -> int:
    """Bytes of the layers' inputs that the host of a GPU holds during a micro-batch."""
    section = config.actor_rollout_ref.model if isinstance(config, PPOConfig) else config.model
    moves = _recompute(section, on_gpu=True) == "host"
    inputs = kept_activations(model, ParallelLayout(recompute="full"), _trained_tokens(config), 0)
    return int(inputs * width / WEIGHT) if moves else 0


def _background_save_bytes(role: Any, model: ModelShape) -> int:
    """Bytes that a role copies while it saves in the background."""
    saved = checkpoint_bytes(model.num_parameters, role.checkpoint.save_contents)
    return saved if role.checkpoint.async_save else 0


def _what_to_lower(config: PPOConfig | SFTConfig | PreferenceConfig, parts: Mapping[str, int]) -> str:
    """The keys that the largest part of the memory depends on."""
    if isinstance(config, PPOConfig):
        model, actor, prefix = (
            config.actor_rollout_ref.model,
            config.actor_rollout_ref.actor,
            "actor_rollout_ref.actor.ppo_",
        )
        by_rows = not actor.use_dynamic_bsz and (actor.ppo_micro_batch_size_per_gpu or actor.ppo_micro_batch_size)
    else:
        model, data, prefix = config.model, config.data, "data."
        by_rows = not data.use_dynamic_bsz and data.micro_batch_size_per_gpu and data.max_length
    micro_batch = f"{prefix}{'micro_batch_size_per_gpu' if by_rows else 'max_token_len_per_gpu'}"
    sizes = {"activations": micro_batch, "KV cache": "actor_rollout_ref.rollout.max_num_seqs"}
    keys = " or ".join(key for part, key in sizes.items() if part in parts) or micro_batch
    keeps = "activations" in parts and model.recompute != "full"
    return f"{keys}, set model.enable_gradient_checkpointing=True" if keeps else keys


def _micro_batch_tokens(actor: ActorConfig, length: int) -> int:
    rows = actor.ppo_micro_batch_size_per_gpu or actor.ppo_micro_batch_size
    return actor.ppo_max_token_len_per_gpu if actor.use_dynamic_bsz or rows is None else rows * length


def check_memory(subject: Subject) -> Iterator[Line]:
    """The estimated peak of a step against the free memory."""
    from verl.parallel.device import compute_dtype, resolve_device

    if subject.policy is None:
        yield skip("not estimated without a model")
        return
    if runs_on_several_devices(subject.config):
        yield skip("not estimated for a run over several devices; `verl plan` with the same keys does")
        return
    device = resolve_device(subject.config.trainer.device)
    width = compute_dtype(subject.engine.dtype, device).itemsize
    free, capacity = _device_bytes(str(device))
    on_gpu, size = device.type == "cuda", subject.policy.num_parameters
    on_host, restarts = host_bytes(subject.engine, size, width) if on_gpu else 0, 0
    if subject.loaded.schema.name == "ppo":
        rollout = subject.config.actor_rollout_ref.rollout
        shares = on_gpu and starts_engine(subject.config)
        reserved = int(rollout.gpu_memory_utilization * capacity) if shares else 0
        parts = memory_needed(
            subject.config, subject.policy, subject.critic, width, engine_bytes=reserved, offloads=on_gpu
        )
        keys = _what_to_lower(subject.config, parts)
        if reserved and (parts[_ENGINE] == reserved or not rollout.free_cache_engine):
            keys = _share_that_fits(parts, reserved, free, capacity, size * width)
        restarts = bytes_for_restarts(subject.config, size, width)
        if restarts and not on_gpu:
            parts["copy of the weights for max_engine_restarts"] = restarts
        if device.type == "cpu" and (recorded := _recorded_bytes(subject.config, subject.policy, free)):
            parts["activations for reuse"] = recorded
    else:
        parts = memory_of_fine_tuning(subject.config, subject.policy, width, on_host, on_gpu=on_gpu)
        keys = _what_to_lower(subject.config, parts)
    total = sum(parts.values())
    could_move = host_bytes(replace(subject.engine, param_offload=True, optimizer_offload=True), size, width) - on_host
    if on_gpu and could_move and total > free >= total - could_move:
        engine = "actor_rollout_ref.actor.fsdp_config" if subject.loaded.schema.name == "ppo" else "engine"
        keys = f"{keys}, set param_offload=True and optimizer_offload=True of {engine}"
    level: Level = "fail" if total > free else "warn" if total > _TIGHT * free else "pass"
    listed = ", ".join(f"{name} {size / 1e9:.2f}" for name, size in parts.items())
    fix = f"; lower {keys}, or use a smaller model" if level != "pass" else ""
    yield Line(level, f"about {total / 1e9:.1f} GB of {free / 1e9:.1f} GB free ({listed}){fix}")
    if on_gpu:
        inputs = input_bytes(subject.config, subject.policy, width)
        uses = {
            "offload": on_host,
            "inputs of layers": inputs,
            "a copy of the weights for rollout.max_engine_restarts": restarts,
        }
        yield from _check_host({use: num_bytes for use, num_bytes in uses.items() if num_bytes})


def _check_host(uses: dict[str, int]) -> Iterator[Line]:
    """The memory of a GPU's host, by use."""
    host, needed = available_memory(), sum(uses.values())
    said = f"{needed / 1e9:.1f} GB of {host / 1e9:.1f} GB free in the host's memory, by {' and '.join(uses)}"
    if needed > host:
        fix = " or set max_engine_restarts=0" if any("max_engine_restarts" in use for use in uses) else ""
        yield fail(f"{said}; use a smaller model, offload less{fix}")
    elif uses:
        yield passed(said)


def reused_bytes(config: PPOConfig) -> float:
    """Most bytes of activations that the sampler of a run on a CPU keeps for the update (verl/rollout/native/recording.py)."""
    from verl.parallel.device import compute_dtype, resolve_device

    group, rollout = config.actor_rollout_ref, config.actor_rollout_ref.rollout
    dtype = compute_dtype(group.actor.fsdp_config.dtype, resolve_device("cpu"))
    is_whole = engine_facts(rollout.name).reuses_activations and not group.model.lora_rank
    records = is_whole and reuse_obstacle(rollout) is None and str(dtype) == "torch.bfloat16"
    return rollout.reuse_activations_gb * 1e9 if records else 0.0


def _recorded_bytes(config: PPOConfig, policy: ModelShape, free: int) -> int:
    """Bytes of activations that the sampler keeps for the update, if all samples have their longest lengths."""
    rollout = config.actor_rollout_ref.rollout
    tokens = config.data.train_batch_size * (rollout.prompt_length + rollout.n * rollout.response_length)
    return int(recorded_activations(policy, tokens, min(reused_bytes(config), free // REUSED_SHARE)))


def _share_that_fits(parts: dict[str, int], reserved: int, free: int, capacity: int, weights: int) -> str:
    """The keys to lower if a rollout engine reserves `reserved` bytes of a GPU, with the share that fits."""
    share = math.floor(100 * (_TIGHT * free - sum(parts.values()) + reserved) / capacity) / 100
    key = "actor_rollout_ref.rollout.gpu_memory_utilization"
    if share * capacity > _ENGINE_OVER_WEIGHTS * weights:
        return f"{key} to {share:.2f}"
    offload = "actor_rollout_ref.actor.fsdp_config.optimizer_offload=True"
    return f"{key}, set {offload} or actor_rollout_ref.rollout.name={DEFAULT_ROLLOUT}"


def check_disk(subject: Subject) -> Iterator[Line]:
    """One checkpoint must fit on the disk; all that are kept should."""
    if subject.policy is None:
        yield skip("not estimated without a model")
        return
    config = subject.config
    is_ppo = subject.loaded.schema.name == "ppo"
    trained = config.actor_rollout_ref.actor if is_ppo else config
    size = checkpoint_bytes(subject.policy.num_parameters, trained.checkpoint.save_contents)
    if subject.critic is not None:
        size += checkpoint_bytes(subject.critic.num_parameters, config.critic.checkpoint.save_contents)
    folder = Path(config.trainer.default_local_dir).expanduser().absolute()
    free = shutil.disk_usage(next(p for p in (folder, *folder.parents) if p.exists())).free
    free -= int(config.trainer.min_free_disk_gb * 1e9)
    at_once = num_checkpoints(subject)
    line = (
        f"{at_once} checkpoint{'s' if at_once > 1 else ''} of {size / 1e9:.2f} GB, "
        f"{max(0, free) / 1e9:.1f} GB free beyond trainer.min_free_disk_gb"
    )
    if size > free:
        yield fail(f"{line}; set trainer.default_local_dir to a larger disk")
    elif at_once * size > free:
        key = "trainer.max_actor_ckpt_to_keep" if is_ppo else "trainer.max_ckpt_to_keep"
        yield warn(f"{line}; keep fewer ({key}), or set a larger trainer.save_freq")
    else:
        yield passed(line)


def num_checkpoints(subject: Subject) -> int:
    """Largest number of checkpoints on disk at once, including the one being written; 2 if the steps are unknown."""
    trainer, keep = subject.config.trainer, subject.config.trainer.num_checkpoints_kept
    if trainer.save_freq == AFTER_EACH_EPOCH:
        saves = trainer.total_epochs
    elif trainer.save_freq <= 0:
        return 1
    else:
        saves = -(-subject.num_steps // trainer.save_freq) if subject.num_steps else 2
    return max(1, int(min(saves, keep + 1) if keep else saves))


def _device_bytes(device: str) -> tuple[int, int]:
    """(free bytes, all bytes) of the device."""
    if device.startswith("cuda"):
        import torch

        return torch.cuda.mem_get_info(device)
    return available_memory(), memory_limit()
