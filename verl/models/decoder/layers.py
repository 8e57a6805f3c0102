"""The weights of a decoder's layer, as all passes read them."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import nn

from verl.models.decoder.projection import Projection
from verl.models.ops.experts import ChoiceRule


@dataclass(frozen=True)
class Norm:
    """RMS norm: x / sqrt(mean(x^2) + eps), rounded to the input's dtype, times `factor`."""

    weight: nn.Parameter
    eps: float
    adds_one: bool = False

    @property
    def factor(self) -> torch.Tensor:
        """`weight`, or if it `adds_one` the wider 1 + weight, which multiplies before the rounding."""
        return (
            self.weight.to(torch.promote_types(self.weight.dtype, torch.float32)) + 1.0
            if self.adds_one
            else self.weight
        )


@dataclass(frozen=True)
class SharedExpert:
    """An expert of all tokens; `gate` [1, hidden], if given, weights it by a sigmoid."""

    gate_up: Projection
    down: Projection
    gate: Projection | None

    @property
    def projections(self) -> tuple[Projection, ...]:
        """All of them."""
        return (self.gate_up, self.down) if self.gate is None else (self.gate_up, self.down, self.gate)


@dataclass(frozen=True)
class Mixture:
    """Experts of which each token has those that the router chooses by `rule`. `group` are the ranks that have some of the
    experts each. If they have the same tokens, the experts here are `summed` of all, and the ranks' outputs are added up."""

    layer: int
    router: nn.Parameter  # [experts, hidden]
    gate_up: nn.Parameter  # [experts here, 2 * width, hidden]
    down: nn.Parameter  # [experts here, hidden, width]
    rule: ChoiceRule
    shared: SharedExpert | None
    group: dist.ProcessGroup | None
    summed: slice | None

    @property
    def parameters(self) -> tuple[nn.Parameter, ...]:
        """Those outside of `projections`."""
        return self.router, self.gate_up, self.down

    @property
    def projections(self) -> tuple[Projection, ...]:
        """Products that all tokens have."""
        return () if self.shared is None else self.shared.projections


@dataclass(frozen=True)
class Latent:
    """Multi-head latent attention (DeepSeek-AI 2024, arXiv:2405.04434): a layer's `qkv` computes a narrow vector for queries,
    one for keys and values, and a rotated part of the keys of all heads. `q_up` is None if the first vector is the queries. A
    head's query and key are [plain | rotated]."""

    q_norm: Norm | None
    q_up: Projection | None
    kv_norm: Norm
    kv_up: Projection
    plain: int
    rotated: int
    value: int  # elements of a head's value

    def parts(self, qkv: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
        """The parts of the product of `qkv`."""
        q, kv, turned = qkv.tensor_split([-self.kv_up.weight.shape[1] - self.rotated, -self.rotated], dim=1)
        return q, kv, turned

    def padded(self, values: torch.Tensor) -> torch.Tensor:
        """Values [tokens, heads, value_dim] with zeros behind them, as wide as keys."""
        return F.pad(values, (0, self.plain + self.rotated - self.value))

    @property
    def norms(self) -> tuple[Norm, ...]:
        """Of the narrow vectors."""
        return (self.kv_norm,) if self.q_norm is None else (self.q_norm, self.kv_norm)

    @property
    def projections(self) -> tuple[Projection, ...]:
        """Of the narrow vectors."""
        return (self.kv_up,) if self.q_up is None else (self.q_up, self.kv_up)


@dataclass(frozen=True)
class DenseLayer:
    """A `mixture` replaces gate_up and down, which are then empty. What the halves add to their input has the norms
    `attention_norm` and `feed_norm`, if given. `rotary` names the rotary embedding of a family with several."""

    input_norm: Norm
    qkv: Projection
    q_norm: Norm | None  # per head, before the rotary embedding
    k_norm: Norm | None
    o: Projection
    post_norm: Norm
    gate_up: Projection
    down: Projection
    sliding_window: int | None
    attention_norm: Norm | None
    feed_norm: Norm | None
    rotary: str | None
    mixture: Mixture | None = None
    latent: Latent | None = None
    feed: None = None  # see LayerUnit

    def call(
        self, computed: Callable[[int, Any, torch.Tensor], torch.Tensor], number: int, x: torch.Tensor
    ) -> torch.Tensor:
        """`computed(number, self, x)`."""
        return computed(number, self, x)

    def gathered(self) -> DenseLayer:
        """The weights of this layer."""
        return self
