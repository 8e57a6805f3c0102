"""Experts of a copy that several ranks hold together: each rank computes its experts, and the sum over the ranks is the layer.

    experts          0   1   2   3   4   5   6   7
    ranks of a copy  [     0     ]   [     1     ]      the router, on every rank, chooses among all of them

Every rank of a copy has the same tokens, so that no token has to travel to an expert. The outputs of the ranks' experts are
added up, as at the exit of a divided MLP. Expert parallel training divides experts in the same way; then they stay in place.
"""

from __future__ import annotations

from typing import Any

import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import nn

from verl.models.parallel.collectives import leave_group, own_range
from verl.models.parallel.experts import is_experts


class OwnExperts(nn.Module):
    """This rank's experts of `whole`, under its parameter names, on the same tokens as the others of `group`."""

    gate_up_proj: nn.Parameter  # [experts here, 2 * intermediate, hidden]
    down_proj: nn.Parameter  # [experts here, hidden, intermediate]

    def __init__(self, whole: Any, group: dist.ProcessGroup):
        super().__init__()
        self.group = group
        self.first, self.num_local = own_range(whole.gate_up_proj.shape[0], group)
        self.act_fn = whole.act_fn
        for name in ("gate_up_proj", "down_proj"):
            parameter = getattr(whole, name)
            part = parameter.detach().narrow(0, self.first, self.num_local).contiguous()
            self.register_parameter(name, nn.Parameter(part, requires_grad=parameter.requires_grad))

    def forward(
        self, hidden_states: torch.Tensor, top_k_index: torch.Tensor, top_k_weights: torch.Tensor
    ) -> torch.Tensor:
        """hidden_states [tokens, hidden], experts and their weights [tokens, k] -> [tokens, hidden]."""
        total = torch.zeros_like(hidden_states)
        here = top_k_index - self.first
        for expert in here[(here >= 0) & (here < self.num_local)].unique().tolist():
            token, choice = torch.where(here == expert)
            gate, up = F.linear(hidden_states[token], self.gate_up_proj[expert]).chunk(2, dim=-1)
            out = F.linear(self.act_fn(gate) * up, self.down_proj[expert])
            out = out * top_k_weights[token, choice].unsqueeze(1)
            total.index_add_(0, token, out.to(total.dtype))
        return leave_group(total, self.group)


def divide_own_experts(module: nn.Module, group: dist.ProcessGroup) -> dict[str, int]:
    """Put OwnExperts in the place of all expert modules; returns the names of the parameters that are cut, with the dimension
    along which they are."""
    names = [name for name, part in module.named_modules() if is_experts(part)]
    for name in names:
        module.set_submodule(name, OwnExperts(module.get_submodule(name), group))
    return {f"{name}.{leaf}": 0 for name in names for leaf in ("gate_up_proj", "down_proj")}
