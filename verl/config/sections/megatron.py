"""`*.megatron`: the Megatron-core training engine, and the sizes that a model and a number of devices allow."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

from verl.config.keys import Section, used
from verl.errors import ConfigError
from verl.model_families import families_with

_FAMILIES = families_with("megatron")
_INSTEAD = "Set strategy=fsdp2, or trainer.engine_fallback=fsdp."
_RECOMPUTE = ("recompute_granularity", "recompute_modules", "recompute_method", "recompute_num_layers")
_STAGES = ("num_layers_in_first_pipeline_stage", "num_layers_in_last_pipeline_stage")
# how layers are computed and not what: kernels of Transformer Engine and Apex, and orders that cost or save memory
_KERNELS = (
    "attention_backend apply_rope_fusion attention_softmax_in_fp32 bias_activation_fusion bias_dropout_fusion "
    "bias_swiglu_fusion cross_entropy_fusion_impl cross_entropy_loss_fusion deallocate_pipeline_outputs "
    "gradient_accumulation_fusion "
    "masked_softmax_fusion moe_enable_deepep moe_grouped_gemm moe_permute_fusion moe_router_dtype moe_shared_expert_overlap "
    "moe_token_dispatcher_type overlap_moe_expert_parallel_comm persist_layer_norm tp_comm_overlap variable_seq_lengths"
).split()
# of the router's balancing, which is not trained, as in every engine here
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
        f"settings of Megatron's TransformerConfig: {', '.join((*_RECOMPUTE, *_STAGES))}; settings of kernels have no effect",
    )

    def sizes(self, num_ranks: int) -> dict[str, int]:
        """Axes of the mesh, as Megatron numbers its ranks. Raises ConfigError where they do not divide."""
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
        """Arguments of Megatron's process groups, which all roles of a run share."""
        return {
            "tensor_model_parallel_size": self.tensor_model_parallel_size,
            "pipeline_model_parallel_size": self.pipeline_model_parallel_size,
            "context_parallel_size": self.context_parallel_size,
            "virtual_pipeline_model_parallel_size": self.virtual_pipeline_model_parallel_size,
            "expert_model_parallel_size": self.expert_model_parallel_size,
            "expert_tensor_parallel_size": self.expert_tensor_size(),
        }

    def check_groups(self, other: MegatronConfig) -> None:
        """Raise ConfigError where another role asks for process groups of other sizes."""
        ours, theirs = self.group_sizes(), other.group_sizes()
        asked = [f"{name}={size} and {theirs[name]}" for name, size in ours.items() if size != theirs[name]]
        if asked:
            raise ConfigError(
                f"Roles with strategy=megatron share their process groups, and ask for {', '.join(asked)}. Give their "
                "sections megatron the same sizes, or one of the roles strategy=fsdp2."
            )

    def divides_sequence(self) -> bool:
        """Whether activations are split along the sequence."""
        return self.sequence_parallel and self.tensor_model_parallel_size > 1

    def transformer_settings(self) -> dict[str, object]:
        """The keys of override_transformer_config that have an effect, with their values."""
        return {
            k: v for k, v in self.override_transformer_config.items() if k in (*_RECOMPUTE, *_STAGES) and v is not None
        }

    def layers_per_stage(self, num_layers: int) -> tuple[int, ...]:
        """Layers of each stage of the pipeline, in the model's order: with interleaved stages, stage i of the result is on
        device i % pipeline_model_parallel_size."""
        stages = self.pipeline_model_parallel_size * (self.virtual_pipeline_model_parallel_size or 1)
        first, last = (self.override_transformer_config.get(name) for name in _STAGES)
        middle = num_layers - (first or 0) - (last or 0)
        equal = middle // max(1, stages - (first is not None) - (last is not None))
        counts = [equal] * stages
        if first is not None:
            counts[0] = first
        if last is not None:
            counts[-1] = last
        return tuple(counts)

    def check_model(self, model: object) -> None:
        """Raise ConfigError for sizes that the shape of `model`, a transformers config, forbids."""
        problem = next(self._misfits(model), None)
        if problem:
            raise ConfigError(problem)

    def _misfits(self, model: Any) -> Iterator[str]:
        tensor, experts = self.tensor_model_parallel_size, getattr(model, "num_local_experts", None)
        experts = experts or getattr(model, "num_experts", None)
        if model.model_type not in _FAMILIES:
            yield f"strategy=megatron has no name map for {model.model_type}; it has {', '.join(_FAMILIES)}. {_INSTEAD}"
            return
        if getattr(model, "mlp_bias", False) or (
            model.model_type in ("llama", "deepseek_v3") and getattr(model, "attention_bias", False)
        ):
            yield "strategy=megatron has no biases of the projections after attention and MLP. Set strategy=fsdp2."
        if model.model_type in ("glm4_moe", "deepseek_v3"):
            # of the best groups Megatron takes as many experts as a token has for each, transformers two
            if not model.norm_topk_prob or (model.n_group > 1 and model.num_experts_per_tok // model.topk_group != 2):
                yield (
                    "strategy=megatron has no groups of experts but of two experts of a token each, and no experts without "
                    "norm_topk_prob. Set strategy=fsdp2."
                )
        heads = {
            "attention heads": model.num_attention_heads,
            "key-value heads": getattr(model, "num_key_value_heads", None) or model.num_attention_heads,
            "columns of an MLP": model.intermediate_size,
        }
        for what, count in heads.items():
            if count % tensor == 0 and what != "columns of an MLP":
                yield from self._context_misfits(count // tensor, what)
            if count % tensor:
                yield f"megatron.tensor_model_parallel_size={tensor} does not divide the model's {count} {what}. Change it."
        counts = self.layers_per_stage(model.num_hidden_layers)
        if sum(counts) != model.num_hidden_layers or min(counts) < 1:
            yield (
                f"megatron.pipeline_model_parallel_size={self.pipeline_model_parallel_size} (virtual "
                f"{self.virtual_pipeline_model_parallel_size}) does not divide the model's {model.num_hidden_layers} layers. "
                f"Choose a divisor, or set {' or '.join(_STAGES)} in override_transformer_config."
            )
        if self.expert_model_parallel_size > 1 and not experts:
            size = self.expert_model_parallel_size
            yield f"megatron.expert_model_parallel_size={size}: {model.model_type} has no experts. Set it to 1."
        if experts and experts % self.expert_model_parallel_size:
            yield (
                f"megatron.expert_model_parallel_size={self.expert_model_parallel_size} does not divide the model's {experts} "
                "experts. Choose a divisor."
            )
        width = getattr(model, "moe_intermediate_size", None) or model.intermediate_size
        if experts and width % self.expert_tensor_size():
            size = self.expert_tensor_size()
            yield f"megatron.expert_tensor_parallel_size={size} does not divide the {width} columns of an expert."
        if experts and tensor > 1 and not self.sequence_parallel:
            yield "megatron.sequence_parallel=False: Megatron needs it for experts with tensor parallelism. Set it to True."

    def _context_misfits(self, count: int, what: str) -> Iterator[str]:
        context = self.context_parallel_size
        if count % context and (what == "attention heads" or context % count):
            yield (
                f"megatron.context_parallel_size={context} does not divide the {count} {what} of a device, for which attention "
                "exchanges tokens. Choose a divisor."
            )

    def contradictions(self) -> Iterator[str]:
        """Sentences about settings that exclude one another, whatever the model is."""
        if self.use_megatron_fsdp:
            yield f"use_megatron_fsdp=True is not available. {_INSTEAD}"
        if fp8 := self.override_transformer_config.get("fp8"):
            yield f"override_transformer_config.fp8={fp8}: training in FP8 is not available. Remove the keys of fp8."
        virtual, pipeline = self.virtual_pipeline_model_parallel_size, self.pipeline_model_parallel_size
        if virtual and pipeline < 3:  # with two ranks, several messages between the same two would mix
            yield f"virtual_pipeline_model_parallel_size={virtual} needs pipeline_model_parallel_size of at least 3. Remove it."

    def unread_settings(self) -> list[str]:
        """The keys of override_transformer_config that would change what layers compute, which the model's config decides."""
        known = (*_RECOMPUTE, *_STAGES, *_KERNELS)
        neutral = (None, 0, 0.0, "none", False)
        settings = self.override_transformer_config.items()
        return [name for name, v in settings if name not in known and not (name in _BALANCING and v in neutral)]

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
