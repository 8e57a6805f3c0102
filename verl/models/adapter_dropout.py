"""Dropout on the inputs of adapters in training: y = W x + s B A (x * mask / (1 - p)).

A mask is a function of the optimizer step, the tokens of the row up to this one, the layer and the element. So it is the same
in every micro-batch and layout, when a layer is computed again, after a resume, and for a prompt that rows share.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import torch
import torch.nn.functional as F
from torch import nn

from verl.errors import ConfigError
from verl.models.lora import DoRALinear, LoRALinear
from verl.models.packing import PackedBatch
from verl.models.padded import forward_kind

_ODD, _BITS = 0x9E3779B97F4A7C15 - 2**64, 0xFFFFFFFF  # Weyl's constant as a signed number; the lower half of a word


class DroppedLinear(LoRALinear):
    """A LoRALinear with dropout of rate `rate` while `masks` are active; `number` counts these layers of a model."""

    def __init__(self, layer: LoRALinear, name: str, rate: float, number: int, masks: Masks):
        nn.Module.__init__(self)
        self.in_features, self.out_features, self.scale, self.active = (
            layer.in_features, layer.out_features, layer.scale, layer.active,
        )  # fmt: skip
        self.weight, self.bias, self.lora_A, self.lora_B = layer.weight, layer.bias, layer.lora_A, layer.lora_B
        self.name, self.rate, self.number, self.masks = name, rate, number, masks

    def forward(self, input: torch.Tensor) -> torch.Tensor:
        """[..., in] -> [..., out]."""
        if not self.active or self.masks.keys is None:
            return super().forward(input)
        masked = input * self.masks.of(self, input)
        out = F.linear(input, self.weight, self.bias)
        return out + F.linear(F.linear(masked, self.lora_A), self.lora_B) * (self.scale / (1 - self.rate))


class Masks:
    """The masks of one forward: `keys` [tokens] of its tokens, or None for a forward without dropout."""

    keys: torch.Tensor | None = None

    def of(self, layer: DroppedLinear, input: torch.Tensor) -> torch.Tensor:
        """The mask of `input` [..., in]. Raises ConfigError for a layer that computes other things than the tokens of rows."""
        assert self.keys is not None
        if input.numel() != len(self.keys) * layer.in_features:
            raise ConfigError(
                f"model.lora_dropout={layer.rate}: {layer.name} gets other inputs than the tokens of the rows (images, "
                "tokens of an expert, chunks), which have no masks. Name it in model.exclude_modules, or set lora_dropout=0."
            )
        element = torch.arange(layer.in_features, device=self.keys.device) + layer.number * 2**32
        return (words(self.keys.unsqueeze(1), element) >= round(layer.rate * 2**32)).view(input.shape).to(input.dtype)


def words(keys: torch.Tensor, numbers: torch.Tensor) -> torch.Tensor:
    """Uniform integers below 2^32, a function of a key and a number each (int64, of shapes that broadcast), by the finalizer
    of splitmix64."""
    x = keys + (numbers + 1) * _ODD
    for shift, factor in ((30, 0xBF58476D1CE4E5B9 - 2**64), (27, 0x94D049BB133111EB - 2**64)):
        x = (x ^ (x >> shift) & ((1 << (64 - shift)) - 1)) * factor
    return (x >> 31) & _BITS


def dropout_keys(packed: PackedBatch, step: int) -> torch.Tensor:
    """A key [tokens] for each token of a packed batch, from `step` and the tokens of its row up to it."""
    ids, positions = packed.input_ids[0], packed.position_ids[0]
    terms = _mixed(ids + (positions + 1) * 2**32) * (2 * positions + 1)
    sums = F.pad(terms.cumsum(0), (1, 0))  # of all tokens before each; they wrap around
    before = torch.zeros_like(terms)
    for segment in packed.layout.segments:
        prefix = sums[segment.prefix_start + segment.prefix_length] - sums[segment.prefix_start]
        before[segment.start : segment.start + segment.length] = prefix - sums[segment.start]
    return _mixed(sums[1:] + before + torch.full_like(terms, step) * _ODD)


def _mixed(x: torch.Tensor) -> torch.Tensor:
    x = (x ^ (x >> 33) & (2**31 - 1)) * (0xFF51AFD7ED558CCD - 2**64)
    return x ^ (x >> 29) & (2**35 - 1)


def add_dropout(module: Any, names: list[str], rate: float) -> None:
    """Put dropout of `rate` on the inputs of the adapters `names` of `module`. Raises ConfigError where it has none: with DoRA,
    and in a padded forward."""
    if any(isinstance(module.get_submodule(name), DoRALinear) for name in names):
        raise ConfigError("model.lora_dropout does not train with DoRA. Set lora_dropout=0, or use_dora=False.")
    if forward_kind(module) != "packed":
        raise ConfigError(
            f"{type(module).__name__} runs by its own padded forward, in which adapters have no dropout. Set "
            "model.lora_dropout=0."
        )
    masks = Masks()
    for number, name in enumerate(names):
        module.set_submodule(name, DroppedLinear(module.get_submodule(name), name, rate, number, masks))


@contextmanager
def dropping(module: nn.Module, packed: PackedBatch, step: int) -> Iterator[None]:
    """Inside, the adapters of `module` drop inputs in the forward of `packed` and in its backward, if they have a rate."""
    masks = next((part.masks for part in module.modules() if isinstance(part, DroppedLinear)), None)
    if masks is None:
        yield
        return
    masks.keys = dropout_keys(packed, step)
    try:
        yield
    finally:
        masks.keys = None
