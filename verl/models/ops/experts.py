"""Parts of a mixture of experts: the choice of experts for each token, and one product over rows that are sorted by expert.

Weights of choices are float32 or wider, and the outputs of a token's experts are summed in that dtype before they are rounded.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import NamedTuple

import torch

from verl.models.hf_module import AutogradContext
from verl.models.ops.linear import Matmul

_grouped_mm = getattr(torch.nn.functional, "grouped_mm", None) or torch._grouped_mm


class ExpertChoice(NamedTuple):
    """The experts of tokens, int64 [tokens, k], their weights [tokens, k], and the router's scores [tokens, experts]."""

    experts: torch.Tensor
    weights: torch.Tensor
    scores: torch.Tensor


def choose_experts(
    logits: torch.Tensor, num_chosen: int, normalizes: bool, follow: Callable[[torch.Tensor], torch.Tensor]
) -> ExpertChoice:
    """The experts with the greatest softmax of the router's logits [tokens, experts], or those that `follow` gives in place of
    them. Their scores are the weights, divided by their sum if it `normalizes`. Differentiable."""
    scores = logits.softmax(-1, dtype=torch.promote_types(logits.dtype, torch.float32))
    experts = follow(scores.detach().topk(num_chosen, dim=-1).indices)
    weights = scores.gather(1, experts)
    return ExpertChoice(experts, weights / weights.sum(-1, keepdim=True) if normalizes else weights, scores)


def choose_experts_backward(d_weights: torch.Tensor, choice: ExpertChoice, normalizes: bool) -> torch.Tensor:
    """The gradient of the logits of `choose_experts`, float32 or wider, for weights that are w = s / sum(s), or s: then
    d_s = (d_w - <d_w, w>) / sum(s), and of a softmax s: d_logits = s (d_s - <d_s, s>)."""
    if normalizes:
        total = choice.scores.gather(1, choice.experts).sum(-1, keepdim=True)
        d_weights = (d_weights - (d_weights * choice.weights).sum(-1, keepdim=True)) / total
    d_scores = torch.zeros_like(choice.scores).scatter_add_(1, choice.experts, d_weights)
    return choice.scores * (d_scores - (d_scores * choice.scores).sum(-1, keepdim=True))


def weighted_sum(rows: torch.Tensor, weights: torch.Tensor) -> torch.Tensor:
    """The outputs [tokens, hidden] of tokens whose experts gave `rows` [tokens * k, hidden], by their weights [tokens, k]."""
    total: torch.Tensor = (rows.unflatten(0, weights.shape) * weights.unsqueeze(2)).sum(1)
    return total.to(rows.dtype)


def grouped_linear(x: torch.Tensor, weight: torch.Tensor, ends: torch.Tensor) -> torch.Tensor:
    """x [rows, inputs], sorted by expert, -> [rows, outputs]: the rows of expert e end before `ends[e]` (int32 [experts]), and
    `weight` is [experts, outputs, inputs]. Differentiable. In the dtypes of `is_grouped` no host waits."""
    out: torch.Tensor = _Grouped.apply(x, weight, ends)
    return out


def is_grouped(weight: torch.Tensor) -> bool:
    """Whether torch has one kernel for the products of all experts with `weight`; else each has a separate one."""
    if weight.is_cuda:
        return weight.dtype == torch.bfloat16 and torch.cuda.get_device_capability(weight.device) >= (8, 0)
    return weight.dtype in (torch.float32, torch.bfloat16) and weight.data_ptr() % 16 == 0


class _Grouped(torch.autograd.Function):
    @staticmethod
    def forward(ctx: AutogradContext, x: torch.Tensor, weight: torch.Tensor, ends: torch.Tensor) -> torch.Tensor:
        ctx.save_for_backward(x, weight, ends)
        return _product(x, weight, ends)

    @staticmethod
    def backward(ctx: AutogradContext, *grads: torch.Tensor) -> tuple[torch.Tensor | None, ...]:
        (x, weight, ends), d_y, needs = ctx.saved_tensors, grads[0].contiguous(), ctx.needs_input_grad
        d_x = _product(d_y, weight.transpose(1, 2), ends) if needs[0] else None
        if not needs[1]:
            return d_x, None, None
        if is_grouped(weight):
            return d_x, _grouped_mm(d_y.t(), x, offs=ends), None
        wide = torch.empty_like(weight, dtype=torch.promote_types(weight.dtype, torch.float32))
        Matmul(x.dtype, x.device).add_grouped(wide, d_y, x, ends, overwrite=True)
        return d_x, wide.to(weight.dtype), None


def _product(x: torch.Tensor, weight: torch.Tensor, ends: torch.Tensor) -> torch.Tensor:
    if is_grouped(weight):
        out: torch.Tensor = _grouped_mm(x, weight.transpose(1, 2), offs=ends)
        return out
    return Matmul(x.dtype, x.device).grouped(x, weight, ends)
