"""The arguments and the environment of vLLM, from the config of a run."""

import os
from typing import Any

import torch
import torch.distributed as dist

from verl.config import RolloutConfig, full_key
from verl.config.active_keys import WITHOUT, quantized_keys
from verl.errors import ConfigError
from verl.models.folder import fetch, read_headers
from verl.models.heads import is_further_head
from verl.models.rope import row_limits
from verl.models.vision import is_vision_model
from verl.parallel.device import visible_devices
from verl.parallel.memory import available_memory
from verl.rollout.api import WeightTransfer
from verl.rollout.vllm.core import Setup

_RECEIVER = "verl.rollout.vllm.weights.OwnWeightReceiver"
_DRAW = "verl.rollout.vllm.library:Sampler"
_RANKS = "verl.rollout.vllm.library.Ranks"
_LONGEST_LOOKUP = 4  # last tokens that vLLM looks up
_BLOCK_TOKENS = 128  # of vLLM's cache on a CPU
_MOST_OF_MEMORY = 8  # at most one part in so many of the free memory of a CPU machine is cache


def make_setup(
    config: RolloutConfig,
    transfer: WeightTransfer,
    skeleton: object,
    *,
    eos_token_ids: tuple[int, ...],
    vocab_size: int,
) -> Setup:
    """`skeleton` is a meta-device model. Entries of rollout.engine_kwargs.vllm override all arguments made here."""
    on_cpu = transfer.device.type == "cpu"
    longest = longest_sequence(config, skeleton)
    arguments: dict[str, object] = {
        "model": transfer.model.path,
        "tokenizer": transfer.model.tokenizer_path or transfer.model.path,
        "skip_tokenizer_init": not is_vision_model(skeleton),  # tokens in, tokens out; images need vLLM's own processor
        "trust_remote_code": transfer.model.trust_remote_code,
        # how attention is computed is vLLM's business
        "hf_overrides": {k: v for k, v in (transfer.model.override_config or {}).items() if k != "attn_implementation"},
        "dtype": str(transfer.dtype).removeprefix("torch."),
        "seed": config.seed,
        "tensor_parallel_size": config.tensor_model_parallel_size,
        "enable_expert_parallel": config.expert_parallel_size > 1,
        "max_model_len": longest,
        "max_num_seqs": config.max_num_seqs,
        "max_num_batched_tokens": max(config.max_num_batched_tokens, longest),
        "enable_prefix_caching": config.enable_prefix_caching,
        "enable_chunked_prefill": config.enable_chunked_prefill,
        # on a CPU compiling takes minutes and gains a tenth
        "enforce_eager": config.enforce_eager or on_cpu,
        "logprobs_mode": "processed_logits",
        "logits_processors": [_DRAW],
        "worker_extension_cls": _RECEIVER,
    }
    if config.speculative.methods:
        arguments["speculative_config"] = _drafts(config, on_cpu, transfer.model.path, skeleton)
    # vLLM quantizes the weights of each update by itself
    arguments |= fp8_arguments(config, on_cpu, {"quantization": "fp8_per_block", "kv_cache_dtype": "fp8"})
    if config.enable_rollout_routing_replay:
        arguments["enable_return_routed_experts"] = True
    if on_cpu:
        arguments["kv_cache_memory_bytes"] = _cache_bytes(config, longest, skeleton, transfer.dtype)
    else:
        arguments["gpu_memory_utilization"] = config.gpu_memory_utilization
        arguments["enable_sleep_mode"] = config.free_cache_engine
    in_ranks = not transfer.in_process and dist.is_initialized() and dist.get_world_size() > 1
    if in_ranks:
        arguments["distributed_executor_backend"] = _RANKS
    elif transfer.in_process and config.tensor_model_parallel_size > 1:
        arguments["distributed_executor_backend"] = "mp"  # on its own vLLM may look for a cluster of Ray
    return Setup(
        llm={**arguments, **config.engine_kwargs.vllm},
        environment=_environment(transfer, config.tensor_model_parallel_size),
        eos_token_ids=list(eos_token_ids),
        vocab_size=vocab_size,
        reader=transfer.reader,
        sleeps=config.free_cache_engine and not on_cpu,
        in_ranks=in_ranks,
    )


def _drafts(config: RolloutConfig, on_cpu: bool, path: str, skeleton: Any) -> dict[str, object]:
    """vLLM's settings of drafts. Raises ConfigError on a CPU, whose runner has no drafts with processors of logits, and for
    heads that the folder `path` does not have."""
    key, method = full_key("rollout.speculative.methods"), config.speculative.methods[0]
    if on_cpu:
        raise ConfigError(
            f"vLLM takes no drafts with verl's sampler on a CPU. Set {key}=[], or {full_key('rollout.name')}=native."
        )
    if method == "mtp":
        names = read_headers(fetch(path, weights=True))
        if not any(is_further_head(name, skeleton.config) for name in names):
            raise ConfigError(
                f"{key}=[mtp]: {path} has no heads that predict further tokens. Set {key}=[ngram], or [model] with a "
                "draft model."
            )
    by_method: dict[str, dict[str, object]] = {
        "ngram": {"method": "ngram", "prompt_lookup_min": 2, "prompt_lookup_max": _LONGEST_LOOKUP},
        "model": {"method": "draft_model", "model": config.speculative.model_path},
        "mtp": {"method": "mtp"},
    }
    return {**by_method[method], "num_speculative_tokens": config.speculative.num_speculative_tokens}


def fp8_arguments(config: RolloutConfig, on_cpu: bool, values: dict[str, str]) -> dict[str, object]:
    """Arguments of an engine that computes in fp8, with its `values` of them. Raises ConfigError on a CPU."""
    chosen = quantized_keys(config)
    for key, value in chosen.items() if on_cpu else ():
        name = full_key("rollout.name")
        raise ConfigError(
            f"{key}={value} needs a GPU with {name}={config.name}. Set {key}={WITHOUT[key]}, or {key}=int8 with {name}=native."
        )
    return {name: value for name, value in values.items() if full_key(f"rollout.{name}") in chosen}


def longest_sequence(config: RolloutConfig, skeleton: Any) -> int:
    """The maximum length of a sequence, prompt and response together, in tokens; at most the positions of the model."""
    response = max(config.response_length, config.val_kwargs.max_new_tokens or 0)
    length = config.max_model_len or config.prompt_length + response
    return min([length, *(limit for limit, _ in row_limits(skeleton.config.get_text_config()))])


def _environment(transfer: WeightTransfer, num_devices: int) -> dict[str, str]:
    """Environment of the process while vLLM starts. The user's variables stay, except for variables that this engine needs."""
    wishes = {"VLLM_NO_USAGE_STATS": "1", "VLLM_LOGGING_LEVEL": "WARNING", "VLLM_HOST_IP": "127.0.0.1"}
    if transfer.device.type == "cpu":
        # by itself vLLM takes one core less than there are and stays on it
        num_ranks = num_devices if dist.is_initialized() else 1  # each rank has its share of the cores already
        num_threads = max(1, torch.get_num_threads() * num_ranks // num_devices)
        wishes |= {"VLLM_CPU_OMP_THREADS_BIND": "nobind", "OMP_NUM_THREADS": str(num_threads)}
    elif transfer.in_process:  # CUDA has counted the devices of this process already
        visible = transfer.visible_devices or _own_devices(transfer.device, num_devices)
        wishes |= {"CUDA_VISIBLE_DEVICES": ",".join(visible)} if visible else {}
    needs = {"VLLM_ENABLE_V1_MULTIPROCESSING": "0"}  # the engine stays in its process
    always = ("CUDA_VISIBLE_DEVICES", "OMP_NUM_THREADS")
    return {**{k: v for k, v in wishes.items() if k in always or k not in os.environ}, **needs}


def _own_devices(device: torch.device, num_devices: int) -> tuple[str, ...]:
    """`device` of this process and the devices that follow it; () for a single `device` without an index. Raises ConfigError
    when there are too few."""
    first, visible = device.index or 0, visible_devices()
    if num_devices == 1:
        return () if device.index is None else (visible[first] if first < len(visible) else str(first),)
    if first + num_devices > len(visible):
        raise ConfigError(
            f"{full_key('rollout.tensor_model_parallel_size')}={num_devices} needs as many GPUs, and this run has "
            f"{len(visible) - first} (trainer.n_gpus_per_node). Lower the first, or raise the second."
        )
    return visible[first : first + num_devices]


def _cache_bytes(rollout: RolloutConfig, longest: int, skeleton: Any, dtype: torch.dtype) -> int:
    """Cache bytes of a worker: all samples at their longest, at most an eighth of the free memory, at least two samples."""
    config = skeleton.config.get_text_config()
    heads = getattr(config, "num_key_value_heads", None) or config.num_attention_heads
    heads = -(-heads // rollout.tensor_model_parallel_size)
    size = getattr(config, "head_dim", None) or config.hidden_size // config.num_attention_heads
    block = int(2 * config.num_hidden_layers * heads * size * dtype.itemsize * _BLOCK_TOKENS)
    one = (-(-longest // _BLOCK_TOKENS) + 1) * block
    limit = available_memory() // _MOST_OF_MEMORY // rollout.tensor_model_parallel_size
    return max(2 * one, min(rollout.max_num_seqs * one, limit // block * block))
