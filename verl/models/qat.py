"""Quantization-aware training: layers that compute with the int8 numbers of the sampler (verl/models/quantized.py), or with
weights of NVFP4, which are rounded once for each update (verl/models/rounding.py).

The forward rounds weights and inputs to their grid. The backward takes the rounding for the identity (straight-through,
Bengio et al. 2013, arXiv:1308.3432), since no value of a row lies beyond its grid. Parameters, their names and checkpoints
stay plain.
"""

from __future__ import annotations

import fnmatch
import re
from collections.abc import Sequence
from typing import Any

import torch
import torch.nn.functional as F
from torch import nn

from verl.errors import ConfigError
from verl.models.quantized import on_grid


class RoundedLinear(nn.Linear):
    """A linear layer whose weights and inputs are rounded to int8; it multiplies in float32 or wider."""

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        y: torch.Tensor = _RoundedProduct.apply(x, self.weight)
        return (y if self.bias is None else y + self.bias).to(x.dtype)


class _RoundedProduct(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: torch.Tensor, weight: torch.Tensor) -> torch.Tensor:
        ctx.save_for_backward(x, weight)
        return F.linear(on_grid(x, "int8"), on_grid(weight, "int8", weights=True))

    @staticmethod
    def backward(ctx: Any, dy: torch.Tensor) -> tuple[torch.Tensor | None, torch.Tensor | None]:
        x, weight = ctx.saved_tensors
        dx = dw = None
        if ctx.needs_input_grad[0]:
            dx = (dy @ on_grid(weight, "int8", weights=True)).to(x.dtype)
        if ctx.needs_input_grad[1]:
            dw = (dy.flatten(0, -2).T @ on_grid(x, "int8").flatten(0, -2)).to(weight.dtype)
        return dx, dw


def four_bit_weights(module: nn.Module, ignored: Sequence[str]) -> frozenset[str]:
    """Names of the weights of linear layers and experts, but for layers with a name that `ignored` has: `re:` begins a regular
    expression, a pattern with * matches the whole name, other patterns a part. Raises ConfigError if nothing is left."""

    def is_ignored(name: str, pattern: str) -> bool:
        if pattern.startswith("re:"):
            return re.match(pattern[3:], name) is not None
        return fnmatch.fnmatchcase(name, pattern) if "*" in pattern else pattern in name

    def weights(layer: nn.Module) -> Sequence[str]:
        if isinstance(layer, nn.Linear):
            return ("weight",)
        return [name for name, p in layer.named_parameters(recurse=False) if p.dim() == 3 and "proj" in name]

    layers = [(name, layer) for name, layer in module.named_modules() if not any(is_ignored(name, p) for p in ignored)]
    names = frozenset(f"{name}.{weight}" for name, layer in layers for weight in weights(layer))
    if not names:
        raise ConfigError(
            "qat.ignore_patterns leaves no layer that is rounded. Remove a pattern, or set qat.enable=False."
        )
    return names


def rounds_layers(module: nn.Module) -> bool:
    """Whether the layers of `module` train so."""
    return any(type(part) is RoundedLinear for part in module.modules())
