"""A forward without randomness, so that training computes exactly the same values as sampling did, and the state of random
generators."""

from __future__ import annotations

import random
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
from torch import nn

from verl.errors import ModelError


@dataclass(frozen=True)
class RandomState:
    """State of the random generators that training uses: torch's, on the device too, numpy's and Python's."""

    torch_cpu: torch.Tensor
    torch_cuda: torch.Tensor | None
    numpy: Any
    python: Any

    @classmethod
    def of(cls, device: torch.device) -> RandomState:
        on_gpu = torch.cuda.get_rng_state(device) if device.type == "cuda" else None
        return cls(torch.get_rng_state(), on_gpu, np.random.get_state(), random.getstate())

    def restore(self, device: torch.device) -> None:
        """Continue every generator from this state."""
        torch.set_rng_state(self.torch_cpu)
        if self.torch_cuda is not None:
            torch.cuda.set_rng_state(self.torch_cuda, device)
        np.random.set_state(self.numpy)
        random.setstate(self.python)


def turn_off(module: nn.Module) -> dict[str, float]:
    """Turn off every known source of randomness in the forward of `module`, for training too.

    Modules are in eval mode for good. So families leave out router jitter and sampled experts. Layers that recompute
    activations need their training flag, and keep it. Dropout rates are set to zero in modules, as attributes, and in
    configs. Returns the configs' former rates.
    """
    rates: dict[str, float] = {}
    holders: list[object] = list(module.modules())
    holders += {id(c): c for part in holders for c in _configs(getattr(part, "config", None))}.values()
    for holder in holders:
        for name, value in list(vars(holder).items()):
            if isinstance(value, float) and "drop" in name.lower():
                setattr(holder, name, 0.0)
                if value and not isinstance(holder, nn.Module):
                    rates[name] = value
        if isinstance(holder, nn.modules.dropout._DropoutNd):
            holder.p = 0.0
    module.eval()
    for part in module.modules():
        inside = any(getattr(p, "gradient_checkpointing", False) for p in part.modules() if p is not part)
        part.training = bool(getattr(part, "gradient_checkpointing", False)) and not inside
    return rates


def require_repeatable(module: nn.Module, name: str, compute: Callable[[], torch.Tensor]) -> torch.Tensor:
    """The result of `compute`, a forward of `module`. Raises ModelError when one with gradients, as it trains, differs from
    it, or when a forward writes to parameters."""
    versions = sum(p._version for p in module.parameters())
    with torch.random.fork_rng(list({p.get_device() for p in module.parameters() if p.is_cuda})):
        with torch.no_grad():
            first = compute()
        with torch.enable_grad():
            second = compute().detach()
    if sum(p._version for p in module.parameters()) != versions:
        raise ModelError(
            f"{name} cannot be trained: its forward changes its own parameters. Turn that off by model.override_config (RWKV: "
            "rescale_every=0)."
        )
    # on a GPU, sums may take another order
    same = torch.equal(first, second) if first.device.type == "cpu" else torch.allclose(first, second, 1e-3, 1e-3)
    if not same and not (first.isnan() | second.isnan()).any():
        raise ModelError(
            f"{name} cannot be trained: two forwards over the same tokens differ by up to "
            f"{(first - second).abs().max().item():.2g}, so its forward is random and log-probabilities would have noise. "
            "Turn the randomness off, in its code or by model.override_config."
        )
    return first


@contextmanager
def eval_mode(module: nn.Module) -> Iterator[None]:
    """The module in eval mode; each submodule's training flag is restored afterwards."""
    flags = [(part, part.training) for part in module.modules()]
    module.eval()
    try:
        yield
    finally:
        for part, training in flags:
            part.training = training


def _configs(config: object) -> Iterator[object]:
    """A config and those inside it."""
    if hasattr(config, "to_dict"):
        yield config
        for value in vars(config).values():
            yield from _configs(value)
