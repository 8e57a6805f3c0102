"""`*.megatron`: sizes and switches of the Megatron engine. Accepted everywhere, read by that engine only."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from verl.config.keys import MEGATRON, Section, inert


@dataclass(frozen=True)
class MegatronConfig(Section):
    tensor_model_parallel_size: int = inert(1, "devices that share one layer", MEGATRON)
    pipeline_model_parallel_size: int = inert(1, "stages of layers", MEGATRON)
    virtual_pipeline_model_parallel_size: int | None = inert(None, "interleaved stages per device", MEGATRON)
    context_parallel_size: int = inert(1, "devices that share one sequence", MEGATRON)
    expert_model_parallel_size: int = inert(1, "devices that share the experts", MEGATRON)
    expert_tensor_parallel_size: int | None = inert(None, "devices that share one expert", MEGATRON)
    dynamic_context_parallel: bool = inert(False, "context parallel size by sequence length", MEGATRON)
    max_seqlen_per_dp_cp_rank: int | None = inert(None, "tokens per device of that mode", MEGATRON)
    sequence_parallel: bool = inert(True, "split activations along the sequence", MEGATRON)
    use_distributed_optimizer: bool = inert(True, "shard the optimizer state", MEGATRON)
    param_offload: bool = inert(False, "keep parameters on the CPU between uses", MEGATRON)
    grad_offload: bool = inert(False, "keep gradients on the CPU between uses", MEGATRON)
    optimizer_offload: bool = inert(False, "keep optimizer state on the CPU between uses", MEGATRON)
    use_dist_checkpointing: bool = inert(False, "load weights from a distributed checkpoint", MEGATRON)
    dist_checkpointing_path: str | None = inert(None, "folder of that checkpoint", MEGATRON)
    dist_checkpointing_prefix: str = inert("", "prefix of its names", MEGATRON)
    dist_ckpt_optim_fully_reshardable: bool = inert(False, "optimizer state independent of the layout", MEGATRON)
    distrib_optim_fully_reshardable_mem_efficient: bool = inert(False, "the same in less memory", MEGATRON)
    use_mbridge: bool = inert(True, "convert Hugging Face weights while loading", MEGATRON)
    vanilla_mbridge: bool = inert(True, "which bridge converts", MEGATRON)
    use_remove_padding: bool = inert(True, "compute no padding", MEGATRON)
    use_megatron_fsdp: bool = inert(False, "Megatron's own FSDP", MEGATRON)
    seed: int = inert(42, "seed of the engine", MEGATRON)
    dtype: str = inert("bfloat16", "compute dtype", MEGATRON)
    forward_only: bool = inert(False, "the engine never trains", MEGATRON)
    load_weight: bool = inert(True, "load weights at start", MEGATRON)
    override_ddp_config: dict[str, Any] = inert({}, "further settings of Megatron's DDP", MEGATRON)
    override_transformer_config: dict[str, Any] = inert({}, "further settings of its transformer", MEGATRON)
    override_mcore_model_config: dict[str, Any] = inert({}, "further settings of its model", MEGATRON)
    extra: dict[str, Any] = inert({}, "settings of plugins", MEGATRON)
    qat: dict[str, Any] = inert({}, "quantisation-aware training", MEGATRON)
