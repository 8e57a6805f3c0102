"""The forward of the native engine for plain dense decoders, computed straight through: no modules, few operators.

It reads the module's own weights (verl.models.decoder.weights) and rounds where the modules do. Its callers hold no
gradients.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import NamedTuple, cast

import torch
import torch.nn.functional as F
from torch import nn

from verl.models.adapter_weights import LowRank
from verl.models.attention import Scoring
from verl.models.decoder.weights import DenseDecoder, DenseLayer, Norm, Projection
from verl.models.forward import head_transform
from verl.models.hf_module import HFModule
from verl.models.lora import LoRALinear
from verl.models.ops.linear import Matmul
from verl.models.vision import ImageFeatures, num_deep_layers
from verl.parallel.device import multiplies_bf16_tiles
from verl.rollout.layout import StepLayout
from verl.rollout.native.adapters import ArrangedAdapters, TokenAdapters
from verl.rollout.native.compiled.forward import CpuForward
from verl.rollout.native.compiled.library import Kernels, kernels

_PLAIN_LOGITS = {"softcap": None, "logit_scale": 1.0}

Product = Callable[[torch.Tensor], torch.Tensor]  # x [tokens, inputs] -> [tokens, outputs], in x's dtype


class _Layer(NamedTuple):
    weights: DenseLayer
    scoring: Scoring
    qkv: Product
    o: Product
    gate_up: Product
    down: Product


class DenseForward:
    """Made by `of`. The matmuls may hold a copy of the weights, so it serves while the weights stay as they are."""

    def __init__(self, module: nn.Module, decoder: DenseDecoder, head: Projection, *, prepack: bool):
        self.decoder = decoder
        self._adapters = ArrangedAdapters(module, [*decoder.projections(), head], _products)
        self._layers = [
            _Layer(
                layer,
                Scoring(decoder.scale, layer.sliding_window),
                *(product(p, prepack=prepack) for p in (layer.qkv, layer.o, layer.gate_up, layer.down)),
            )
            for layer in decoder.layers
        ]
        self._head = product(head, prepack=prepack)

    @classmethod
    def of(cls, module: HFModule, *, prepack: bool, required: bool = False) -> DenseForward | CpuForward | None:
        """The fused forward of a causal language model, or None when the model's own forward must be called. With `prepack` it
        uses the compiled kernels where `compiled` gives them."""
        decoder, head = DenseDecoder.of(module, adapters=True), module.get_output_embeddings()
        is_plain = type(module).__module__.startswith("transformers.models.") and type(head) in (nn.Linear, LoRALinear)
        if decoder is None or not is_plain or head._forward_hooks or head._forward_pre_hooks:
            return None
        if head_transform(module.config) != _PLAIN_LOGITS:
            return None
        bias = None if head.bias is None else head.bias.detach()
        projection = Projection(head.weight.detach(), bias, (head,))
        if (kernels := compiled(module, decoder, projection, prepack=prepack, required=required)) is not None:
            return CpuForward(kernels, module, decoder, projection)
        return cls(module, decoder, projection, prepack=prepack)

    @property
    def products(self) -> list[Product]:
        """All matmuls, layer by layer, then the head's."""
        held = [p for layer in self._layers for p in (layer.qkv, layer.o, layer.gate_up, layer.down)]
        return [*held, self._head]

    @property
    def num_copied_bytes(self) -> int:
        """Memory of the copies of weights that it holds."""
        return sum(p.num_bytes for p in self.products if isinstance(p, _Widened))

    def logits(
        self,
        ids: torch.Tensor,
        positions: torch.Tensor,
        keep: torch.Tensor | None,
        layout: StepLayout,
        adapters: TokenAdapters | None = None,
        images: ImageFeatures | None = None,
    ) -> torch.Tensor:
        """[kept, vocab]: the logits after the tokens whose indices `keep` holds, or after all. `ids` are int64 [tokens], and
        `positions` [tokens] or [axes, tokens]; `layout`, `adapters` and `images` have the same tokens."""
        decoder = self.decoder
        x = F.embedding(ids, decoder.embed)
        if images is not None:
            x = images.embedded(x)
        cos, sin = decoder.rotary(x.unsqueeze(0), positions.unsqueeze(-2))
        rotation = _Rotation(cos[0], sin[0])
        last, add = len(self._layers) - 1, self._adding(adapters, x.device)
        for index, layer in enumerate(self._layers):
            normed = _normed(x, layer.weights.input_norm)
            q, k, v = self._heads(add(4 * index, normed, layer.qkv(normed)), layer.weights, rotation)
            attended = layout.attend_tokens(index, q, k, v, layer.scoring).flatten(1)
            if index == last and keep is not None:
                x, attended = x.index_select(0, keep), attended.index_select(0, keep)
                add = self._adding(adapters, x.device, keep)
                images = None if images is None else images.among(keep)
            x.add_(add(4 * index + 1, attended, layer.o(attended)))
            normed = _normed(x, layer.weights.post_norm)
            gate, up = add(4 * index + 2, normed, layer.gate_up(normed)).chunk(2, dim=1)
            inner = F.silu(gate).mul_(up)
            x.add_(add(4 * index + 3, inner, layer.down(inner)))
            if images is not None:
                x = images.deepened(index, x)
        normed = _normed(x, decoder.final_norm)
        return add(4 * last + 4, normed, self._head(normed))

    def _adding(
        self, adapters: TokenAdapters | None, device: torch.device, keep: torch.Tensor | None = None
    ) -> Callable[[int, torch.Tensor, torch.Tensor], torch.Tensor]:
        """(number, x, y) -> y, the result of a product with `x`, plus the products of the tokens' adapters."""
        groups = [] if adapters is None else adapters.groups(keep)
        arranged = [(self._adapters.of(adapter), rows.to(device)) for adapter, rows in groups]

        def add(number: int, x: torch.Tensor, y: torch.Tensor) -> torch.Tensor:
            for products, rows in arranged:
                if (pair := products[number]) is not None:
                    down, up = pair
                    y.index_add_(0, rows, up(down(x.index_select(0, rows))))
            return y

        return add

    def _heads(
        self, qkv: torch.Tensor, layer: DenseLayer, rotation: _Rotation
    ) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
        """Queries [tokens, heads, head_dim], keys and values [tokens, kv_heads, head_dim], rotated."""
        heads, kv_heads = self.decoder.num_heads, self.decoder.num_kv_heads
        split = qkv.view(len(qkv), heads + 2 * kv_heads, self.decoder.head_dim)
        q, k, v = split.split((heads, kv_heads, kv_heads), dim=1)
        if layer.q_norm is None or layer.k_norm is None:
            rotation.apply_(split[:, : heads + kv_heads])
            return q, k, v
        q, k = _normed(q, layer.q_norm), _normed(k, layer.k_norm)
        rotation.apply_(q)
        rotation.apply_(k)
        return q, k, v


def compiled(
    module: nn.Module, decoder: DenseDecoder, head: Projection, *, prepack: bool, required: bool
) -> Kernels | None:
    """The compiled kernels where they compute this decoder faster than torch, or where their batch invariance is `required`."""
    torch_is_faster = head.weight.dtype == torch.bfloat16 and multiplies_bf16_tiles()
    if (
        not prepack
        or (torch_is_faster and not required)
        or num_deep_layers(module)
        or not CpuForward.fits(decoder, head)
    ):
        return None
    return kernels()


def product(projection: Projection, *, prepack: bool) -> Product:
    """Multiplication by a projection's weights: with `prepack` by a wider copy of them, on a CPU without instructions for
    bfloat16."""
    weight, matmul = projection.weight.detach(), Matmul(projection.weight.dtype, projection.weight.device, False)
    if prepack and matmul.widens:
        return _Widened(weight, projection.bias)
    return partial(matmul.linear, weight=weight, bias=projection.bias)


class _Widened:
    def __init__(self, weight: torch.Tensor, bias: torch.Tensor | None):
        self._weight, self._bias = weight.float(), None if bias is None else bias.float()
        self.num_bytes = 4 * weight.numel()

    def __call__(self, x: torch.Tensor) -> torch.Tensor:
        return F.linear(x.float(), self._weight, self._bias).to(x.dtype)


def _products(joined: list[LowRank | None]) -> list[tuple[Product, Product] | None]:
    """The products of an adapter, each down and up."""

    def of(weight: torch.Tensor) -> Product:
        return product(Projection(weight, None, ()), prepack=False)

    return [None if pair is None else (of(pair.down), of(pair.up)) for pair in joined]


class _Rotation:
    """The rotary embedding at the positions of a forward: x cos + (x with its halves exchanged) turn."""

    def __init__(self, cos: torch.Tensor, sin: torch.Tensor):
        self._half = cos.shape[-1] // 2
        self._cos = cos.unsqueeze(1)
        self._turn = torch.cat([-sin[:, : self._half], sin[:, self._half :]], dim=1).unsqueeze(1)

    def apply_(self, x: torch.Tensor) -> None:
        """x [tokens, heads, head_dim], in place."""
        turned = x.roll(self._half, -1).mul_(self._turn)
        x.mul_(self._cos).add_(turned)


def _normed(x: torch.Tensor, norm: Norm) -> torch.Tensor:
    """RMS norm over the last axis: in float32 or wider, rounded to x's dtype, times the weight."""
    wide = torch.promote_types(x.dtype, torch.float32)
    root = torch.linalg.vector_norm(x, dim=-1, keepdim=True, dtype=wide)
    scaled = x * root.square_().mul_(1 / x.shape[-1]).add_(norm.eps).rsqrt_()
    return cast("torch.Tensor", scaled.to(x.dtype).mul_(norm.weight))
