"""How many bytes a run needs, from shapes alone. Estimates: right to about a quarter, meant to catch a factor."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from verl.config import VerlConfig
from verl.config.active_keys import uses_critic, uses_reference

FLOAT32 = 4
ADAM_STATES = 2 * FLOAT32
# a Python with PyTorch and transformers in it; a reward worker with its scorers imported
PROCESS_BYTES = 700_000_000
REWARD_WORKER_BYTES = 60_000_000


@dataclass(frozen=True)
class ModelShape:
    """The sizes of a model that decide its memory."""

    num_parameters: int
    num_layers: int
    hidden: int
    intermediate: int
    kv_heads: int
    head_dim: int
    max_positions: int | None

    @classmethod
    def of(cls, num_parameters: int, config: Any) -> ModelShape:
        """From a transformers config of a decoder."""
        text = config.get_text_config()
        heads = text.num_attention_heads
        return cls(
            num_parameters=num_parameters,
            num_layers=text.num_hidden_layers,
            hidden=text.hidden_size,
            intermediate=getattr(text, "intermediate_size", None) or 4 * text.hidden_size,
            kv_heads=getattr(text, "num_key_value_heads", None) or heads,
            head_dim=getattr(text, "head_dim", None) or text.hidden_size // heads,
            max_positions=getattr(text, "max_position_embeddings", None),
        )


def trained_bytes(num_parameters: int, width: int) -> int:
    """Weights, float32 gradients and AdamW's two states; float32 masters beside weights narrower than that. `width`:
    bytes of a weight in computation."""
    masters = FLOAT32 if width < FLOAT32 else 0
    return num_parameters * (width + masters + FLOAT32 + ADAM_STATES)


def checkpoint_bytes(num_parameters: int, contents: list[str]) -> int:
    """Float32 weights and AdamW's states, as far as `contents` asks for them."""
    weights = FLOAT32 if {"model", "hf_model"} & set(contents) else 0
    return num_parameters * (weights + (ADAM_STATES if "optimizer" in contents else 0))


def cache_bytes(
    model: ModelShape, num_samples: int, samples_per_prompt: int, prompt: int, response: int, width: int
) -> int:
    """Keys and values of `num_samples` running at once; the samples of a prompt share its part."""
    num_prompts = -(-num_samples // max(1, samples_per_prompt))
    tokens = num_samples * response + num_prompts * prompt
    return 2 * model.num_layers * model.kv_heads * model.head_dim * width * tokens


def activation_bytes(model: ModelShape, num_tokens: int, width: int, *, checkpointing: bool) -> int:
    """What the backward pass of a micro-batch of `num_tokens` tokens keeps. A layer keeps about ten vectors of the hidden
    size and four of the intermediate size per token; with checkpointing its input alone, and one layer in full."""
    layer = (10 * model.hidden + 4 * model.intermediate) * width
    if checkpointing:
        return num_tokens * (model.num_layers * model.hidden * width + layer)
    return num_tokens * model.num_layers * layer


def memory_needed(config: VerlConfig, policy: ModelShape, critic: ModelShape | None, width: int) -> dict[str, int]:
    """Bytes by purpose at the peak of a step, all roles on one device."""
    group, data = config.actor_rollout_ref, config.data
    rollout, actor = group.rollout, group.actor
    length = rollout.prompt_length + rollout.response_length
    parts = {"actor": trained_bytes(policy.num_parameters, width)}
    if uses_critic(config) and critic is not None:
        parts["critic"] = trained_bytes(critic.num_parameters, width)
    if uses_reference(config):
        parts["reference"] = policy.num_parameters * width
    samples = min(rollout.max_num_seqs, data.train_batch_size * rollout.n)
    cache = cache_bytes(policy, samples, rollout.n, rollout.prompt_length, rollout.response_length, width)
    tokens = min(_micro_batch_tokens(actor, length), actor.ppo_mini_batch_size * rollout.n * length)
    active = activation_bytes(policy, tokens, width, checkpointing=group.model.enable_gradient_checkpointing)
    if rollout.free_cache_engine:  # then the cache and the activations are never there together
        parts["KV cache or activations"] = max(cache, active)
    else:
        parts["KV cache"], parts["activations"] = cache, active
    copies = [(actor, policy), *([(config.critic, critic)] if uses_critic(config) and critic is not None else [])]
    if size := sum(_copied_bytes(role, shape) for role, shape in copies):
        parts["copy for async_save"] = size
    parts["processes"] = PROCESS_BYTES + config.reward.num_workers * REWARD_WORKER_BYTES
    return parts


def _copied_bytes(role: Any, model: ModelShape) -> int:
    """What a role keeps twice while it saves in the background."""
    saved = checkpoint_bytes(model.num_parameters, role.checkpoint.save_contents)
    return saved if role.checkpoint.async_save else 0


def _micro_batch_tokens(actor: Any, length: int) -> int:
    rows = actor.ppo_micro_batch_size_per_gpu or actor.ppo_micro_batch_size
    return actor.ppo_max_token_len_per_gpu if actor.use_dynamic_bsz or rows is None else rows * length
