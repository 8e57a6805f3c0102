"""The fused forward of the native engine for plain dense decoders, by torch: no modules, few operators.

It reads the module's weights (verl.models.decoder.weights) and rounds at the same places as the modules. Callers disable
gradients.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from functools import partial

import torch
import torch.nn.functional as F
from torch import nn

from verl.models.adapter_weights import LowRank
from verl.models.attention import Scoring
from verl.models.decoder.forward import DecoderPass, Sum, embedded, turned_heads
from verl.models.decoder.weights import DenseDecoder, DenseLayer, Mixture, Norm, Projection
from verl.models.forward import head_transform
from verl.models.hf_module import HFModule
from verl.models.lora import LoRALinear
from verl.models.ops.linear import Matmul
from verl.models.ops.pointwise import Turns, inverse_rms, rotate_, scaled_norm
from verl.models.ops.table import by_torch
from verl.models.quantized import on_grid
from verl.models.vision import ImageFeatures, num_deep_layers
from verl.parallel.device import multiplies_bf16_tiles
from verl.rollout.layout import StepLayout
from verl.rollout.native.adapters import ArrangedAdapters, TokenAdapters
from verl.rollout.native.compiled.forward import CpuForward
from verl.rollout.native.compiled.library import Kernels, kernels

_PLAIN_LOGITS = {"softcap": None, "logit_scale": 1.0}

Product = Callable[[torch.Tensor], torch.Tensor]  # x [tokens, inputs] -> [tokens, outputs], in x's dtype


class DenseForward:
    """Made by `of`. The matmuls may hold a copy of the weights, so it serves while the weights stay as they are."""

    def __init__(self, module: nn.Module, decoder: DenseDecoder, head: Projection, *, prepack: bool, fp8: bool = False):
        self.decoder = decoder
        projections = [*decoder.projections(), head]
        self._adapters = ArrangedAdapters(module, projections, _products)
        products = [_Fp8(p) if fp8 and p is not head else product(p, prepack=prepack) for p in projections]
        self._products = {id(p): (number, products[number]) for number, p in enumerate(projections)}
        self._head = head

    @classmethod
    def of(
        cls, module: HFModule, *, prepack: bool, required: bool = False, quantization: str | None = None
    ) -> DenseForward | CpuForward | None:
        """The fused forward of a causal language model, with compiled kernels if `compiled` returns them. None if only the
        model's forward computes it. `prepack` allows a copy of the weights. With `quantization` layers multiply in int8, by
        compiled kernels, or in fp8, which torch emulates."""
        decoder, head = DenseDecoder.of(module, adapters=True), module.get_output_embeddings()
        is_plain = type(module).__module__.startswith("transformers.models.") and type(head) in (nn.Linear, LoRALinear)
        if decoder is None or not is_plain or head._forward_hooks or head._forward_pre_hooks:
            return None
        if head_transform(module.config) != _PLAIN_LOGITS:
            return None
        bias = None if head.bias is None else head.bias.detach()
        projection = Projection(head.weight.detach(), bias, (head,))
        if quantization == "fp8":
            return cls(module, decoder, projection, prepack=prepack, fp8=True)
        if (kernels := compiled(module, decoder, projection, prepack=prepack, required=required)) is not None:
            return CpuForward(kernels, module, decoder, projection, int8=quantization == "int8")
        return cls(module, decoder, projection, prepack=prepack)

    @property
    def num_copied_bytes(self) -> int:
        """Memory of the copies of weights that it holds."""
        return sum(p.num_bytes for _, p in self._products.values() if isinstance(p, _Widened | _Fp8))

    def logits(
        self,
        ids: torch.Tensor,
        positions: torch.Tensor,
        keep: torch.Tensor | None,
        layout: StepLayout,
        adapters: TokenAdapters | None = None,
        images: ImageFeatures | None = None,
    ) -> torch.Tensor:
        """Logits [len(keep), vocab] after the tokens at the indices `keep`, or after all tokens. `ids` are int64 [tokens], and
        `positions` [tokens] or [axes, tokens]; `layout`, `adapters` and `images` have the same tokens."""
        decoder = self.decoder
        x = embedded(decoder, ids, images)
        cos, sin = decoder.rotary(x.unsqueeze(0), positions.unsqueeze(-2))
        run = _HostPass(decoder, self._products, layout, Turns(cos[0], sin[0]), keep)
        keep = keep if run.narrows is None else None  # else the last layer leaves other tokens out
        for adapter, rows in () if adapters is None else adapters.groups():
            run.adapters.append((self._adapters.of(adapter), rows.to(x.device)))
        x, _ = run.states(decoder, x, images)
        x = x if keep is None else x.index_select(0, keep)
        return run.linear(_normed(x, decoder.final_norm), self._head)


class _HostPass(DecoderPass):
    """Sums with the residual are made in place. The last layer computes only the tokens `keep` behind its attention, unless
    experts of all tokens are recorded."""

    def __init__(
        self,
        decoder: DenseDecoder,
        products: Mapping[int, tuple[int, Product]],
        layout: StepLayout,
        turns: Turns,
        keep: torch.Tensor | None,
    ):
        self._decoder, self._products, self._layout, self._turns, self._keep = decoder, products, layout, turns, keep
        self.routing, self._matmul = layout.routing, Matmul(decoder.embed.dtype, decoder.embed.device, False)
        self.narrows = None if keep is None or layout.routing is not None else decoder.layers[-1].o
        self.adapters: list[tuple[list[tuple[Product, Product] | None], torch.Tensor]] = []  # each with its tokens

    def normed(self, x: torch.Tensor, delta: torch.Tensor | None, norm: Norm) -> tuple[torch.Tensor, torch.Tensor]:
        """See DecoderPass."""
        return x, _normed(x, norm)

    def linear(self, x: torch.Tensor, projection: Projection) -> torch.Tensor:
        """See DecoderPass."""
        number, multiply = self._products[id(projection)]
        y = multiply(x)
        for products, rows in self.adapters:
            if (pair := products[number]) is not None:
                down, up = pair
                y.index_add_(0, rows, up(down(x.index_select(0, rows))))
        return y

    def project(self, x: torch.Tensor, inputs: torch.Tensor, projection: Projection) -> Sum:
        """See DecoderPass."""
        if projection is self.narrows and (keep := self._keep) is not None:
            x, inputs = x.index_select(0, keep), inputs.index_select(0, keep)
            among = [(products, torch.isin(keep, rows).nonzero()[:, 0]) for products, rows in self.adapters]
            self.adapters = [(products, rows) for products, rows in among if len(rows)]
        return x.add_(self.linear(inputs, projection)), None

    def feed_forward(self, weights: DenseLayer, x: torch.Tensor, delta: torch.Tensor | None) -> Sum:
        """See DecoderPass."""
        x, delta = super().feed_forward(weights, x, delta)
        return x if delta is None else x.add_(delta), None

    def router_logits(self, x: torch.Tensor, weight: torch.Tensor) -> torch.Tensor:
        """See DecoderPass."""
        return self._matmul.linear(x, weight)

    def by_experts(self, mixture: Mixture, rows: torch.Tensor, ends: torch.Tensor) -> torch.Tensor:
        """See DecoderPass."""
        gate_up = self._matmul.grouped(rows, mixture.gate_up, ends)
        return self._matmul.grouped(self.activated(gate_up), mixture.down, ends)

    def activated(self, gate_up: torch.Tensor) -> torch.Tensor:
        """See DecoderPass."""
        gate, up = gate_up.chunk(2, dim=1)
        return F.silu(gate).mul_(up)

    def attend(self, number: int, weights: DenseLayer, qkv: torch.Tensor) -> torch.Tensor:
        """See DecoderPass."""
        q, k, v = turned_heads(self._decoder, weights, qkv, self._turns, _normed, _rotate_)
        scoring = Scoring(self._decoder.scale, weights.sliding_window)
        return self._layout.attend_tokens(number, q, k, v, scoring).flatten(1)

    def deepened(self, images: ImageFeatures, number: int, x: torch.Tensor) -> torch.Tensor:
        """See DecoderPass."""
        if self._keep is not None and self.narrows is not None and number == len(self._decoder.layers) - 1:
            images = images.among(self._keep)
        return images.deepened(number, x)


def compiled(
    module: nn.Module, decoder: DenseDecoder, head: Projection, *, prepack: bool, required: bool
) -> Kernels | None:
    """The compiled kernels, if they are faster than torch or their batch invariance is `required`; else None."""
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


class _Fp8:
    """A product of fp8 operands, emulated: their values in float32."""

    def __init__(self, projection: Projection):
        parts = projection.weight.detach().split([len(part.weight) for part in projection.parts])
        self._weight, self._bias = torch.cat([on_grid(p, "fp8", weights=True) for p in parts]), projection.bias
        self.num_bytes = 4 * self._weight.numel()

    def __call__(self, x: torch.Tensor) -> torch.Tensor:
        y = F.linear(on_grid(x, "fp8"), self._weight, None if self._bias is None else self._bias.float())
        return y.to(x.dtype)


def _products(joined: list[LowRank | None]) -> list[tuple[Product, Product] | None]:
    """The products of an adapter, each down and up."""

    def of(weight: torch.Tensor) -> Product:
        return product(Projection(weight, None, ()), prepack=False)

    return [None if pair is None else (of(pair.down), of(pair.up)) for pair in joined]


_inverse_rms, _scaled_norm, _rotate_ = by_torch(inverse_rms), by_torch(scaled_norm), by_torch(rotate_)


def _normed(x: torch.Tensor, norm: Norm) -> torch.Tensor:
    return _scaled_norm(x, norm.weight, _inverse_rms(x, norm.eps))
