"""The specification of the decoder layers of a stage: Megatron's local layers with our modules."""

from __future__ import annotations

from verl.engines.megatron.latent import LatentAttention
from verl.engines.megatron.layers import Experts, OrderedSelfAttention, PackedAttention, RMSNorm
from verl.engines.megatron.library import (
    ModuleSpec,
    TransformerBlockSubmodules,
    TransformerConfig,
    get_gpt_layer_local_spec,
)


def block_spec(config: TransformerConfig, layers: range) -> TransformerBlockSubmodules:
    """The specification of the layers of one stage, numbered from 0."""
    mixed = {layer: layer_has_experts(config, layer) for layer in layers}
    specs = {has_experts: _layer_spec(config, has_experts) for has_experts in set(mixed.values())}
    return TransformerBlockSubmodules(layer_specs=[specs[mixed[layer]] for layer in layers], layer_norm=RMSNorm)


def layer_has_experts(config: TransformerConfig, layer: int) -> bool:
    """Whether a layer has experts in place of a dense MLP."""
    pattern = config.moe_layer_freq
    return bool(config.num_moe_experts) and (not isinstance(pattern, list) or bool(pattern[layer]))


def _layer_spec(config: TransformerConfig, has_experts: bool) -> object:
    spec = get_gpt_layer_local_spec(
        num_experts=config.num_moe_experts if has_experts else None,
        qk_layernorm=config.qk_layernorm,
        normalization="RMSNorm",
    )
    layer = spec.submodules
    layer.input_layernorm = layer.pre_mlp_layernorm = RMSNorm
    if has_experts:
        layer.mlp.submodules.experts = ModuleSpec(module=Experts)
    if config.latent is not None:
        layer.self_attention = ModuleSpec(module=LatentAttention)
        return spec
    layer.self_attention.module = OrderedSelfAttention
    attention = layer.self_attention.submodules
    attention.core_attention = PackedAttention
    attention.q_layernorm = attention.k_layernorm = RMSNorm if config.qk_layernorm else None
    return spec
