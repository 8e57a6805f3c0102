"""Batch invariance of the native engine: whether a sample's bits depend on the other samples of its batch.

The compiled kernels for CPUs add up every row in one order, whatever its batch. Torch's matmuls and attention choose an order
by the number of rows, so nothing is promised there.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import nn

from verl.config import RolloutConfig, full_key
from verl.errors import ConfigError
from verl.models.cpu.weights import Projection
from verl.rollout.api import Invariance
from verl.rollout.native.torch.forward import DenseForward, compiled

KEY = full_key("rollout.batch_invariant")


def examine(module: nn.Module, config: RolloutConfig) -> Invariance:
    """Whether samples of `module` under this RolloutConfig are batch-invariant. Raises ConfigError when they are not, and
    batch_invariant=require."""
    invariance = _examined(module, config)
    if config.batch_invariant == "require" and not invariance.holds:
        raise ConfigError(
            f"{KEY}=require cannot be kept: {invariance.why}. Set it to auto to run without the guarantee."
        )
    return invariance


def _examined(module: Any, config: RolloutConfig) -> Invariance:
    if config.batch_invariant == "off":
        return Invariance(False, f"{KEY}=off")
    device = next(module.parameters()).device
    if device.type != "cpu":
        return Invariance(False, f"it is not verified on {device.type}")
    forward = DenseForward.of(module, prepack=False)
    if not isinstance(forward, DenseForward):
        return Invariance(False, "the model's own modules compute it, by kernels that were not verified")
    decoder, head = forward.decoder, module.get_output_embeddings()
    projection = Projection(head.weight.detach(), head.bias, (head,))
    required = config.batch_invariant == "require"
    kernels = compiled(module, decoder, projection, prepack=config.prepack_weights, required=required)
    if kernels is None:
        return Invariance(False, "torch computes it, whose order of adding depends on the number of rows")
    equal = head.weight.dtype == torch.bfloat16 and kernels.equals_trainer(decoder)
    trainers = ", the order of the fused training forward" if equal else ""
    return Invariance(True, f"the compiled kernels add up every row in one order{trainers}")
