"""Expert parallelism: each rank of a group holds some experts of every mixture-of-experts layer.

If ranks have different tokens, these are sent to the experts that the router chose (Lepikhin et al. 2020, arXiv:2006.16668),
without capacity limits. If ranks have the same tokens, as in a copy that only generates, the ranks' outputs are added up.
"""

from __future__ import annotations

from typing import Any

import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import nn
from transformers import PreTrainedConfig

from verl.errors import ConfigError
from verl.model_families import families_with
from verl.models.parallel.collectives import exchange_rows, leave_group, own_range


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
        num_chosen = top_k_index.shape[1]
        by_expert = top_k_index.flatten().sort(stable=True)
        counts = torch.bincount(by_expert.values, minlength=self.num_local * self.group.size())
        arriving = torch.empty_like(counts)  # [from rank, my expert]
        dist.all_to_all_single(arriving, counts, group=self.group)
        arriving = arriving.view(self.group.size(), self.num_local)
        sent, received = counts.view(-1, self.num_local).sum(1).tolist(), arriving.sum(1).tolist()
        token = by_expert.indices // num_chosen
        inputs = exchange_rows(hidden_states[token], received, sent, self.group)
        outputs = exchange_rows(self._apply_experts(inputs, arriving), sent, received, self.group)
        weighted = outputs * top_k_weights.flatten()[by_expert.indices].unsqueeze(1)
        return torch.zeros_like(hidden_states).index_add(0, token, weighted.to(hidden_states.dtype))

    def _apply_experts(self, inputs: torch.Tensor, arriving: torch.Tensor) -> torch.Tensor:
        """inputs [received, hidden], ordered by (rank, expert); outputs in that order."""
        experts = torch.arange(self.num_local, device=inputs.device).repeat(len(arriving))
        expert_of = experts.repeat_interleave(arriving.flatten())
        order = expert_of.sort(stable=True).indices
        parts = []
        # every expert takes part, with no tokens too: then each parameter has a gradient on every rank
        for expert, rows in enumerate(order.split(arriving.sum(0).tolist())):
            parts.append(self.computed(expert, inputs[rows]))
        back = torch.empty_like(order).scatter_(0, order, torch.arange(len(order), device=order.device))
        return torch.cat(parts)[back]


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
