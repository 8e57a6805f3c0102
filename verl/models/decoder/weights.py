"""The weights of a dense decoder of the Llama plan, as the fused forwards read them.

The module keeps its parameters, names and forward. Only the storage of the parameters is arranged, so that one matrix product
computes projections of the same input (verl.models.decoder.projection); `DenseDecoder.of` restores a broken arrangement.

A family may depart from the plan in norms, activation, rotary embedding, caps of scores, routers, and in queries, keys and
values by way of narrow vectors (MLA). Its row (verl.model_families) and its modules tell. A module is taken only if it is no
more than that: exact classes, plain parameters, no hooks. For others `of` returns None and the module's own forward is
called. Adapters are taken for callers that compute them.

If a module is sharded, each layer is a unit (`LayerUnit`), whose weights are whole while its module is called.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, replace
from typing import Any, cast
from weakref import WeakKeyDictionary

import torch
from torch import nn
from transformers import PreTrainedConfig

from verl.model_families import FAMILIES, ModelFamily
from verl.models.attention import Scoring
from verl.models.decoder.layers import DenseLayer, Latent, Mixture, Norm, SharedExpert
from verl.models.decoder.projection import NO_PROJECTION, Projection, in_a_copy, in_place
from verl.models.lora import LoRALinear
from verl.models.ops.experts import ChoiceRule
from verl.models.ops.pointwise import ACTIVATIONS
from verl.models.parallel.experts import DispatchedExperts, SummedExperts
from verl.models.parallel.tensor import Cut, Exchange, cut_of
from verl.models.qat import RoundedLinear
from verl.models.routing import RoutedForward
from verl.models.vision import language_model_of

_DECODERS = {row.decoder: row for row in FAMILIES.values() if row.decoder}
Join = Callable[[Sequence[nn.Linear]], Projection]
_LATENT = ("q_proj", "q_a_proj", "kv_a_proj_with_mqa")
_PLAIN_PARTS = (
    nn.Linear,
    LoRALinear,
    RoundedLinear,
    nn.Embedding,
    nn.ModuleList,
    nn.SiLU,
    DispatchedExperts,
    SummedExperts,
)


class LayerUnit:
    """A layer whose weights are whole during a call of its module and during the backward of that call: hooks of the module
    gather and free them, as FSDP2's do. `feed` is None, or the unit of experts that are gathered by themselves, with whose
    call the second half of the layer is computed."""

    def __init__(self, layer: nn.Module, row: ModelFamily, experts: nn.Module | None = None):
        """The unit of a layer of a family with this row, or of the layer's `experts`."""
        self.layer, self.row, self.module = layer, row, experts or layer
        self.module.forward = self._forward  # hooks stay around it
        divided = next((part for part in layer.modules() if isinstance(part, DispatchedExperts)), None)
        self.feed = LayerUnit(layer, row, divided) if experts is None and divided is not None else None

    def call(self, computed: ComputedLayer, number: int, x: torch.Tensor) -> torch.Tensor:
        """`computed(number, self, x)`, inside a call of the module."""
        out: torch.Tensor = nn.Module.__call__(self.module, computed, number, x)  # past transformers' checkpointing
        return out

    def _forward(self, computed: ComputedLayer, number: int, x: torch.Tensor) -> torch.Tensor:
        return computed(number, self, x)

    def gathered(self) -> DenseLayer:
        """The weights, now that they are whole; joined projections are copies."""
        return _layer(self.layer, self.row, in_a_copy)


Layer = DenseLayer | LayerUnit
ComputedLayer = Callable[[int, Layer, torch.Tensor], torch.Tensor]


@dataclass(frozen=True)
class DenseDecoder:
    """Everything between token ids and final hidden states. `rotary(x, position_ids)` gives cos and sin [1, tokens, width] in
    the dtype of `x`, for positions [1, tokens], or [axes, 1, tokens] of a family with images. It takes a layer's `rotary` too
    if there are several. With `pairs` it turns neighbours."""

    embed: nn.Parameter  # [vocabulary, hidden]
    embed_scale: torch.Tensor | None
    padding_idx: int | None  # whose embedding gets no gradient
    vocabulary: Cut | None  # of the embedding
    layers: tuple[DenseLayer, ...]
    final_norm: Norm
    rotary: nn.Module
    num_heads: int
    num_kv_heads: int
    head_dim: int  # of queries and keys
    scale: float
    softcap: float | None
    activation: str  # in verl.models.ops.pointwise.ACTIVATIONS
    rotaries: tuple[str, ...]  # of layers, if there are several
    pairs: bool
    departures: frozenset[str]  # from the plan of Llama, but for norms of heads and mixtures of experts

    def scoring(self, layer: DenseLayer) -> Scoring:
        """The scores of a layer."""
        return Scoring(self.scale, layer.sliding_window, self.softcap)

    @classmethod
    def of(cls, module: Any, *, adapters: bool = False) -> DenseDecoder | None:
        """The dense reading of `module` (a causal language model, a value model, or a bare decoder), or None when its
        own forward must be used. Kept from call to call while the module stays as it is. Adapted layers are read for a
        caller that asks for them. The layers of a module that `make_layer_units` has taken are its LayerUnits."""
        decoder = language_model_of(module) if hasattr(module, "get_decoder") else module
        if decoder in _units:
            return _read(decoder, _units[decoder])
        if not _is_plain(decoder):
            _known.pop(decoder, None)
            return None
        parts = set(decoder.modules())
        if not adapters and any(type(part) is LoRALinear for part in parts):
            return None
        read = _known.get(decoder)
        if read is None or not all(p.is_joined and parts.issuperset(p.parts) for p in read.projections()):
            read = _known[decoder] = _read(decoder, _layers(decoder))
        return read

    @classmethod
    def of_shapes(cls, module: Any) -> DenseDecoder | None:
        """As `of`, of a `module` that may lie on the meta device: its weights may be copies, or have no values."""
        decoder = language_model_of(module) if hasattr(module, "get_decoder") else module
        if not _is_plain(decoder, may_be_meta=True):
            return None
        return _read(decoder, [_layer(layer, _row_of(decoder), in_a_copy) for layer in _layers_of(decoder)])

    def with_layer(self, module: Any, layer: nn.Module, norm: nn.Module) -> DenseDecoder:
        """The decoder of one further `layer` of the class of `module`'s, and a final `norm`; joined projections are copies."""
        row = _row_of(language_model_of(module))
        return replace(self, layers=(_layer(layer, row, in_a_copy),), final_norm=_norm(norm, row))

    def projections(self) -> Iterator[Projection]:
        for layer in self.layers:
            yield from (layer.qkv, *(() if layer.latent is None else layer.latent.projections), layer.o)
            yield from (layer.gate_up, layer.down) if layer.mixture is None else layer.mixture.projections

    @property
    def has_experts(self) -> bool:
        """Whether a layer is a mixture of experts."""
        return any(layer.mixture is not None for layer in self.layers)


_known: WeakKeyDictionary[nn.Module, DenseDecoder] = WeakKeyDictionary()
_units: WeakKeyDictionary[nn.Module, list[LayerUnit]] = WeakKeyDictionary()


def make_layer_units(module: Any, shards: Sequence[nn.Module]) -> bool:
    """Whether the layers of `module`, which may lie on the meta device, are LayerUnits from now on: if its decoder is plain and
    the modules `shards`, which are sharded by themselves, are its layers."""
    decoder = language_model_of(module)
    if not _is_plain(decoder, may_be_meta=True) or list(shards) != _layers_of(decoder):
        return False
    _units[decoder] = [LayerUnit(layer, _row_of(decoder)) for layer in shards]
    return True


def _row_of(decoder: nn.Module) -> ModelFamily:
    return _DECODERS[type(decoder).__name__]


def _layers(decoder: nn.Module) -> list[DenseLayer]:
    return [_layer(layer, _row_of(decoder), in_place) for layer in _layers_of(decoder)]


def _layers_of(decoder: Any) -> list[nn.Module]:
    return list(decoder.layers[: decoder.config.num_hidden_layers])


def why_modules(module: Any) -> str:
    """The reason why modules of transformers compute the layers of `module`, as "its activation is relu". Empty if
    verl.models.decoder does; weights may lie on the meta device."""
    return _obstacle(language_model_of(module) if hasattr(module, "get_decoder") else module, may_be_meta=True)


def _is_plain(decoder: nn.Module, *, may_be_meta: bool = False) -> bool:
    return not _obstacle(decoder, may_be_meta=may_be_meta)


def _obstacle(decoder: nn.Module, *, may_be_meta: bool) -> str:
    """The reason why the decoder is not of a known class of unwrapped modules with plain local parameters."""
    kind, config = type(decoder), cast(PreTrainedConfig, getattr(decoder, "config", None))
    if kind.__name__ not in _DECODERS or not kind.__module__.startswith("transformers.models."):
        return f"no row of verl.model_families has {kind.__name__}"
    if _activation(config) not in ACTIVATIONS:
        return f"its activation is {_activation(config)}"
    if _mixes_biases(config):
        return "only some projections of its layers' input have a bias"
    if getattr(config, "router_jitter_noise", 0.0):
        return "its routers add noise (router_jitter_noise)"
    if getattr(config, "use_bidirectional_attention", False):
        return "its tokens see later tokens (use_bidirectional_attention)"
    for name, part in decoder.named_modules():
        hooks = (*part._forward_hooks.values(), *part._forward_pre_hooks.values(), *part._backward_hooks.values())
        if any(map(_changes_results, hooks)) or not isinstance(vars(part).get("forward"), RoutedForward | None):
            return f"{name or kind.__name__} has a hook or another forward"
        if isinstance(part, nn.Dropout) and part.p == 0:
            continue
        is_known = type(part).__module__.startswith(("transformers.models.", "transformers.activations"))
        if not is_known and type(part) not in _PLAIN_PARTS:
            return f"{name} is a {type(part).__name__}"
    if not all(type(p) is nn.Parameter and (may_be_meta or not p.is_meta) for p in decoder.parameters()):
        return "its parameters are sharded, quantized or not loaded"
    return ""


def _changes_results(hook: object) -> bool:
    """Gradient checkpointing marks the embeddings as requiring gradients, which changes nothing here. Routing replay hands
    choices of experts to modules, and tensor parallelism adds up results of modules: the decoder does both by itself."""
    owner = getattr(hook, "__self__", hook)
    return (
        not isinstance(owner, RoutedForward | Exchange) and getattr(hook, "__name__", "") != "make_inputs_require_grads"
    )


def _activation(config: PreTrainedConfig) -> str | None:
    return getattr(config, "hidden_activation", None) or getattr(config, "hidden_act", None)


def _mixes_biases(config: PreTrainedConfig) -> bool:
    """Whether projections with a bias and without one read the same input: queries, and the vector of keys and values."""
    return getattr(config, "kv_lora_rank", None) is not None and config.q_lora_rank is None and config.attention_bias


@torch.no_grad()
def _read(decoder: Any, layers: Sequence[Any]) -> DenseDecoder:
    config, attention = decoder.config, decoder.layers[0].self_attn
    cut, row = cut_of(attention.o_proj), _row_of(decoder)
    num_ranks = 1 if cut is None else cut.group.size()
    is_latent = hasattr(attention, "kv_b_proj")
    embed_scale = getattr(decoder.embed_tokens, "embed_scale", None)
    softcap, activation = getattr(attention, "attn_logit_softcapping", None), _activation(config)
    rotaries = getattr(decoder.rotary_emb, "layer_types", ())
    share = 1.0 if rotaries else (config.rope_parameters or {}).get("partial_rotary_factor", 1.0)
    departures = {
        "norms": row.adds_one or any(row.norms[1::2]),
        "embedding": embed_scale is not None,
        "activation": activation != "silu",
        "caps": softcap is not None,
        "rotary": bool(rotaries) or row.pairs or share != 1.0,
        "latent": is_latent,
        "router": hasattr(config, "n_group"),
        "divided": cut is not None,
    }
    return DenseDecoder(
        embed=decoder.embed_tokens.weight,
        embed_scale=embed_scale,
        padding_idx=decoder.embed_tokens.padding_idx,
        vocabulary=cut_of(decoder.embed_tokens),
        layers=tuple(layers),
        final_norm=_norm(decoder.norm, row),
        rotary=decoder.rotary_emb,
        num_heads=config.num_attention_heads // num_ranks,
        num_kv_heads=config.num_key_value_heads // num_ranks,
        head_dim=attention.qk_head_dim if is_latent else attention.head_dim,
        scale=float(attention.scaling),
        softcap=softcap,
        activation=str(activation),
        rotaries=tuple(rotaries),
        pairs=row.pairs and getattr(config, "rope_interleave", True),
        departures=frozenset(name for name, departs in departures.items() if departs),
    )


def _layer(layer: Any, row: ModelFamily, join: Join) -> DenseLayer:
    attention, mlp = layer.self_attn, layer.mlp
    before, after, before_feed, after_feed = (getattr(layer, name) if name else None for name in row.norms)
    mixture = _mixture(mlp, attention.layer_idx, join) if hasattr(mlp, "experts") else None
    latent, kind = hasattr(attention, "kv_b_proj"), getattr(attention, "layer_type", None)
    return DenseLayer(
        input_norm=_norm(before, row),
        qkv=join(_parts(attention, _LATENT if latent else ("q_proj", "k_proj", "v_proj"), "qkv_proj")),
        q_norm=_norm_if(getattr(attention, "q_norm", None), row),
        k_norm=_norm_if(getattr(attention, "k_norm", None), row),
        o=join((attention.o_proj,)),
        post_norm=_norm(before_feed, row),
        gate_up=NO_PROJECTION if mixture is not None else join(_parts(mlp, ("gate_proj", "up_proj"), "gate_up_proj")),
        down=NO_PROJECTION if mixture is not None else join((mlp.down_proj,)),
        sliding_window=_sliding_window(attention),
        attention_norm=_norm_if(after, row),
        feed_norm=_norm_if(after_feed, row),
        rotary=kind if kind in (attention.config.rope_parameters or {}) else None,
        mixture=mixture,
        latent=_latent(attention, row, join) if latent else None,
    )


def _parts(owner: Any, names: Sequence[str], joined: str) -> list[nn.Linear]:
    """The projections of an input, or the projection in which the family has joined them."""
    if hasattr(owner, joined):
        return [getattr(owner, joined)]
    return [part for name in names if (part := getattr(owner, name, None)) is not None]


def _latent(attention: Any, row: ModelFamily, join: Join) -> Latent:
    is_narrow = getattr(attention, "q_a_proj", None) is not None  # transformers 5.6 has no attribute then
    return Latent(
        q_norm=_norm(attention.q_a_layernorm, row) if is_narrow else None,
        q_up=join((attention.q_b_proj,)) if is_narrow else None,
        kv_norm=_norm(attention.kv_a_layernorm, row),
        kv_up=join((attention.kv_b_proj,)),
        plain=attention.qk_nope_head_dim,
        rotated=attention.qk_rope_head_dim,
        value=attention.v_head_dim,
    )


def _mixture(block: Any, layer: int, join: Join) -> Mixture:
    shared = getattr(block, "shared_expert", None) or getattr(block, "shared_experts", None)
    gate, share = block.gate, getattr(block, "shared_expert_gate", None)
    if hasattr(gate, "e_score_correction_bias"):
        config = block.config  # the router of transformers 5.6 has few of these numbers
        groups = config.n_group, config.topk_group, float(config.routed_scaling_factor)
        num_chosen, normalizes = config.num_experts_per_tok, config.norm_topk_prob
        rule = ChoiceRule(num_chosen, normalizes, True, gate.e_score_correction_bias, *groups)
    else:
        rule = ChoiceRule(gate.top_k, getattr(gate, "norm_topk_prob", True))  # Mixtral always does
    return Mixture(
        layer=layer,
        router=gate.weight,
        gate_up=block.experts.gate_up_proj,
        down=block.experts.down_proj,
        rule=rule,
        shared=None
        if shared is None
        else SharedExpert(
            join((shared.gate_proj, shared.up_proj)),
            join((shared.down_proj,)),
            None if share is None else join((share,)),
        ),
        group=getattr(block.experts, "group", None),
        summed=block.experts.here if isinstance(block.experts, SummedExperts) else None,
    )


def _sliding_window(attention: nn.Module) -> int | None:
    window = getattr(attention, "sliding_window", None)
    reads_config = ("MistralAttention", "MixtralAttention", "Phi3Attention")  # which read it there
    if window is None and type(attention).__name__ in reads_config:
        window = getattr(attention.config, "sliding_window", None)
    return window


def _norm(module: Any, row: ModelFamily) -> Norm:
    return Norm(module.weight, float(module.eps if row.adds_one else module.variance_epsilon), row.adds_one)


def _norm_if(module: Any, row: ModelFamily) -> Norm | None:
    return None if module is None else _norm(module, row)
