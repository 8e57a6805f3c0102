"""The forward of a dense decoder that samples on a GPU; the caller computes attention.

It reads the weights of the module (verl.models.decoder.weights) in place.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Protocol

import torch
import torch.nn.functional as F

from verl.models.adapter_weights import LowRank, join_own
from verl.models.decoder.forward import DecoderPass, embedded
from verl.models.decoder.layers import DenseLayer
from verl.models.decoder.projection import Projection
from verl.models.decoder.weights import DenseDecoder
from verl.models.forward import head_transform
from verl.models.hf_module import HFModule
from verl.models.ops.decoding import HeadNorms
from verl.models.ops.experts import is_grouped
from verl.models.ops.linear import wide_product
from verl.models.ops.low_precision import Fp8Weight
from verl.models.vision import ImageFeatures

_TAKEN = {"norms", "embedding", "activation", "router"}  # of DenseDecoder.departures
_FIXED_ROTATIONS = ("default", "linear", "llama3", "yarn")  # they do not depend on the length of the sequence


class JoinedAdapters:
    """LoRA adapters of `projection` at fixed addresses, for CUDA graphs: one pair of matrices for all layers that it joins.
    They are copies; `refresh` copies them again after an update."""

    def __init__(self, projection: Projection, present: LowRank):
        self._projection, (self._down, self._up) = projection, present

    @classmethod
    def of(cls, projection: Projection) -> JoinedAdapters | None:
        """The adapters of `projection`; None if its layers have none."""
        present = join_own(projection.parts, projection.weight.dtype)
        return None if present is None else cls(projection, present)

    def refresh(self) -> None:
        """Copy the present values."""
        present = join_own(self._projection.parts, self._down.dtype)
        assert present is not None
        self._down.copy_(present.down)
        self._up.copy_(present.up)

    def add_(self, y: torch.Tensor, x: torch.Tensor) -> torch.Tensor:
        """Adds the adapters' product with `x` [tokens, inputs] to `y` [tokens, outputs]."""
        return y.addmm_(F.linear(x, self._down), self._up.t())


class Attend(Protocol):
    def __call__(
        self, layer: int, qkv: torch.Tensor, cos: torch.Tensor, sin: torch.Tensor, norms: HeadNorms
    ) -> torch.Tensor:
        """Store the keys and values of the tokens, and attend with their queries: [tokens, heads, head_dim] of the joined
        projections `qkv` [tokens, (heads + 2 kv_heads) * head_dim]. See verl.models.ops.pointwise.write_kv."""
        ...


class StraightForward:
    """`longest` bounds the positions, so that cos and sin can be looked up and need not be computed. With `fp8` the layers
    multiply in fp8."""

    def __init__(self, decoder: DenseDecoder, head: torch.Tensor, longest: int, *, fp8: bool = False):
        self.decoder, self.head = decoder, head
        narrow = decoder.projections() if fp8 else ()
        self._products = {id(p): Fp8Weight(p.weight.detach(), p.local_bias) for p in narrow}
        places = torch.arange(longest, device=head.device).unsqueeze(0)
        cos, sin = decoder.rotary(decoder.embed[:1], places)
        self._cos, self._sin = cos[0], sin[0]
        adapters = ((id(projection), JoinedAdapters.of(projection)) for projection in decoder.projections())
        self._adapters = {key: joined for key, joined in adapters if joined is not None}
        windows = (layer.sliding_window for layer in decoder.layers)
        self.windows = [None if window is None or window >= longest else window for window in windows]

    def refresh(self) -> None:
        """Take the present values of adapters and of weights in fp8; all other weights are read in place."""
        for adapters in self._adapters.values():
            adapters.refresh()
        for product in self._products.values():
            product.refresh()

    @property
    def num_copied_bytes(self) -> int:
        """Memory of the weights in fp8."""
        return sum(product.num_bytes for product in self._products.values())

    @classmethod
    def reads(cls, module: HFModule) -> bool:
        """Whether this model can be computed here."""
        decoder = readable(module)
        head = module.get_output_embeddings()
        if decoder is None or type(head) is not torch.nn.Linear or head.bias is not None or head._forward_hooks:
            return False
        return (
            head_transform(module.config) == {"softcap": None, "logit_scale": 1.0}
            and getattr(decoder.rotary, "rope_type", None) in _FIXED_ROTATIONS
        )

    def hidden(
        self, tokens: torch.Tensor, positions: torch.Tensor, attend: Attend, images: ImageFeatures | None = None
    ) -> torch.Tensor:
        """Final hidden states [tokens, hidden] of `tokens` at `positions` (int64 [tokens], or [axes, tokens] with images)."""
        x = embedded(self.decoder, tokens, images)
        if positions.dim() == 1:
            cos, sin = self._cos[positions], self._sin[positions]
        else:
            cos, sin = (t[0] for t in self.decoder.rotary(x.unsqueeze(0), positions.unsqueeze(1)))
        run = _DevicePass(self, lambda number, qkv, norms: attend(number, qkv, cos, sin, norms))
        return run.normed(*run.states(x, images), self.decoder.final_norm)[1]

    def logits(self, hidden: torch.Tensor) -> torch.Tensor:
        """[tokens, vocab] in float32."""
        return wide_product(hidden, self.head).float()


class _DevicePass(DecoderPass):
    def __init__(self, forward: StraightForward, attend: Callable[[int, torch.Tensor, HeadNorms], torch.Tensor]):
        super().__init__(forward.decoder)
        self._products, self._adapters, self._attend = forward._products, forward._adapters, attend

    def linear(self, x: torch.Tensor, projection: Projection) -> torch.Tensor:
        """See DecoderPass."""
        product = self._products.get(id(projection))
        y = F.linear(x, projection.weight, projection.bias) if product is None else product(x)
        adapters = self._adapters.get(id(projection))
        return y if adapters is None else adapters.add_(y, x)

    def attend(self, number: int, weights: DenseLayer, qkv: torch.Tensor) -> torch.Tensor:
        """See DecoderPass."""
        norms: HeadNorms = (None, None, 0.0)
        if weights.q_norm is not None and weights.k_norm is not None:
            norms = weights.q_norm.factor, weights.k_norm.factor, weights.q_norm.eps
        return self._attend(number, qkv, norms).flatten(1)


def readable(module: HFModule) -> DenseDecoder | None:
    """The decoder of `module` as StraightForward reads it: its kernels turn whole heads in halves, by one table, and cap no
    scores. If a kernel does not group the products of experts, the host would wait for the experts that tokens chose."""
    decoder = DenseDecoder.of(module, adapters=True)
    if decoder is None or not decoder.departures <= _TAKEN:
        return None
    mixtures = [layer.mixture for layer in decoder.layers if layer.mixture is not None]
    return decoder if all(is_grouped(mixture.gate_up) for mixture in mixtures) else None
