"""`actor_rollout_ref.model` and `critic.model`: which model, and how it is built."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from verl.config.keys import MEGATRON, Section, inert, section, used

MTP = "multi-token-prediction heads are neither trained nor used for drafting in this version"


@dataclass(frozen=True)
class FusedKernelOptionsConfig(Section):
    impl_backend: str = inert("torch", "implementation of the fused kernels", "there is one implementation")


@dataclass(frozen=True)
class TiledMLPConfig(Section):
    enabled: bool = inert(False, "compute MLPs tile by tile", "micro-batches by token count bound this memory")
    num_shards: int = inert(4, "number of tiles", "micro-batches by token count bound this memory")


@dataclass(frozen=True)
class MTPConfig(Section):
    enable: bool = used(False, "multi-token prediction")
    enable_train: bool = inert(False, "train its heads", MTP)
    enable_rollout: bool = inert(False, "draft with its heads", MTP)
    detach_encoder: bool = inert(False, "no gradient into the trunk", MTP)
    mtp_loss_scaling_factor: float = inert(0.1, "weight of its loss", MTP)
    speculative_algorithm: str = inert("EAGLE", "algorithm of drafting", MTP)
    speculative_num_steps: int = inert(3, "steps drafted ahead", MTP)
    speculative_eagle_topk: int = inert(1, "branches drafted", MTP)
    speculative_num_draft_tokens: int = inert(4, "tokens drafted", MTP)
    method: str = inert("mtp", "method name for vLLM", MTP)
    num_speculative_tokens: int = inert(1, "tokens drafted by vLLM", MTP)


@dataclass(frozen=True)
class MegatronLoRAConfig(Section):
    """`model.lora`; its rank, alpha and adapter_path are spellings of lora_rank, lora_alpha and lora_adapter_path."""

    type: str = inert("lora", "kind of adapter", MEGATRON)
    merge: bool = inert(False, "merge adapters before rollout", MEGATRON)
    dropout: float = inert(0.0, "dropout inside the adapter", MEGATRON)
    target_modules: list[str] = inert(
        ["linear_qkv", "linear_proj", "linear_fc1", "linear_fc2"], "adapted modules by Megatron's names", MEGATRON
    )
    exclude_modules: list[str] = inert([], "modules left alone, by Megatron's names", MEGATRON)
    dropout_position: str = inert("pre", "where the dropout is", MEGATRON)
    lora_A_init_method: str = inert("xavier", "initialisation of A", MEGATRON)
    lora_B_init_method: str = inert("zero", "initialisation of B", MEGATRON)
    a2a_experimental: bool = inert(False, "all-to-all form", MEGATRON)
    dtype: str | None = inert(None, "dtype of the adapters", MEGATRON)
    freeze_vision_model: bool = inert(True, "do not adapt the vision model", MEGATRON)
    freeze_vision_projection: bool = inert(True, "do not adapt its projection", MEGATRON)
    freeze_language_model: bool = inert(True, "do not train the language model itself", MEGATRON)


@dataclass(frozen=True)
class ModelConfig(Section):
    path: str = used("~/models/deepseek-llm-7b-chat", "folder or hub name of a Hugging Face model")
    tokenizer_path: str | None = used(None, "folder or hub name of the tokenizer; null: that of the model")
    hf_config_path: str | None = inert(
        None,
        "folder of another config.json",
        "config.json is read from the model's folder",
        refused="Remove it, and set actor_rollout_ref.model.override_config to the fields that differ",
    )
    trust_remote_code: bool = used(False, "run Python code that comes with the model")
    custom_chat_template: str | None = used(None, "chat template in place of the tokenizer's")
    external_lib: str | list[str] | None = used(
        None, "Python modules that are imported first, to register models, losses or estimators"
    )
    override_config: dict[str, Any] = used({}, "entries of the model's config.json to replace")
    enable_gradient_checkpointing: bool = used(True, "recompute activations in the backward pass, for memory")
    enable_activation_offload: bool = inert(
        False, "keep activations on the CPU", "enable_gradient_checkpointing bounds this memory"
    )
    use_remove_padding: bool = inert(True, "compute no padding", "padding is never computed")
    use_fused_kernels: bool = inert(False, "fused log-probability kernel", "log-probabilities are always fused")
    fused_kernel_options: FusedKernelOptionsConfig = section(FusedKernelOptionsConfig, "settings of the fused kernel")
    use_liger: bool = inert(False, "Liger kernels", "kernels are our own, on every device")
    use_shm: bool = inert(False, "copy the model to shared memory first", "weights are mapped from the file")
    lora_rank: int = used(0, "rank of LoRA adapters; 0: train all weights")
    lora_alpha: int = used(16, "scale of LoRA adapters", when="lora")
    target_modules: Any = used("all-linear", "modules that get an adapter", when="lora")
    exclude_modules: Any = used(None, "modules that get none", when="lora")
    lora_adapter_path: str | None = used(
        None, "folder of adapters to start from; without lora_rank they bring their rank and scale"
    )
    lora: MegatronLoRAConfig = section(MegatronLoRAConfig, "LoRA of the Megatron engine")
    tiled_mlp: TiledMLPConfig = section(TiledMLPConfig, "tiled MLPs")
    mtp: MTPConfig = section(MTPConfig, "multi-token prediction")


@dataclass(frozen=True)
class SFTModelConfig(ModelConfig):
    neftune_alpha: float | None = used(
        None, "scale of uniform noise on the embeddings in training (NEFTune, arXiv 2310.05914); null: none", gt=0
    )
