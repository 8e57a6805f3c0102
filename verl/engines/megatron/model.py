"""Megatron's GPT model for a decoder of transformers: its configuration, its stages on this rank, and their heads."""

from __future__ import annotations

from collections.abc import Sequence
from functools import partial
from typing import Any, cast

import torch
import torch.nn.functional as F
from torch import nn

from verl.config.sections.megatron import MegatronConfig
from verl.engines.megatron.latent import LatentAttention
from verl.engines.megatron.layers import Choice, Experts, OrderedSelfAttention, PackedAttention, PackedTokens, RMSNorm
from verl.engines.megatron.library import (
    GPTModel,
    ModuleSpec,
    TransformerBlockSubmodules,
    TransformerConfig,
    gather_from_sequence_parallel_region,
    get_gpt_layer_local_spec,
    get_num_layers_to_build,
    get_transformer_layer_offset,
    parallel_state,
)
from verl.engines.megatron.model_checks import transformer_settings
from verl.models.forward import computed_outputs, head_transform
from verl.models.log_probs import TokenStats, token_log_probs
from verl.models.outputs import HeadInputs, statistics_wanted
from verl.models.packing import PackedBatch
from verl.models.parallel.sequence import TokenSlice, take_slice
from verl.models.parallel.vocabulary import parallel_log_probs


def transformer_config(
    hf: Any, section: MegatronConfig, dtype: torch.dtype, recomputes: bool, score_scale: float
) -> TransformerConfig:
    """Megatron's configuration of the decoder that the transformers config `hf` describes. Its kernels that need CUDA
    extensions are off. Attributes that are added are read by our modules of its layers."""
    settings, overrides = _mixture(hf, section), transformer_settings(section)
    if recomputes and overrides.get("recompute_granularity") != "selective":  # which has no number of layers
        settings |= {"recompute_granularity": "full", "recompute_method": "uniform", "recompute_num_layers": 1}
    config = TransformerConfig(
        num_layers=hf.num_hidden_layers,
        hidden_size=hf.hidden_size,
        num_attention_heads=hf.num_attention_heads,
        num_query_groups=getattr(hf, "num_key_value_heads", None) or hf.num_attention_heads,
        kv_channels=getattr(hf, "head_dim", None) or hf.hidden_size // hf.num_attention_heads,
        ffn_hidden_size=hf.intermediate_size,
        activation_func=F.silu,
        layernorm_epsilon=hf.rms_norm_eps,
        add_qkv_bias=hf.model_type == "qwen2" or bool(getattr(hf, "attention_bias", False)),
        qk_layernorm=hf.model_type in ("qwen3", "qwen3_moe") or bool(getattr(hf, "use_qk_norm", False)),
        tensor_model_parallel_size=section.tensor_model_parallel_size,
        pipeline_model_parallel_size=section.pipeline_model_parallel_size,
        context_parallel_size=section.context_parallel_size,
        virtual_pipeline_model_parallel_size=section.virtual_pipeline_model_parallel_size,
        sequence_parallel=section.divides_sequence(),
        params_dtype=dtype,
        pipeline_dtype=dtype,
        bf16=dtype == torch.bfloat16,
        variable_seq_lengths=True,
        moe_token_dispatcher_type="alltoall",
        calculate_per_token_loss=True,  # losses are divided by totals already: nothing is averaged
        gated_linear_unit=True,
        add_bias_linear=False,
        normalization="RMSNorm",
        attention_dropout=0.0,
        hidden_dropout=0.0,
        use_cpu_initialization=True,
        perform_initialization=False,
        masked_softmax_fusion=False,
        bias_dropout_fusion=False,
        bias_activation_fusion=False,
        gradient_accumulation_fusion=False,
        persist_layer_norm=False,
        **{**settings, **overrides},
    )
    windows = getattr(hf, "layer_types", None) or ["sliding_attention"] * hf.num_hidden_layers
    window = getattr(hf, "sliding_window", None)
    config.sliding_windows = [window if kind == "sliding_attention" else None for kind in windows]
    config.score_scale = score_scale
    config.latent = hf if hasattr(hf, "kv_lora_rank") else None
    return config


def _mixture(hf: Any, section: MegatronConfig) -> dict[str, object]:
    """The part of the configuration that is of experts; nothing for a dense model."""
    experts = getattr(hf, "num_local_experts", None) or getattr(hf, "num_experts", None)
    if not experts:
        return {}
    settings: dict[str, object] = {
        "num_moe_experts": experts,
        "moe_router_topk": hf.num_experts_per_tok,
        "moe_ffn_hidden_size": getattr(hf, "moe_intermediate_size", None) or hf.intermediate_size,
        "moe_router_pre_softmax": not getattr(hf, "norm_topk_prob", True),
        "moe_router_load_balancing_type": "none",
        "expert_model_parallel_size": section.expert_model_parallel_size,
        "expert_tensor_parallel_size": section.expert_tensor_size(),
    }
    if hf.model_type in ("glm4_moe", "deepseek_v3"):
        settings |= {
            "moe_layer_freq": [int(layer >= hf.first_k_dense_replace) for layer in range(hf.num_hidden_layers)],
            "moe_shared_expert_intermediate_size": hf.moe_intermediate_size * hf.n_shared_experts,
            "moe_router_score_function": "sigmoid",
            "moe_router_topk_scaling_factor": hf.routed_scaling_factor,
            **({"moe_router_num_groups": hf.n_group, "moe_router_group_topk": hf.topk_group} if hf.n_group > 1 else {}),
            "moe_router_dtype": "fp32",
            "moe_router_enable_expert_bias": True,
            "moe_router_bias_update_rate": 0.0,  # balancing is not trained, as in every engine here
        }
    return settings


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
        getattr(layer.mlp, "keywords", vars(layer.mlp))["submodules"].experts = Experts  # a partial in 0.19
    if config.latent is not None:
        layer.self_attention = ModuleSpec(module=LatentAttention)
        return spec
    layer.self_attention.module = OrderedSelfAttention
    attention = layer.self_attention.submodules
    attention.core_attention = PackedAttention
    attention.q_layernorm = attention.k_layernorm = RMSNorm if config.qk_layernorm else None
    return spec


class DecoderStage(GPTModel):
    """The part of a model on one stage of the pipeline. It takes packed batches, and the last stage returns hidden states
    [tokens of this rank, 1, hidden_size] that `outputs` reads."""

    def __init__(
        self, config: TransformerConfig, hf: Any, head: str, rotary: Any, first: bool, last: bool, vp: int | None
    ):
        tp = parallel_state.get_tensor_model_parallel_world_size()
        tied = head == "lm" and bool(hf.tie_word_embeddings)
        place = {"vp_stage": vp, "pp_rank": parallel_state.get_pipeline_model_parallel_rank()}
        num_layers = get_num_layers_to_build(config, **place)
        first_layer = get_transformer_layer_offset(config, **place)
        super().__init__(
            config,
            block_spec(config, range(first_layer, first_layer + num_layers)),
            vocab_size=-(-hf.vocab_size // tp) * tp,
            max_sequence_length=hf.max_position_embeddings,
            pre_process=first,
            post_process=last,
            share_embeddings_and_output_weights=tied,
            position_embedding_type="none",
            vp_stage=vp,
        )
        for layer in self.decoder.layers:
            if layer_has_experts(config, layer.layer_number - 1):
                layer.register_forward_pre_hook(Choice(layer.layer_number - 1), with_kwargs=True)
        self.hf, self.head = hf, head
        self.register_buffer("inv_freq", rotary.inv_freq.clone(), persistent=False)
        if head != "lm":
            self.output_layer = None
            if last:
                wide = torch.promote_types(config.params_dtype, torch.float32)
                self.score = nn.Linear(hf.hidden_size, 1, bias=head == "token_value", dtype=wide)

    def _preprocess(self, input_ids: torch.Tensor, position_ids: torch.Tensor, **_: object) -> tuple[object, ...]:
        embedded = None
        if self.pre_process:
            embedded = self.embedding(input_ids, position_ids)
            if torch.is_grad_enabled() and not embedded.requires_grad:
                embedded.requires_grad_()  # frozen: a layer that is computed again has gradients only if its input has one
        angles = torch.outer(position_ids[0].to(self.inv_freq.dtype), self.inv_freq)
        return embedded, torch.cat([angles, angles], dim=-1)[:, None, None, :], None, None, None, None

    def _postprocess(self, hidden_states: torch.Tensor, **_: object) -> torch.Tensor:
        return hidden_states

    def value(self, hidden: torch.Tensor) -> torch.Tensor:
        """[tokens, hidden_size] -> [tokens]."""
        return cast("torch.Tensor", self.score(hidden.to(self.score.weight.dtype)).squeeze(-1))

    def outputs(
        self, states: torch.Tensor, packed: PackedBatch, names: Sequence[str], temperature: float
    ) -> dict[str, torch.Tensor]:
        """The named outputs of hidden states, of the last stage; every rank of a tensor parallel group has all of them."""
        if self.config.sequence_parallel:
            states = gather_from_sequence_parallel_region(states, tensor_parallel_output_grad=False)
        part = take_slice(packed, parallel_state.get_context_parallel_group())
        hidden = states[:, 0].index_select(0, part.hidden_index)
        statistics = partial(self._statistics, hidden, part, names, temperature)
        inputs = HeadInputs(self, hidden, part.targets, temperature, statistics)
        outputs = computed_outputs(inputs, packed, names, part.whole)
        anchor = states.sum() * 0  # a graph even if nothing is predicted
        return {name: value + anchor if value.is_floating_point() else value for name, value in outputs.items()}

    def _statistics(
        self, hidden: torch.Tensor, part: TokenSlice, names: Sequence[str], temperature: float
    ) -> TokenStats:
        group, vocabulary = self.pg_collection.tp, self.hf.vocab_size
        options: dict[str, Any] = {**statistics_wanted(names, part.columns, vocabulary), **head_transform(self.hf)}
        shares = self.share_embeddings_and_output_weights
        head: Any = self.output_layer
        weight = self.shared_embedding_or_output_weight() if shares else head.weight
        if group.size() == 1:
            return token_log_probs(hidden, weight[:vocabulary], part.targets, temperature, **options)
        first = group.rank() * len(weight)
        rows = weight[: min(len(weight), vocabulary - first)]  # what follows is padding
        return parallel_log_probs(hidden, rows, part.targets, temperature, group, first, **options)


def build_stages(config: TransformerConfig, hf: object, head: str, rotary: object) -> list[DecoderStage]:
    """The stages of this rank: one, or as many as there are interleaved ones."""
    virtual = config.virtual_pipeline_model_parallel_size
    stages = []
    for vp in range(virtual or 1):
        stage = vp if virtual else None
        first = parallel_state.is_pipeline_first_stage(ignore_virtual=False, vp_stage=stage)
        last = parallel_state.is_pipeline_last_stage(ignore_virtual=False, vp_stage=stage)
        stages.append(DecoderStage(config, hf, head, rotary, first, last, stage))
    return stages


def stage_inputs(packed: PackedBatch, config: TransformerConfig) -> dict[str, Any]:
    """The arguments of a stage for this rank's tokens of a packed batch."""
    part = take_slice(packed, parallel_state.get_context_parallel_group())
    routing = part.layout.routing
    if routing is not None and config.sequence_parallel:
        num_tokens = part.input_ids.shape[1] // config.tensor_model_parallel_size
        routing = routing.part(num_tokens, parallel_state.get_tensor_model_parallel_group())
    return {
        "input_ids": part.input_ids,
        "position_ids": part.position_ids,
        "attention_mask": None,
        "packed_seq_params": PackedTokens(qkv_format="sbhd", layout=part.layout, routing=routing),
    }


def gather_choices(packed: PackedBatch, tokens: PackedTokens) -> None:
    """Give the routing of `packed` the experts that were recorded while its `tokens` passed the layers of this rank's stage."""
    routing, layout = packed.layout.routing, tokens.layout
    if (
        routing is None
        or routing.replayed is not None
        or layout is None
        or layout.routing is None
        or tokens.routing is None
    ):
        return
    if tokens.routing is not layout.routing:
        tensor = parallel_state.get_tensor_model_parallel_group()
        layout.routing.gather(tokens.routing, packed.num_tokens, tensor)
    if layout.routing is not routing:
        routing.gather(layout.routing, packed.num_tokens, parallel_state.get_context_parallel_group())
