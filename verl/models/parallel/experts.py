"""Expert parallelism: each rank of a group holds some experts of every mixture-of-experts layer.

If ranks have different tokens, these are sent to the experts that the router chose (Lepikhin et al. 2020, arXiv:2006.16668),
without capacity limits. If ranks have the same tokens, as in a copy that only generates, the ranks' outputs are added up.
"""

from __future__ import annotations

import copy
from collections.abc import Sequence
from typing import Any

import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import nn
from transformers import PreTrainedConfig

from verl.errors import ConfigError
from verl.model_families import families_with
from verl.models.hf_module import AutogradContext
from verl.models.ops.experts import grouped_linear, weighted_sum
from verl.models.parallel.collectives import exchange_rows, leave_group, own_range


class Places:
    """The order in which experts compute the choices of tokens: rows sorted by expert, on the ranks of `group` that have the
    experts, if given. `ends` int32 [experts here]: the rows of each end before these."""

    def __init__(self, experts: torch.Tensor, num_experts: int, group: dist.ProcessGroup | None = None):
        """Of the `experts` [tokens, k] that tokens chose."""
        by_expert, self._copies = experts.flatten().sort(stable=True), experts.shape[1]
        self._order, self._back = by_expert.indices, _inverse(by_expert.indices)
        every = torch.arange(num_experts, device=experts.device)
        self.ends = torch.searchsorted(by_expert.values, every, right=True, out_int32=True)
        self._exchange: _Exchange | None = None
        if group is not None and group.size() > 1:
            self._exchange = _Exchange(self.ends, group)
            self.ends = self._exchange.ends

    @property
    def tensors(self) -> tuple[torch.Tensor, ...]:
        """Tensors that a backward keeps, for `replaced`."""
        return self._order, self._back, self.ends

    def replaced(self, tensors: Sequence[torch.Tensor]) -> Places:
        """These places with other `tensors`."""
        places = copy.copy(self)
        places._order, places._back, places.ends = tensors
        return places

    @property
    def exchanges(self) -> bool:
        """Whether rows come from other ranks."""
        return self._exchange is not None

    def to_experts(self, x: torch.Tensor) -> torch.Tensor:
        """x [tokens, ...], or [tokens * k, ...] of choices, -> [rows, ...]; differentiable."""
        copies = self._copies if len(x) < len(self._order) else 1
        rows: torch.Tensor = _Sorted.apply(x, self._order // copies, self._back, copies)
        return rows if self._exchange is None else self._exchange.sent(rows)

    def from_experts(self, rows: torch.Tensor) -> torch.Tensor:
        """The rows of `to_experts` -> [tokens * k, ...]; differentiable."""
        if self._exchange is not None:
            rows = self._exchange.returned(rows)
        out: torch.Tensor = _Sorted.apply(rows, self._back, self._order, 1)
        return out


class _Exchange:
    """Rows on their way to the ranks that have their experts. `ends` int32 [experts here]."""

    def __init__(self, ends: torch.Tensor, group: dist.ProcessGroup):
        counts = ends.diff(prepend=ends.new_zeros(1)).long()
        arriving = torch.empty_like(counts)  # [from rank, expert here]
        dist.all_to_all_single(arriving, counts, group=group)
        arriving = arriving.view(group.size(), -1)
        self._sent = counts.view(group.size(), -1).sum(1).tolist()
        self._received = arriving.sum(1).tolist()
        self._group, experts = group, torch.arange(arriving.shape[1], device=ends.device)
        self._order = experts.repeat(group.size()).repeat_interleave(arriving.flatten()).sort(stable=True).indices
        self._back, self.ends = _inverse(self._order), arriving.sum(0).cumsum(0).int()

    def sent(self, rows: torch.Tensor) -> torch.Tensor:
        rows = exchange_rows(rows, self._received, self._sent, self._group)
        out: torch.Tensor = _Sorted.apply(rows, self._order, self._back, 1)
        return out

    def returned(self, rows: torch.Tensor) -> torch.Tensor:
        rows = _Sorted.apply(rows, self._back, self._order, 1)
        return exchange_rows(rows, self._sent, self._received, self._group)


class _Sorted(torch.autograd.Function):
    """x[index], where each row of x occurs `copies` times; `back` leads from a copy to its place."""

    @staticmethod
    def forward(
        ctx: AutogradContext, x: torch.Tensor, index: torch.Tensor, back: torch.Tensor, copies: int
    ) -> torch.Tensor:
        ctx.save_for_backward(back)
        ctx.copies = copies
        return x[index]

    @staticmethod
    def backward(ctx: AutogradContext, *grads: torch.Tensor) -> tuple[torch.Tensor | None, ...]:
        (back,) = ctx.saved_tensors
        d_x = grads[0][back]
        return d_x if ctx.copies == 1 else d_x.unflatten(0, (-1, ctx.copies)).sum(1), None, None, None


def _inverse(order: torch.Tensor) -> torch.Tensor:
    return torch.empty_like(order).scatter_(0, order, torch.arange(len(order), device=order.device))


class _OwnExperts(nn.Module):
    """This rank's experts of `whole`, under its parameter names."""

    gate_up_proj: nn.Parameter  # [experts here, 2 * intermediate, hidden]
    down_proj: nn.Parameter  # [experts here, hidden, intermediate]

    def __init__(self, experts: Any, group: dist.ProcessGroup):
        super().__init__()
        self.group, self.act_fn = group, experts.act_fn
        self.first, self.num_local = own_range(experts.gate_up_proj.shape[0], group)
        for name in ("gate_up_proj", "down_proj"):
            parameter = getattr(experts, name)
            part = parameter.detach().narrow(0, self.first, self.num_local).contiguous()
            self.register_parameter(name, nn.Parameter(part, requires_grad=parameter.requires_grad))

    @property
    def here(self) -> slice:
        """The place of these experts among all."""
        return slice(self.first, self.first + self.num_local)

    def computed(self, expert: int, x: torch.Tensor) -> torch.Tensor:
        """[tokens, hidden] -> [tokens, hidden] by one of the experts here."""
        gate, up = F.linear(x, self.gate_up_proj[expert]).chunk(2, dim=-1)
        return F.linear(self.act_fn(gate) * up, self.down_proj[expert])


class DispatchedExperts(_OwnExperts):
    """Experts over ranks with different tokens; the group's size divides their number."""

    def forward(
        self, hidden_states: torch.Tensor, top_k_index: torch.Tensor, top_k_weights: torch.Tensor
    ) -> torch.Tensor:
        """hidden_states [tokens, hidden], experts and their weights [tokens, k] -> [tokens, hidden]."""
        places = Places(top_k_index, self.num_local * self.group.size(), self.group)
        gate, up = grouped_linear(places.to_experts(hidden_states), self.gate_up_proj, places.ends).chunk(2, dim=-1)
        rows = grouped_linear(self.act_fn(gate) * up, self.down_proj, places.ends)
        return weighted_sum(places.from_experts(rows), top_k_weights)


class SummedExperts(_OwnExperts):
    """Experts over ranks with the same tokens."""

    def forward(
        self, hidden_states: torch.Tensor, top_k_index: torch.Tensor, top_k_weights: torch.Tensor
    ) -> torch.Tensor:
        """As of DispatchedExperts."""
        total, here = torch.zeros_like(hidden_states), top_k_index - self.first
        for expert in here[(here >= 0) & (here < self.num_local)].unique().tolist():
            token, choice = torch.where(here == expert)
            out = self.computed(expert, hidden_states[token]) * top_k_weights[token, choice].unsqueeze(1)
            total.index_add_(0, token, out.to(total.dtype))
        return leave_group(total, self.group)


def divide_experts(module: nn.Module, group: dist.ProcessGroup, kind: type[_OwnExperts]) -> list[str]:
    """Put a module of `kind` in the place of all expert modules; returns their names."""
    names = [name for name, part in module.named_modules() if is_experts(part)]
    for name in names:
        module.set_submodule(name, kind(module.get_submodule(name), group))
    return names


def is_experts(part: nn.Module) -> bool:
    """Whether `part` holds the weights of several experts as two tensors [experts, ...]."""
    weights = getattr(part, "gate_up_proj", None)
    return isinstance(weights, nn.Parameter) and weights.dim() == 3


def check_experts(config: PreTrainedConfig, size: int) -> None:
    """Raises ConfigError when the experts of a model cannot be divided over `size` ranks."""
    config = config.get_text_config()
    if size == 1:
        return
    if config.model_type not in (families := families_with("experts")):
        raise ConfigError(
            f"expert_parallel_size={size} is for mixture-of-experts models ({', '.join(families)}), not for "
            f"{config.model_type}; set it to 1."
        )
    experts = getattr(config, "num_local_experts", None) or config.num_experts
    if experts % size:
        raise ConfigError(f"expert_parallel_size={size} does not divide the model's {experts} experts.")
