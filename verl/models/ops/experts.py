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


class ChoiceRule(NamedTuple):
    """The choice of `num_chosen` experts of a token: by the greatest scores, softmax or sigmoids of the router's logits.

    A `bias` [experts] is added for the choice alone. The experts are in `num_groups`, and those of the `num_open` groups with
    the greatest sums of two scores can be chosen. If the rule `normalizes`, the weights of a token's experts have a sum of
    `factor`, else they are the scores times `factor`."""

    num_chosen: int
    normalizes: bool
    sigmoid: bool = False
    bias: torch.Tensor | None = None
    num_groups: int = 1
    num_open: int = 1
    factor: float = 1.0

    def experts(self, scores: torch.Tensor) -> torch.Tensor:
        """The experts, int64 [tokens, num_chosen], for scores [tokens, experts]."""
        if self.bias is not None:
            scores = scores + self.bias
        if self.num_open < self.num_groups:
            grouped = scores.unflatten(1, (self.num_groups, -1))
            is_open = torch.zeros(grouped.shape[:2], dtype=torch.bool, device=scores.device)
            is_open.scatter_(1, grouped.topk(2, dim=-1).values.sum(-1).topk(self.num_open, dim=-1).indices, True)
            scores = grouped.masked_fill(~is_open.unsqueeze(-1), float("-inf")).flatten(1)
        return scores.topk(self.num_chosen, dim=-1).indices


_NO_SUM = 1e-20  # of sigmoids that are all zero


def choose_experts(
    logits: torch.Tensor, rule: ChoiceRule, follow: Callable[[torch.Tensor], torch.Tensor]
) -> ExpertChoice:
    """The experts of tokens by the router's logits [tokens, experts], or those that `follow` gives in place of them.
    Differentiable."""
    wide = logits.to(torch.promote_types(logits.dtype, torch.float32))
    scores = wide.sigmoid() if rule.sigmoid else wide.softmax(-1)
    experts = follow(rule.experts(scores.detach()))
    weights = scores.gather(1, experts)
    if rule.normalizes:
        weights = weights / (weights.sum(-1, keepdim=True) + (_NO_SUM if rule.sigmoid else 0.0))
    return ExpertChoice(experts, weights if rule.factor == 1.0 else weights * rule.factor, scores)


def choose_experts_backward(d_weights: torch.Tensor, choice: ExpertChoice, rule: ChoiceRule) -> torch.Tensor:
    """The gradient of the logits of `choose_experts`, float32 or wider, for weights that are w = f s / sum(s), or f s: then
    d_s = (f d_w - <d_w, w>) / sum(s), or f d_w. Of a softmax s: d_logits = s (d_s - <d_s, s>), of sigmoids s (1 - s) d_s."""
    scores = choice.scores
    d_chosen = d_weights * rule.factor
    if rule.normalizes:
        total = scores.gather(1, choice.experts).sum(-1, keepdim=True) + (_NO_SUM if rule.sigmoid else 0.0)
        d_chosen = (d_chosen - (d_weights * choice.weights).sum(-1, keepdim=True)) / total
    d_scores = torch.zeros_like(scores).scatter_add_(1, choice.experts, d_chosen)
    if rule.sigmoid:
        return scores * (1 - scores) * d_scores
    return scores * (d_scores - (d_scores * scores).sum(-1, keepdim=True))


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
        return grouped_product(x, weight, ends)

    @staticmethod
    def backward(ctx: AutogradContext, *grads: torch.Tensor) -> tuple[torch.Tensor | None, ...]:
        (x, weight, ends), d_y, needs = ctx.saved_tensors, grads[0].contiguous(), ctx.needs_input_grad
        d_x = grouped_product(d_y, weight.transpose(1, 2), ends) if needs[0] else None
        return d_x, grouped_outer(d_y, x, weight, ends) if needs[1] else None, None


def grouped_outer(d_y: torch.Tensor, x: torch.Tensor, weight: torch.Tensor, ends: torch.Tensor) -> torch.Tensor:
    """The gradient of `weight` in `grouped_linear`, given that of its result."""
    if is_grouped(weight):
        out: torch.Tensor = _grouped_mm(d_y.t(), x, offs=ends)
        return out
    wide = torch.empty_like(weight, dtype=torch.promote_types(weight.dtype, torch.float32))
    Matmul(x.dtype, x.device).add_grouped(wide, d_y, x, ends, overwrite=True)
    return wide.to(weight.dtype)


def grouped_product(x: torch.Tensor, weight: torch.Tensor, ends: torch.Tensor) -> torch.Tensor:
    """As `grouped_linear`, without a gradient."""
    if is_grouped(weight):
        out: torch.Tensor = _grouped_mm(x, weight.transpose(1, 2), offs=ends)
        return out
    return Matmul(x.dtype, x.device).grouped(x, weight, ends)
