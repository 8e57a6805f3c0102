"""The fused forward of the native engine for plain dense decoders, by torch: no modules, few operators.

It reads the module's weights (verl.models.decoder.weights) and rounds at the same places as the modules. Callers disable
gradients.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import replace
from functools import partial
from typing import Any

import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import nn

from verl.config import full_key
from verl.config.active_keys import WITHOUT
from verl.errors import ConfigError
from verl.models.adapter_weights import LowRank
from verl.models.decoder.forward import DecoderPass, Sum, embedded, turned_heads, turns_of
from verl.models.decoder.layers import DenseLayer, Mixture, Norm
from verl.models.decoder.projection import Projection
from verl.models.decoder.weights import DenseDecoder
from verl.models.forward import head_transform
from verl.models.hf_module import HFModule
from verl.models.log_probs import Head
from verl.models.lora import LoRALinear
from verl.models.ops.experts import grouped_product
from verl.models.ops.linear import Matmul
from verl.models.ops.low_precision import Fp8Weight
from verl.models.ops.pointwise import Turns, inverse_rms, scaled_norm
from verl.models.ops.table import by_torch
from verl.models.quantized import on_grid
from verl.models.vision import ImageFeatures
from verl.parallel.device import fp8_obstacle
from verl.rollout.layout import StepLayout
from verl.rollout.native.adapters import ArrangedAdapters, TokenAdapters
from verl.rollout.native.compiled.forward import CpuForward
from verl.rollout.native.compiled.library import Kernels, kernels
from verl.rollout.rollout_model import WholeVocabulary

_FP8_MULTIPLE = 16  # of the sizes of torch's products in fp8
_PLAIN_LOGITS = {"softcap": None, "logit_scale": 1.0}

Product = Callable[[torch.Tensor], torch.Tensor]  # x [tokens, inputs] -> [tokens, outputs], in x's dtype


class DenseForward:
    """Made by `of`. The matmuls may hold a copy of the weights, so it serves while the weights stay as they are."""

    def __init__(self, module: HFModule, decoder: DenseDecoder, head: Projection, *, prepack: bool, fp8: bool = False):
        self.decoder, self._transform = decoder, head_transform(module.config)
        projections = [*decoder.projections(), head]
        self._adapters = ArrangedAdapters(module, projections, _products)
        narrow = _Fp8 if head.weight.device.type == "cpu" else _fp8_product
        products = [narrow(p) if fp8 and p is not head else product(p, prepack=prepack) for p in projections]
        self._products = {id(p): (number, products[number]) for number, p in enumerate(projections)}
        mixtures = [layer.mixture for layer in decoder.layers if fp8 and layer.mixture is not None]
        self._experts = {id(w): _fp8_experts(w, n) for m in mixtures for w, n in ((m.gate_up, 2), (m.down, 1))}
        self._head, self._joins = head, tuple(head.parts[0]._forward_hooks.values())

    @classmethod
    def of(
        cls,
        module: HFModule,
        *,
        prepack: bool,
        quantization: str | None = None,
        adapters: bool = False,
        int8_cache: bool = False,
    ) -> DenseForward | CpuForward | None:
        """The fused forward of a causal language model, with compiled kernels if `compiled` returns them. None if only the
        model's forward computes it. `prepack` allows a copy of the weights. With `quantization` layers multiply in int8, by
        compiled kernels, or in fp8, which torch emulates on a CPU. Requests may have `adapters`. With `int8_cache` the compiled
        kernels store keys and values in int8."""
        if (read := plain_parts(module)) is None:
            return None
        decoder, projection = read
        if quantization == "fp8":
            return cls(module, decoder, projection, prepack=prepack, fp8=True)
        kernels = compiled(module, decoder, projection, prepack=prepack)
        if kernels is not None and not (adapters and decoder.has_experts):
            return CpuForward(kernels, module, decoder, projection, int8=quantization == "int8", int8_cache=int8_cache)
        return cls(module, decoder, projection, prepack=prepack)

    @property
    def num_copied_bytes(self) -> int:
        """Memory of the copies of weights that it holds."""
        copies = sum(p.num_bytes for _, p in self._products.values() if isinstance(p, _Widened | _Fp8 | Fp8Weight))
        return copies + sum(4 * weight.numel() for weight in self._experts.values())

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
        turns = turns_of(decoder, x, positions.unsqueeze(-2))
        run = _HostPass(decoder, self._products, self._experts, layout, turns, keep)
        keep = keep if run.narrows is None else None  # else the last layer leaves other tokens out
        for adapter, rows in () if adapters is None else adapters.groups():
            run.adapters.append((self._adapters.of(adapter), rows.to(x.device)))
        x, _ = run.states(x, images)
        x = x if keep is None else x.index_select(0, keep)
        logits = run.linear(_normed(x, decoder.final_norm), self._head)
        for join in self._joins:
            logits = join(self._head.parts[0], (), logits)
        if self._transform == _PLAIN_LOGITS:
            return logits
        wide = torch.promote_types(logits.dtype, torch.float32)
        return Head(**self._transform).transform_(logits.to(wide), None)


class _HostPass(DecoderPass):
    """Sums with the residual are made in place. The last layer computes only the tokens `keep` behind its attention, unless
    experts of all tokens are recorded."""

    def __init__(
        self,
        decoder: DenseDecoder,
        products: Mapping[int, tuple[int, Product]],
        experts: Mapping[int, torch.Tensor],
        layout: StepLayout,
        turns: Mapping[str | None, Turns],
        keep: torch.Tensor | None,
    ):
        super().__init__(decoder)
        self._products, self._experts, self._layout, self._turns, self._keep = products, experts, layout, turns, keep
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
        if (group := projection.outputs_group) is not None:
            dist.all_reduce(y, group=group)
            y = y if projection.bias is None else y.add_(projection.bias)
        return y

    def project(self, x: torch.Tensor, inputs: torch.Tensor, projection: Projection, norm: Norm | None) -> Sum:
        """See DecoderPass."""
        if projection is self.narrows and (keep := self._keep) is not None:
            x, inputs = x.index_select(0, keep), inputs.index_select(0, keep)
            among = [(products, torch.isin(keep, rows).nonzero()[:, 0]) for products, rows in self.adapters]
            self.adapters = [(products, rows) for products, rows in among if len(rows)]
        y = self.linear(inputs, projection)
        return x.add_(y if norm is None else _normed(y, norm)), None

    def feed_forward(self, weights: DenseLayer, x: torch.Tensor, delta: torch.Tensor | None) -> Sum:
        """See DecoderPass."""
        x, delta = super().feed_forward(weights, x, delta)
        return x if delta is None else x.add_(delta), None

    def router_logits(self, x: torch.Tensor, weight: torch.Tensor) -> torch.Tensor:
        """See DecoderPass."""
        return self._matmul.linear(x, weight)

    def by_experts(self, mixture: Mixture, rows: torch.Tensor, ends: torch.Tensor) -> torch.Tensor:
        """See DecoderPass."""
        if (part := mixture.summed) is not None:  # rows of experts elsewhere are zero
            first, *_, stop = [0, *ends.tolist()][part.start : part.stop + 1]
            out, here = torch.zeros_like(rows), slice(first, stop)
            out[here] = self.by_experts(replace(mixture, summed=None), rows[here], ends[part] - first)
            return out
        return self._grouped(self.activated(self._grouped(rows, mixture.gate_up, ends)), mixture.down, ends)

    def _grouped(self, rows: torch.Tensor, weight: torch.Tensor, ends: torch.Tensor) -> torch.Tensor:
        if (values := self._experts.get(id(weight))) is None:
            return self._matmul.grouped(rows, weight, ends)
        return grouped_product(on_grid(rows, "fp8"), values, ends).to(rows.dtype)

    def activated(self, gate_up: torch.Tensor) -> torch.Tensor:
        """See DecoderPass."""
        if self.decoder.activation != "silu":
            return super().activated(gate_up)
        gate, up = gate_up.chunk(2, dim=1)
        return F.silu(gate).mul_(up)

    def attend(self, number: int, weights: DenseLayer, qkv: torch.Tensor) -> torch.Tensor:
        """See DecoderPass."""
        turned = self._turns[weights.rotary]
        if weights.latent is not None:
            q, k, v = self.latent_heads(weights.latent, qkv, turned)
        else:
            q, k, v = turned_heads(self.decoder, weights, qkv, turned, _normed)
        return self._layout.attend_tokens(number, q, k, v, self.decoder.scoring(weights)).flatten(1)

    def deepened(self, images: ImageFeatures, number: int, x: torch.Tensor) -> torch.Tensor:
        """See DecoderPass."""
        if self._keep is not None and self.narrows is not None and number == len(self.decoder.layers) - 1:
            images = images.among(self._keep)
        return images.deepened(number, x)


def plain_parts(module: HFModule) -> tuple[DenseDecoder, Projection] | None:
    """The decoder of a causal language model and its output projection; None if only the model's forward computes it. `module`
    may lie on the meta device."""
    head = module.get_output_embeddings()
    is_plain = type(module).__module__.startswith("transformers.models.") and type(head) in (nn.Linear, LoRALinear)
    if not is_plain:
        return None
    decoder = DenseDecoder.of_shapes(module) if head.weight.is_meta else DenseDecoder.of(module, adapters=True)
    hooks = (*head._forward_hooks.values(), *head._forward_pre_hooks.values())
    if decoder is None or not all(isinstance(hook, WholeVocabulary) for hook in hooks):
        return None
    bias = None if head.bias is None else head.bias.detach()
    return decoder, Projection(head.weight.detach(), bias, (head,))


def compiled(module: HFModule, decoder: DenseDecoder, head: Projection, *, prepack: bool) -> Kernels | None:
    """The compiled kernels; None if torch computes the module. They compute experts in bfloat16 only, where these have the
    trainer's sums."""
    if not prepack or head_transform(module.config) != _PLAIN_LOGITS or not CpuForward.fits(decoder, head):
        return None
    chosen = kernels()
    if chosen is None or not decoder.has_experts:
        return chosen
    return chosen if head.weight.dtype == torch.bfloat16 and chosen.equals_trainer(decoder) else None


def require_quantized(module: Any, key: str, value: str, device: torch.device) -> None:
    """Raise ConfigError if the native engine cannot compute `module` on `device` with the `value` of `key`."""
    read, name, end = plain_parts(module), type(module).__name__, f"Set {key}={WITHOUT[key]}"
    if device.type != "cpu" and value == "int8":
        raise ConfigError(
            f"rollout.name=native computes in int8 on a CPU, and the model is on {device.type}. {end}, or fp8 for weights."
        )
    emulates = value == "fp8" and device.type == "cpu"
    if read is None or (read[0].has_experts and not emulates) or read[0].departures:
        kinds = "decoders and mixtures of experts" if emulates else "dense decoders"
        raise ConfigError(f"{key}={value} is for plain {kinds} (docs/families.md), and {name} is none. {end}.")
    if device.type != "cpu":
        _require_fp8(read[0], f"{key}=fp8", device, end)
    if value == "int8" and compiled(module, *read, prepack=True) is None:
        raise ConfigError(
            f"{key}=int8 needs the compiled decoder, which does not compute {name} in {read[0].embed.dtype} here: the "
            "dtype is neither float32 nor bfloat16, the processor has no AVX2, verl was installed without a C compiler, or "
            f"VERL_CPU_ISA=none. {end}."
        )


def _require_fp8(decoder: DenseDecoder, setting: str, device: torch.device, end: str) -> None:
    if fault := fp8_obstacle(device):
        raise ConfigError(f"{setting} {fault}. {end}.")
    if decoder.embed.dtype != torch.bfloat16:
        raise ConfigError(
            f"{setting} has products that are rounded to bfloat16 on a GPU, and the model is in {decoder.embed.dtype}. {end}, "
            f"or {full_key('actor.fsdp_config.dtype')}=bfloat16."
        )
    sizes = {size for projection in decoder.projections() for size in projection.weight.shape}
    if uneven := min((size for size in sizes if size % _FP8_MULTIPLE), default=None):
        raise ConfigError(
            f"{setting} needs projections of multiples of {_FP8_MULTIPLE} on a GPU, and one has {uneven}. {end}."
        )


def product(projection: Projection, *, prepack: bool) -> Product:
    """Multiplication by a projection's weights: with `prepack` by a wider copy of them, on a CPU without instructions for
    bfloat16."""
    weight, matmul = projection.weight.detach(), Matmul(projection.weight.dtype, projection.weight.device, False)
    bias = projection.local_bias
    if prepack and matmul.widens:
        return _Widened(weight, bias)
    return partial(matmul.linear, weight=weight, bias=bias)


class _Widened:
    def __init__(self, weight: torch.Tensor, bias: torch.Tensor | None):
        self._weight, self._bias = weight.float(), None if bias is None else bias.float()
        self.num_bytes = 4 * weight.numel()

    def __call__(self, x: torch.Tensor) -> torch.Tensor:
        return F.linear(x.float(), self._weight, self._bias).to(x.dtype)


class _Fp8:
    """A product of fp8 operands in blocks, emulated: their values in float32."""

    def __init__(self, projection: Projection):
        parts = projection.weight.detach().split([len(part.weight) for part in projection.parts])
        self._weight, self._bias = torch.cat([on_grid(p, "fp8", weights=True) for p in parts]), projection.local_bias
        self.num_bytes = 4 * self._weight.numel()

    def __call__(self, x: torch.Tensor) -> torch.Tensor:
        y = F.linear(on_grid(x, "fp8"), self._weight, None if self._bias is None else self._bias.float())
        return y.to(x.dtype)


def _fp8_experts(weight: nn.Parameter, num_parts: int) -> torch.Tensor:
    """The values that fp8 has for experts [experts, outputs, inputs] of `num_parts` projections, in float32."""
    parts = (part for expert in weight.detach() for part in expert.chunk(num_parts))
    return torch.cat([on_grid(part, "fp8", weights=True) for part in parts]).view(weight.shape)


def _fp8_product(projection: Projection) -> Fp8Weight:
    return Fp8Weight(projection.weight.detach(), projection.local_bias)


def _products(joined: list[LowRank | None]) -> list[tuple[Product, Product] | None]:
    """The products of an adapter, each down and up."""

    def of(weight: torch.Tensor) -> Product:
        return product(Projection(weight, None, ()), prepack=False)

    return [None if pair is None else (of(pair.down), of(pair.up)) for pair in joined]


_inverse_rms, _scaled_norm = by_torch(inverse_rms), by_torch(scaled_norm)


def _normed(x: torch.Tensor, norm: Norm) -> torch.Tensor:
    return _scaled_norm(x, norm.factor, _inverse_rms(x, norm.eps))
