"""The forward of a plain decoder on a CPU: one call of the compiled kernels for all layers, or up to a mixture of experts.

It rounds at the same places as the modules. Every sum has one order: a token's keys, values and logits are the same bits with
any neighbours, in any chunk of its prompt, and as a prompt token or a sampled token. Experts have the trainer's sums.
"""

from __future__ import annotations

import ctypes
from collections.abc import Sequence
from dataclasses import dataclass, replace
from functools import partial

import numpy as np
import torch
import torch.nn.functional as F

from verl.models.adapter_weights import LowRank
from verl.models.decoder.forward import embedded
from verl.models.decoder.layers import DenseLayer, Norm
from verl.models.decoder.projection import Projection
from verl.models.decoder.reuse import ActivationStore
from verl.models.decoder.taped import TapedPass
from verl.models.decoder.weights import DenseDecoder
from verl.models.qat import rounds_layers
from verl.models.vision import ImageFeatures
from verl.rollout.native.adapters import ArrangedAdapters, TokenAdapters
from verl.rollout.native.compiled.library import (
    MAX_HEAD_DIM,
    PAIRS,
    Kernels,
    Layer,
    Model,
    PackedLowRank,
    RecordedSlots,
    Step,
    buffer,
)
from verl.rollout.native.compiled.store import Shape
from verl.rollout.native.compiled.tokens import DecodeTiles, StepTokens

_MAX_TILE_QUERIES = 32  # of an attention task; their scores with thousands of keys stay in the level-2 cache


class PackedAdapter:
    """A copy of an adapter for the products of all layers and the head, see `struct low_rank`."""

    def __init__(self, kernels: Kernels, joined: Sequence[LowRank | None]):
        self.rank = max((len(pair.down) for pair in joined if pair is not None), default=0)
        self._held: list[torch.Tensor] = []
        self.products = (PackedLowRank * len(joined))()
        for number, pair in enumerate(joined):
            if pair is not None:
                is_gate_up = number % 4 == 2  # of a layer; the head has the number 4 * layers
                up = kernels.pack_halves(pair.up) if is_gate_up else kernels.pack(pair.up)
                down = kernels.pack(pair.down)
                self._held += [down, up]
                self.products[number] = PackedLowRank(down.data_ptr(), up.data_ptr(), len(pair.down))


class AdapterRuns:
    """Runs of equal adapters among a forward's tokens, and among the tokens at `keep`; adapters from layer `first` on."""

    def __init__(
        self, tokens: TokenAdapters | None, packed: ArrangedAdapters[PackedAdapter], keep: np.ndarray, first: int = 0
    ):
        ends, adapters = (np.zeros(0, np.int64), []) if tokens is None else tokens.runs()
        self.ends, self.kept_ends = ends, np.searchsorted(keep, ends).astype(np.int64)
        self._packed = [None if adapter is None else packed.of(adapter) for adapter in adapters]
        self.max_rank = max((p.rank for p in self._packed if p is not None), default=0)
        skipped = 4 * first * ctypes.sizeof(PackedLowRank)
        addresses = [None if p is None else ctypes.addressof(p.products) + skipped for p in self._packed]
        self.pointers = (ctypes.c_void_p * len(addresses))(*addresses)


@dataclass(frozen=True)
class _Call:
    """The tokens of a forward, for all of its layers."""

    cos: torch.Tensor  # [tokens, head_dim]
    sin: torch.Tensor
    arrays: list[np.ndarray]
    tokens: StepTokens
    adapters: TokenAdapters | None
    record: RecordedSlots | None


def _record(store: ActivationStore, slots: np.ndarray) -> RecordedSlots:
    return RecordedSlots(*(part.data_ptr() for part in store.parts), store.capacity, slots.ctypes.data)


class CpuForward:
    """Holds a packed copy of the weights, so it serves while the weights stay as they are."""

    def __init__(
        self,
        kernels: Kernels,
        module: torch.nn.Module,
        decoder: DenseDecoder,
        head: Projection,
        *,
        int8: bool = False,
        int8_cache: bool = False,
        shares: CpuForward | None = None,
    ):
        """With `int8`, layers and the head multiply in int8; the head does not if the layers train so. With `int8_cache`, keys
        and values are int8. `shares` has the packed copy of `head` that is read, and must live as long."""
        self.states: torch.Tensor | None = None  # [tokens, hidden] of the last forward, before the final norm
        self.keeps_states = False
        self._adapters = ArrangedAdapters(module, [*decoder.projections(), head], partial(PackedAdapter, kernels))
        self.decoder, self._kernels, self._int8 = decoder, kernels, int8
        self.dtype = decoder.embed.dtype
        self.max_tile = max(1, min(8, _MAX_TILE_QUERIES // (decoder.num_heads // decoder.num_kv_heads)))
        self.num_copied_bytes, self._held = 0, list[torch.Tensor]()
        self._layers = (Layer * len(decoder.layers))(*(self._layer(layer) for layer in decoder.layers))
        vocab, hidden = head.weight.shape
        inner = max((layer.down.weight.shape[1] for layer in decoder.layers if layer.mixture is None), default=0)
        int8_head = int8 and not rounds_layers(module) if shares is None else bool(shares._model.int8_head)
        self._model: Model = Model(
            layers=len(decoder.layers),
            hidden=hidden,
            heads=decoder.num_heads,
            kv_heads=decoder.num_kv_heads,
            head_dim=decoder.head_dim,
            inner=inner,
            vocab=vocab,
            hidden_block=self._sum_block(hidden),
            heads_block=self._sum_block(decoder.layers[0].o.weight.shape[1]),
            inner_block=self._sum_block(inner) if inner else 0,
            bf16=self.dtype == torch.bfloat16,
            kind=kernels.kind(self.dtype),
            int8=int8,
            int8_head=int8_head,
            int8_cache=int8_cache,
            scale=decoder.scale,
            final_eps=decoder.final_norm.eps,
            layer=ctypes.addressof(self._layers),
            final_norm=self._vector(decoder.final_norm.weight),
            head_bias=self._bias(head.bias),
            head=self._keep(kernels.pack(head.weight, int8=int8_head)) if shares is None else shares._model.head,
        )
        self._logits = torch.empty(0, kernels.padded(vocab))
        self._x_bytes = 4 * kernels.padded(hidden)  # of a token's hidden states
        self._work = buffer(0)

    @staticmethod
    def fits(decoder: DenseDecoder, head: Projection) -> bool:
        """Whether the kernels compute this model; its weights may have no values yet."""
        tensors = [decoder.embed, head.weight, *(p.weight for p in decoder.projections())]
        return (
            all(t.device.type in ("cpu", "meta") and t.dtype == tensors[0].dtype for t in tensors)
            and tensors[0].dtype in (torch.float32, torch.bfloat16)
            and len(decoder.layers) > 0
            and not decoder.departures
            and len({layer.down.weight.shape for layer in decoder.layers if layer.mixture is None}) <= 1
            and all(layer.mixture is None or layer.mixture.group is None for layer in decoder.layers)
            and decoder.head_dim <= MAX_HEAD_DIM
            and decoder.head_dim % 2 == 0
        )

    @property
    def store_shape(self) -> Shape:
        """Sizes of the stores of its keys and values."""
        stored = torch.int8 if self._model.int8_cache else self.dtype
        return Shape(len(self._layers), self.decoder.num_kv_heads, self.decoder.head_dim, stored)

    def tiles(self, rows: np.ndarray, slots: np.ndarray | None, lengths: np.ndarray | None) -> DecodeTiles:
        return DecodeTiles(rows, slots, lengths, self.max_tile)

    def logits(
        self,
        ids: torch.Tensor,
        positions: torch.Tensor,
        keep: torch.Tensor | None,
        tokens: StepTokens,
        adapters: TokenAdapters | None = None,
        images: ImageFeatures | None = None,
        recorded: tuple[ActivationStore, np.ndarray] | None = None,
    ) -> torch.Tensor:
        """Logits after the tokens at the ascending indices `keep`, or after all tokens: float32 [len(keep), vocab],
        overwritten by the next call. `ids` are int64 [tokens], `positions` [tokens] or [axes, tokens]. Tokens with equal
        `adapters` should be neighbours. `recorded` is a store of activations with a slot of each token, int64 [tokens], -1
        for none. It has no effect with `images`."""
        x = embedded(self.decoder, ids, images).detach()
        return self.logits_behind(x, positions, keep, tokens, adapters, images, recorded)

    def logits_behind(
        self,
        x: torch.Tensor,
        positions: torch.Tensor,
        keep: torch.Tensor | None,
        tokens: StepTokens,
        adapters: TokenAdapters | None = None,
        images: ImageFeatures | None = None,
        recorded: tuple[ActivationStore, np.ndarray] | None = None,
    ) -> torch.Tensor:
        """See `logits`; `x` is the input of the first layer, [tokens, hidden]."""
        cos, sin = (t[0].float().contiguous() for t in self.decoder.rotary(x.unsqueeze(0), positions.unsqueeze(-2)))
        everything = torch.arange(len(x))
        outputs = keep = everything if keep is None else keep
        arrays = [
            np.ascontiguousarray(getattr(tokens, name), dtype=np.int64)
            for name in ("position", "prefix_slot", "prefix_end", "own_slot", "own_end", "order", "tiles")
        ]
        call = _Call(cos, sin, arrays, tokens, adapters, None if recorded is None else _record(*recorded))
        first, experts = 0, TapedPass(self.decoder, tokens.routing)
        for number, layer in enumerate(self.decoder.layers):
            is_deep = images is not None and number < len(images.deep)
            if layer.mixture is None and not is_deep:
                continue
            self._run(call, x, first, number + 1)
            first = number + 1
            x = self._states(len(x))
            # else experts of all tokens are recorded, or features of images added to them
            if first == len(self._layers) and tokens.routing is None and not is_deep:
                x, keep = x[keep], everything[: len(keep)]
            if layer.mixture is not None:
                x, _ = experts.feed_forward(layer, x, None)
            if images is not None and is_deep:
                x = images.deepened(number, x)
        if self.keeps_states and len(keep) < len(x) and first < len(self._layers):  # else only states of `keep` exist
            self._run(call, x, first, len(self._layers))
            first, call = len(self._layers), replace(call, record=None)
            self.states = x = self._states(len(x))
        if first == len(self._layers) and len(keep) < len(x):
            x, keep = x[keep], everything[: len(keep)]
        self._run(call, x, first, len(self._layers), keep, outputs)
        if self.keeps_states and len(outputs) == len(everything):
            self.states = self._states(len(x))
        if recorded is not None:
            recorded[0].note(torch.from_numpy(recorded[1]), outputs)
        return self._logits[: len(keep), : self._model.vocab]

    def _states(self, count: int) -> torch.Tensor:
        """A copy of the states of the first tokens in the workspace, see lay_out() in decoder.c. Their values there are of the
        model's dtype."""
        states = self._work[: count * self._x_bytes].view(torch.float32).view(count, -1)
        return states[:, : self._model.hidden].to(self.dtype, copy=True)

    def _run(
        self,
        call: _Call,
        x: torch.Tensor,
        first: int,
        end: int,
        keep: torch.Tensor | None = None,
        outputs: torch.Tensor | None = None,
    ) -> None:
        """Compute layers [first, end) of hidden states `x` [tokens, hidden], and the logits of `keep` if given. `outputs` are
        the indices of these tokens in the step."""
        model, tokens = Model.from_buffer_copy(self._model), call.tokens
        model.layers, model.layer = end - first, ctypes.addressof(self._layers) + first * ctypes.sizeof(Layer)
        if keep is None:
            model.vocab, keep = 0, torch.arange(len(x))
        elif self._logits.shape[0] < len(keep):
            self._logits = torch.empty(len(keep), self._logits.shape[1])
        runs = AdapterRuns(call.adapters, self._adapters, (keep if outputs is None else outputs).numpy(), first)
        step = Step(
            len(x), len(tokens.tiles) - 1, self.max_tile, int(tokens.position.max()) + 1, len(keep),
            torch.get_num_threads(), len(runs.ends), runs.max_rank, x.data_ptr(), call.cos.data_ptr(),
            call.sin.data_ptr(), *(a.ctypes.data for a in call.arrays), keep.data_ptr(), runs.ends.ctypes.data,
            runs.kept_ends.ctypes.data, ctypes.addressof(runs.pointers), tokens.prefix.view().behind(first),
            tokens.row_store.view().behind(first), None if call.record is None else ctypes.addressof(call.record),
            self._logits.data_ptr(),
        )  # fmt: skip
        needed = self._kernels.workspace(model, step)
        if len(self._work) < needed:
            self._work = buffer(needed)
        step.work = self._work.data_ptr()
        self._kernels.forward(model, step)

    def _sum_block(self, inputs: int) -> int:
        return (self._kernels.sum_block(inputs) or 0) if self._kernels.kind(self.dtype) == PAIRS else 0

    def _layer(self, layer: DenseLayer) -> Layer:
        q_norm, k_norm = layer.q_norm, layer.k_norm
        return Layer(
            qkv=self._packed(layer.qkv.weight),
            o=self._packed(layer.o.weight),
            gate_up=None
            if layer.mixture is not None
            else self._keep(self._kernels.pack_halves(layer.gate_up.weight, int8=self._int8)),
            down=None if layer.mixture is not None else self._packed(layer.down.weight),
            qkv_bias=self._bias(layer.qkv.bias),
            o_bias=self._bias(layer.o.bias),
            gate_up_bias=self._bias(layer.gate_up.bias, parts=2),
            down_bias=self._bias(layer.down.bias),
            input_norm=self._vector(layer.input_norm.weight),
            post_norm=self._vector(layer.post_norm.weight),
            q_norm=self._norm(q_norm),
            k_norm=self._norm(k_norm),
            input_eps=layer.input_norm.eps,
            post_eps=layer.post_norm.eps,
            q_eps=q_norm.eps if q_norm is not None else 0.0,
            k_eps=k_norm.eps if k_norm is not None else 0.0,
            window=layer.sliding_window or 0,
        )

    def _packed(self, weight: torch.Tensor) -> int:
        return self._keep(self._kernels.pack(weight, int8=self._int8))

    def _bias(self, bias: torch.Tensor | None, parts: int = 1) -> int | None:
        if bias is None:
            return None
        padded = [F.pad(b, (0, self._kernels.padded(len(b)) - len(b))) for b in bias.detach().float().chunk(parts)]
        return self._keep(torch.cat(padded))

    def _norm(self, norm: Norm | None) -> int | None:
        return None if norm is None else self._vector(norm.weight)

    def _vector(self, values: torch.Tensor) -> int:
        return self._keep(values.detach().float().clone())

    def _keep(self, tensor: torch.Tensor) -> int:
        self._held.append(tensor)
        self.num_copied_bytes += tensor.numel() * tensor.element_size()
        return tensor.data_ptr()
