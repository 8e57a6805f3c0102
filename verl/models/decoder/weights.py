"""The weights of a dense decoder of the Llama plan, as the fused forwards read them.

The module keeps its parameters, names and forward. Only the storage of the parameters is arranged: the
projections that read the same input (q, k, v; gate, up) lie back to back in one tensor, of which the parameters are
views, so that one matrix product computes them together. An optimizer that writes in place, or a load that copies,
keeps the arrangement; what replaces storage (`module.to(...)`) breaks it, and `DenseDecoder.of` restores it.

A module is taken only when nothing in it can differ from this plan: exact classes, plain parameters, no hooks. For
others `of` returns None and the module's own forward is called. Adapters are taken for callers that compute them.

If a module is sharded, each layer is a unit (`LayerUnit`), whose weights are whole while its module is called.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from typing import Any, cast
from weakref import WeakKeyDictionary

import torch
import torch.distributed as dist
from torch import nn

from verl.model_families import FAMILIES
from verl.models.lora import LoRALinear
from verl.models.parallel.experts import DispatchedExperts
from verl.models.parallel.tensor import Cut, Exchange, cut_of
from verl.models.routing import RoutedForward
from verl.models.vision import language_model_of

_DECODERS = {row.decoder: row for row in FAMILIES.values() if row.decoder}
_PLAIN_PARTS = (nn.Linear, LoRALinear, nn.Embedding, nn.ModuleList, nn.SiLU, DispatchedExperts)


@dataclass(frozen=True)
class Projection:
    """One or several nn.Linear that read the same input: `weight` [outputs, inputs] and `bias` [outputs] hold them back
    to back; `parts` are the modules, in order, whose parameters are views of them. A `cut` weight is this rank's part."""

    weight: torch.Tensor
    bias: torch.Tensor | None
    parts: tuple[nn.Linear, ...]
    cut: Cut | None = None

    @property
    def inputs_group(self) -> dist.ProcessGroup | None:
        """The ranks whose gradients of the inputs are added up, since each has some of the outputs."""
        return self.cut.group if self.cut is not None and self.cut.dim == 0 else None

    @property
    def outputs_group(self) -> dist.ProcessGroup | None:
        """The ranks whose products are added up before the bias, since each has some of the inputs."""
        return self.cut.group if self.cut is not None and self.cut.dim == 1 else None

    @property
    def is_joined(self) -> bool:
        """Whether the parameters still are the views that they were made."""
        start = self.weight.data_ptr()
        for part in self.parts:
            if part.weight.data_ptr() != start or part.weight.dtype != self.weight.dtype:
                return False
            start += part.weight.numel() * part.weight.element_size()
        return True


_NONE = Projection(torch.empty(0), None, ())


@dataclass(frozen=True)
class Norm:
    """RMS norm: x / sqrt(mean(x^2) + eps), rounded to the input's dtype, times `weight`."""

    weight: nn.Parameter
    eps: float


@dataclass(frozen=True)
class SharedExpert:
    """An expert of all tokens; `gate` [1, hidden] weights it by a sigmoid."""

    gate_up: Projection
    down: Projection
    gate: Projection


@dataclass(frozen=True)
class Mixture:
    """Experts of which each token has the `num_chosen` with the greatest softmax of the router. `group` are the ranks that have
    some of the experts each."""

    layer: int
    router: nn.Parameter  # [experts, hidden]
    gate_up: nn.Parameter  # [experts here, 2 * width, hidden]
    down: nn.Parameter  # [experts here, hidden, width]
    num_chosen: int
    normalizes: bool  # weights of a token's experts, to a sum of 1
    shared: SharedExpert | None
    group: dist.ProcessGroup | None

    @property
    def parameters(self) -> tuple[nn.Parameter, ...]:
        """Those outside of `projections`."""
        return self.router, self.gate_up, self.down

    @property
    def projections(self) -> tuple[Projection, ...]:
        """Products that all tokens have."""
        return () if self.shared is None else (self.shared.gate_up, self.shared.down, self.shared.gate)


@dataclass(frozen=True)
class DenseLayer:
    """A `mixture` replaces gate_up and down, which are then empty."""

    input_norm: Norm
    qkv: Projection
    q_norm: Norm | None  # per head, before the rotary embedding
    k_norm: Norm | None
    o: Projection
    post_norm: Norm
    gate_up: Projection
    down: Projection
    sliding_window: int | None
    mixture: Mixture | None = None
    feed: None = None  # see LayerUnit

    def call(self, computed: ComputedLayer, number: int, x: torch.Tensor) -> torch.Tensor:
        """`computed(number, self, x)`."""
        return computed(number, self, x)

    def gathered(self) -> DenseLayer:
        """The weights of this layer."""
        return self


class LayerUnit:
    """A layer whose weights are whole during a call of its module and during the backward of that call: hooks of the module
    gather and free them, as FSDP2's do. `feed` is None, or the unit of experts that are gathered by themselves, with whose
    call the second half of the layer is computed."""

    def __init__(self, layer: nn.Module, experts: nn.Module | None = None):
        """The unit of a layer, or of its `experts`."""
        self.layer, self.module = layer, experts or layer
        self.module.forward = self._forward  # hooks stay around it
        divided = next((part for part in layer.modules() if isinstance(part, DispatchedExperts)), None)
        self.feed = LayerUnit(layer, divided) if experts is None and divided is not None else None

    def call(self, computed: ComputedLayer, number: int, x: torch.Tensor) -> torch.Tensor:
        """`computed(number, self, x)`, inside a call of the module."""
        out: torch.Tensor = nn.Module.__call__(self.module, computed, number, x)  # past transformers' checkpointing
        return out

    def _forward(self, computed: ComputedLayer, number: int, x: torch.Tensor) -> torch.Tensor:
        return computed(number, self, x)

    def gathered(self) -> DenseLayer:
        """The weights, now that they are whole; joined projections are copies."""
        return _layer(self.layer, _copied)


Layer = DenseLayer | LayerUnit
ComputedLayer = Callable[[int, Layer, torch.Tensor], torch.Tensor]


@dataclass(frozen=True)
class DenseDecoder:
    """Everything between token ids and final hidden states. `rotary(x, position_ids)` gives cos and sin
    [1, tokens, head_dim] in the dtype of `x`, for positions [1, tokens], or [axes, 1, tokens] of a family with images."""

    embed: nn.Parameter  # [vocabulary, hidden]
    padding_idx: int | None  # whose embedding gets no gradient
    vocabulary: Cut | None  # of the embedding
    layers: tuple[DenseLayer, ...]
    final_norm: Norm
    rotary: nn.Module
    num_heads: int
    num_kv_heads: int
    head_dim: int
    scale: float

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
            read = _known[decoder] = _read(decoder, [_layer(layer, _join) for layer in _layers_of(decoder)])
        return read

    def projections(self) -> Iterator[Projection]:
        for layer in self.layers:
            yield from (layer.qkv, layer.o)
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
    _units[decoder] = [LayerUnit(layer) for layer in shards]
    return True


def _layers_of(decoder: Any) -> list[nn.Module]:
    return list(decoder.layers[: decoder.config.num_hidden_layers])


def _is_plain(decoder: nn.Module, *, may_be_meta: bool = False) -> bool:
    """Whether the decoder is of a known class and consists of unwrapped modules with plain local parameters."""
    kind = type(decoder)
    if kind.__name__ not in _DECODERS or not kind.__module__.startswith("transformers.models."):
        return False
    rotated_share = (getattr(decoder.config, "rope_parameters", None) or {}).get("partial_rotary_factor", 1.0)
    if getattr(decoder.config, "hidden_act", None) != "silu" or rotated_share != 1.0:
        return False
    if getattr(decoder.config, "router_jitter_noise", 0.0):
        return False
    for part in decoder.modules():
        hooks = (*part._forward_hooks.values(), *part._forward_pre_hooks.values(), *part._backward_hooks.values())
        if any(map(_changes_results, hooks)):
            return False
        if not isinstance(vars(part).get("forward"), RoutedForward | None):
            return False
        is_known = type(part).__module__.startswith("transformers.models.")
        if isinstance(part, nn.Dropout) and part.p == 0:
            continue
        if not is_known and type(part) not in _PLAIN_PARTS:
            if type(part).__module__ != "transformers.activations":
                return False
    return all(type(p) is nn.Parameter and (may_be_meta or not p.is_meta) for p in decoder.parameters())


def _changes_results(hook: object) -> bool:
    """Gradient checkpointing marks the embeddings as requiring gradients, which changes nothing here. Routing replay hands
    choices of experts to modules, and tensor parallelism adds up results of modules: the decoder does both by itself."""
    owner = getattr(hook, "__self__", hook)
    return (
        not isinstance(owner, RoutedForward | Exchange) and getattr(hook, "__name__", "") != "make_inputs_require_grads"
    )


@torch.no_grad()
def _read(decoder: Any, layers: Sequence[Any]) -> DenseDecoder:
    config, attention = decoder.config, decoder.layers[0].self_attn
    cut = cut_of(attention.o_proj)
    num_ranks = 1 if cut is None else cut.group.size()
    return DenseDecoder(
        embed=decoder.embed_tokens.weight,
        padding_idx=decoder.embed_tokens.padding_idx,
        vocabulary=cut_of(decoder.embed_tokens),
        layers=tuple(layers),
        final_norm=_norm(decoder.norm),
        rotary=decoder.rotary_emb,
        num_heads=config.num_attention_heads // num_ranks,
        num_kv_heads=config.num_key_value_heads // num_ranks,
        head_dim=attention.head_dim,
        scale=float(attention.scaling),
    )


def _layer(layer: Any, join: Callable[[Sequence[nn.Linear]], Projection]) -> DenseLayer:
    attention, mlp = layer.self_attn, layer.mlp
    qkv, gate_up = ["q_proj", "k_proj", "v_proj"], ["gate_proj", "up_proj"]
    if hasattr(attention, "qkv_proj"):
        qkv, gate_up = ["qkv_proj"], ["gate_up_proj"]
    mixture = _mixture(mlp, attention.layer_idx, join) if hasattr(mlp, "experts") else None
    q_norm, k_norm = getattr(attention, "q_norm", None), getattr(attention, "k_norm", None)
    return DenseLayer(
        input_norm=_norm(layer.input_layernorm),
        qkv=join([getattr(attention, name) for name in qkv]),
        q_norm=_norm(q_norm) if q_norm is not None else None,
        k_norm=_norm(k_norm) if k_norm is not None else None,
        o=join((attention.o_proj,)),
        post_norm=_norm(layer.post_attention_layernorm),
        gate_up=_NONE if mixture is not None else join([getattr(mlp, name) for name in gate_up]),
        down=_NONE if mixture is not None else join((mlp.down_proj,)),
        sliding_window=_sliding_window(attention),
        mixture=mixture,
    )


def _mixture(block: Any, layer: int, join: Callable[[Sequence[nn.Linear]], Projection]) -> Mixture:
    shared = getattr(block, "shared_expert", None)
    return Mixture(
        layer=layer,
        router=block.gate.weight,
        gate_up=block.experts.gate_up_proj,
        down=block.experts.down_proj,
        num_chosen=block.gate.top_k,
        normalizes=getattr(block.gate, "norm_topk_prob", True),  # Mixtral always does
        shared=None
        if shared is None
        else SharedExpert(
            join((shared.gate_proj, shared.up_proj)), join((shared.down_proj,)), join((block.shared_expert_gate,))
        ),
        group=getattr(block.experts, "group", None),
    )


def _sliding_window(attention: nn.Module) -> int | None:
    window = getattr(attention, "sliding_window", None)
    reads_config = ("MistralAttention", "MixtralAttention", "Phi3Attention")  # which read it there
    if window is None and type(attention).__name__ in reads_config:
        window = getattr(attention.config, "sliding_window", None)
    return window


def _norm(module: Any) -> Norm:
    return Norm(module.weight, float(module.variance_epsilon))


def _join(parts: Sequence[nn.Linear]) -> Projection:
    """Lay the parts' weights (and biases) back to back, and make the parameters views of that."""
    return _projection(parts, _joined)


def _copied(parts: Sequence[nn.Linear]) -> Projection:
    """The parts' weights (and biases) back to back, in a copy unless the owner of their storage has arranged them so."""
    return _projection(parts, _whole)


def _projection(parts: Sequence[nn.Linear], join: Callable[[list[nn.Parameter]], torch.Tensor]) -> Projection:
    biases = [part.bias for part in parts if part.bias is not None]
    assert len(biases) in (0, len(parts)), "either all projections of an input have a bias or none has"
    weight = join([cast(nn.Parameter, part.weight) for part in parts])
    return Projection(weight, join(biases) if biases else None, tuple(parts), cut_of(parts[0]))


def _joined(parameters: Sequence[nn.Parameter]) -> torch.Tensor:
    joined, start = _whole(parameters), 0
    for parameter in parameters if joined.data_ptr() != parameters[0].data_ptr() else ():
        parameter.data = joined[start : start + len(parameter)]
        start += len(parameter)
    return joined


def _whole(parameters: Sequence[nn.Parameter]) -> torch.Tensor:
    """The parameters as one tensor: a view if they lie so already, else a copy."""
    parts = [parameter.data for parameter in parameters]
    adjacent = _adjacent(parts)
    return torch.cat(parts) if adjacent is None else adjacent


def _adjacent(parts: Sequence[torch.Tensor]) -> torch.Tensor | None:
    """`parts` as one tensor where they lie back to back already, as weights do that were moved together."""
    first, start = parts[0], parts[0].data_ptr()
    for part in parts:
        is_same = part.untyped_storage().data_ptr() == first.untyped_storage().data_ptr() and part.dtype == first.dtype
        if not is_same or part.data_ptr() != start or not part.is_contiguous():
            return None
        start += part.numel() * part.itemsize
    return first.as_strided((sum(map(len, parts)), *first.shape[1:]), first.stride())
