"""`*.fsdp_config` and `critic.fsdp`: the PyTorch-native training engine."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from verl.config.keys import DISTRIBUTED, ONE_PROCESS, Section, inert, section, used

FUSED_LOG_PROBS = "log-probabilities and entropy are always computed in chunks, full logits never exist"
DTYPES = ("auto", "bfloat16", "bf16", "float32", "fp32", "float16", "fp16", "float64")


@dataclass(frozen=True)
class WrapPolicyConfig(Section):
    min_num_params: int = inert(0, "smallest module that is sharded by itself", DISTRIBUTED)
    transformer_layer_cls_to_wrap: list[str] | None = inert(None, "classes that are sharded by themselves", DISTRIBUTED)


@dataclass(frozen=True)
class MixedPrecisionConfig(Section):
    reduce_dtype: str = inert("fp32", "dtype of gradient reductions", "gradients are always accumulated in float32")
    buffer_dtype: str = inert("fp32", "dtype of buffers", "buffers always keep their own dtype")


@dataclass(frozen=True)
class FSDPConfig(Section):
    dtype: str = used(
        "auto",
        "compute dtype; auto: bfloat16 where the device computes it natively, else float32",
        choices=DTYPES,
        neutral=("bfloat16", "bf16"),
    )
    model_dtype: str | None = inert("fp32", "dtype of the stored weights", "master weights are always float32")
    mixed_precision: MixedPrecisionConfig = section(MixedPrecisionConfig, "dtypes beside the compute dtype")
    wrap_policy: WrapPolicyConfig = section(WrapPolicyConfig, "what is sharded by itself")
    wrap_policy_fn: str | None = inert(None, "function that chooses what is sharded by itself", DISTRIBUTED)
    param_offload: bool = inert(False, "keep parameters on the CPU between uses", ONE_PROCESS)
    optimizer_offload: bool = inert(False, "keep optimizer state on the CPU between uses", ONE_PROCESS)
    offload_policy: bool = inert(False, "FSDP2's own CPU offload", ONE_PROCESS)
    reshard_after_forward: bool = inert(True, "free gathered parameters after the forward pass", ONE_PROCESS)
    fsdp_size: int = inert(-1, "devices per shard group", ONE_PROCESS)
    forward_prefetch: bool = inert(False, "gather the next layer during this one", ONE_PROCESS)
    use_orig_params: bool = inert(False, "FSDP1's flat parameters", "parameters always keep their names")
    use_no_sync_for_gradient_accumulation: bool = inert(False, "skip reductions between micro-batches", ONE_PROCESS)
    ulysses_sequence_parallel_size: int = inert(1, "devices that share one sequence", ONE_PROCESS)
    seed: int = inert(
        42, "seed of the engine", "data.seed, actor.data_loader_seed and rollout.seed cover all randomness"
    )
    full_determinism: bool = inert(
        False, "only deterministic kernels", "trainer.deterministic decides for the whole run"
    )
    forward_only: bool = inert(False, "the engine never trains", "the role decides: the reference policy never trains")
    strategy: str = inert("fsdp", "name of the engine", "the strategy of the role decides")
    use_torch_compile: bool = inert(True, "compile the modules", "modules are not compiled in this version")
    entropy_from_logits_with_chunking: bool = inert(False, "entropy chunk by chunk", FUSED_LOG_PROBS)
    entropy_from_logits_chunk_size: int = inert(2048, "rows of such a chunk", FUSED_LOG_PROBS)
    entropy_checkpointing: bool = inert(False, "recompute the entropy in the backward pass", FUSED_LOG_PROBS)
    pad_to_length: bool = inert(False, "pad packed rows", "padding is never computed")
    pad_to_length_bucket: int = inert(1024, "multiple that packed rows are padded to", "padding is never computed")
    use_3d_hybrid: bool = used(False, "reshard between training and rollout in three dimensions")
    layer_per_group: int = used(1, "layers moved together when resharding", when="use_3d_hybrid")
    enable_chunked_attention: bool = used(False, "attend to long sequences chunk by chunk", when="use_3d_hybrid")
    chunk_size: int = used(512, "tokens of such a chunk", when="use_3d_hybrid")
    batch_group_size: int = used(1, "samples moved together when resharding", when="use_3d_hybrid")
    qat: dict[str, Any] = inert({}, "quantisation-aware training", "weights are not quantised in this version")
    turbo_config: dict[str, Any] = inert({}, "settings of the fsdp_turbo engine", "only the fsdp_turbo engine reads it")
