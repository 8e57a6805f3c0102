"""Models and settings of layers that a section `megatron` allows."""

from collections.abc import Iterator
from importlib.util import find_spec
from typing import Any

from verl.config.sections.megatron import INSTEAD, RECOMPUTE, STAGES, MegatronConfig
from verl.errors import ConfigError
from verl.model_families import families_with

_FAMILIES = families_with("megatron")


def transformer_settings(section: MegatronConfig) -> dict[str, object]:
    """The keys of override_transformer_config that have an effect, with their values. Parts that Megatron cannot recompute here
    are left out: grouped experts, Megatron's latent attention, and norms without Transformer Engine."""
    values = {
        k: v for k, v in section.override_transformer_config.items() if k in (*RECOMPUTE, *STAGES) and v is not None
    }
    if modules := values.get("recompute_modules"):
        unable = {"moe_act", "mla_up_proj"} | ({"layernorm"} if find_spec("transformer_engine") is None else set())
        values["recompute_modules"] = [name for name in modules if name not in unable]
    return values


def check_model(section: MegatronConfig, model: object) -> None:
    """Raise ConfigError for sizes that the shape of `model`, a transformers config, forbids."""
    problem = next(_misfits(section, model), None)
    if problem:
        raise ConfigError(problem)


def _misfits(section: MegatronConfig, model: Any) -> Iterator[str]:
    tensor, experts = section.tensor_model_parallel_size, getattr(model, "num_local_experts", None)
    experts = experts or getattr(model, "num_experts", None)
    if model.model_type not in _FAMILIES:
        yield f"strategy=megatron has no name map for {model.model_type}; it has {', '.join(_FAMILIES)}. {INSTEAD}"
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
        if count % tensor:
            yield f"megatron.tensor_model_parallel_size={tensor} does not divide the model's {count} {what}. Change it."
    counts = section.layers_per_stage(model.num_hidden_layers)
    if sum(counts) != model.num_hidden_layers or min(counts) < 1:
        yield (
            f"megatron.pipeline_model_parallel_size={section.pipeline_model_parallel_size} (virtual "
            f"{section.virtual_pipeline_model_parallel_size}) does not divide the model's {model.num_hidden_layers} layers. "
            f"Choose a divisor, or set {' or '.join(STAGES)} in override_transformer_config."
        )
    if section.expert_model_parallel_size > 1 and not experts:
        size = section.expert_model_parallel_size
        yield f"megatron.expert_model_parallel_size={size}: {model.model_type} has no experts. Set it to 1."
    if experts and experts % section.expert_model_parallel_size:
        yield (
            f"megatron.expert_model_parallel_size={section.expert_model_parallel_size} does not divide the model's {experts} "
            "experts. Choose a divisor."
        )
    width = getattr(model, "moe_intermediate_size", None) or model.intermediate_size
    if experts and width % section.expert_tensor_size():
        size = section.expert_tensor_size()
        yield f"megatron.expert_tensor_parallel_size={size} does not divide the {width} columns of an expert."
    if experts and tensor > 1 and not section.sequence_parallel:
        yield "megatron.sequence_parallel=False: Megatron needs it for experts with tensor parallelism. Set it to True."
