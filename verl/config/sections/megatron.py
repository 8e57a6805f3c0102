"""`*.megatron`: the Megatron-core training engine, and the sizes that a model and a number of devices allow."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

from verl.config.keys import Section, used
from verl.errors import ConfigError

INSTEAD = "Set strategy=fsdp2, or trainer.engine_fallback=fsdp."
RECOMPUTE = ("recompute_granularity", "recompute_modules", "recompute_method", "recompute_num_layers")
STAGES = ("num_layers_in_first_pipeline_stage", "num_layers_in_last_pipeline_stage")
# how layers are computed and not what: kernels of Transformer Engine and Apex, and orders that cost or save memory
_KERNELS = (
    "attention_backend apply_rope_fusion attention_softmax_in_fp32 bias_activation_fusion bias_dropout_fusion "
    "bias_swiglu_fusion cross_entropy_fusion_impl cross_entropy_loss_fusion deallocate_pipeline_outputs "
    "gradient_accumulation_fusion "
    "masked_softmax_fusion moe_enable_deepep moe_grouped_gemm moe_permute_fusion moe_router_dtype moe_shared_expert_overlap "
    "moe_token_dispatcher_type overlap_moe_expert_parallel_comm persist_layer_norm tp_comm_overlap variable_seq_lengths"
).split()
# of the router's balancing: it is not trained, as in every engine here
_BALANCING = ("moe_aux_loss_coeff", "moe_z_loss_coeff", "moe_router_load_balancing_type")


@dataclass(frozen=True)
class MegatronConfig(Section):
    tensor_model_parallel_size: int = used(1, "devices that share one layer", ge=1)
    pipeline_model_parallel_size: int = used(1, "stages of layers", ge=1)
    virtual_pipeline_model_parallel_size: int | None = used(None, "interleaved stages per device", ge=1)
    expert_model_parallel_size: int = used(1, "devices that share the experts", ge=1)
    expert_tensor_parallel_size: int | None = used(
        None, "devices that share one expert; null: tensor_model_parallel_size", ge=1
    )
    context_parallel_size: int = used(
        1, "devices that share the tokens of a micro-batch; attention exchanges them for heads", ge=1
    )
    use_megatron_fsdp: bool = used(False, "only False: Megatron's own FSDP")
    sequence_parallel: bool = used(True, "with tensor parallelism: split activations along the sequence", sizing=True)
    use_distributed_optimizer: bool = used(
        True, "divide masters and optimizer state over data-parallel devices", sizing=True
    )
    param_offload: bool = used(False, "keep parameters on the CPU between uses", sizing=True)
    optimizer_offload: bool = used(False, "keep optimizer state on the CPU between uses", sizing=True)
    override_transformer_config: dict[str, Any] = used(
        {},
        f"settings of Megatron's TransformerConfig: {', '.join((*RECOMPUTE, *STAGES))}; settings of kernels have no effect",
    )

    def sizes(self, num_ranks: int) -> dict[str, int]:
        """Axes of the mesh, as Megatron numbers its ranks. Raises ConfigError if they do not divide."""
        tensor, pipeline = self.tensor_model_parallel_size, self.pipeline_model_parallel_size
        context = self.context_parallel_size
        if num_ranks % (tensor * context * pipeline):
            contexts = f"context_parallel_size={context} x " if context > 1 else ""
            raise ConfigError(
                f"{num_ranks} devices do not divide into megatron.tensor_model_parallel_size={tensor} x {contexts}"
                f"pipeline_model_parallel_size={pipeline}. Change the sizes, or the number of devices."
            )
        experts = self.expert_model_parallel_size * self.expert_tensor_size()
        if (num_ranks // pipeline) % experts:
            raise ConfigError(
                f"megatron.expert_model_parallel_size={self.expert_model_parallel_size} x expert_tensor_parallel_size="
                f"{self.expert_tensor_size()} does not divide the {num_ranks // pipeline} devices of a stage. Change one."
            )
        num_copies = num_ranks // (tensor * context * pipeline)
        return {"pp": pipeline, "replicate": num_copies, "sp": context, "tp": tensor}

    def expert_tensor_size(self) -> int:
        """Devices that share one expert."""
        return self.expert_tensor_parallel_size or self.tensor_model_parallel_size

    def group_sizes(self) -> dict[str, int | None]:
        """Arguments of Megatron's process groups; all roles of a run share them."""
        return {
            "tensor_model_parallel_size": self.tensor_model_parallel_size,
            "pipeline_model_parallel_size": self.pipeline_model_parallel_size,
            "context_parallel_size": self.context_parallel_size,
            "virtual_pipeline_model_parallel_size": self.virtual_pipeline_model_parallel_size,
            "expert_model_parallel_size": self.expert_model_parallel_size,
            "expert_tensor_parallel_size": self.expert_tensor_size(),
        }

    def check_groups(self, other: MegatronConfig) -> None:
        """Raise ConfigError if another role asks for process groups of other sizes."""
        sizes, second = self.group_sizes(), other.group_sizes()
        different = [f"{name}={size} and {second[name]}" for name, size in sizes.items() if size != second[name]]
        if different:
            raise ConfigError(
                f"Roles with strategy=megatron share their process groups, and ask for {', '.join(different)}. Give their "
                "sections megatron the same sizes, or one of the roles strategy=fsdp2."
            )

    def divides_sequence(self) -> bool:
        """Whether activations are split along the sequence."""
        return self.sequence_parallel and self.tensor_model_parallel_size > 1

    def layers_per_stage(self, num_layers: int) -> tuple[int, ...]:
        """Layers of each stage of the pipeline, in the model's order: with interleaved stages, stage i of the result is on
        device i % pipeline_model_parallel_size."""
        stages = self.pipeline_model_parallel_size * (self.virtual_pipeline_model_parallel_size or 1)
        first, last = (self.override_transformer_config.get(name) for name in STAGES)
        middle = num_layers - (first or 0) - (last or 0)
        equal = middle // max(1, stages - (first is not None) - (last is not None))
        counts = [equal] * stages
        if first is not None:
            counts[0] = first
        if last is not None:
            counts[-1] = last
        return tuple(counts)

    def contradictions(self) -> Iterator[str]:
        """Sentences about settings that exclude one another for any model."""
        if self.use_megatron_fsdp:
            yield f"use_megatron_fsdp=True is not available. {INSTEAD}"
        virtual, pipeline = self.virtual_pipeline_model_parallel_size, self.pipeline_model_parallel_size
        if virtual and pipeline < 3:  # with two ranks, several messages between the same two would mix
            yield f"virtual_pipeline_model_parallel_size={virtual} needs pipeline_model_parallel_size of at least 3. Remove it."

    def unread_settings(self) -> list[str]:
        """The keys of override_transformer_config that would change the results of layers: the model's config decides those."""
        readable = (*RECOMPUTE, *STAGES, *_KERNELS)
        neutral = (None, 0, 0.0, "none", False)
        settings = self.override_transformer_config.items()
        return [name for name, v in settings if name not in readable and not (name in _BALANCING and v in neutral)]

    def describe(self) -> str:
        """The layout, for the header of a run."""
        sizes = {
            "tensor": self.tensor_model_parallel_size,
            "pipeline": self.pipeline_model_parallel_size,
            "context": self.context_parallel_size,
            "expert": self.expert_model_parallel_size,
        }
        parts = [f"{name} parallel {size}" for name, size in sizes.items() if size > 1]
        parts += ["sequence parallel"] * self.divides_sequence()
        return ", ".join([*parts, f"distributed optimizer {'on' if self.use_distributed_optimizer else 'off'}"])
