"""Packed attention in two calls a layer: all segments causally, all responses against their prompts.

The parts are those of verl.models.packed, merged by log-sum-exp; the lengths travel to the kernel as tensors, so that
nothing loops over segments and the host never waits for the device.
"""

from __future__ import annotations

from collections.abc import Iterable
from typing import TYPE_CHECKING, Any

import torch

from verl.models.cuda.varlen import FLASH, Spans, VarlenKernel
from verl.parallel.device import to_device

if TYPE_CHECKING:
    from collections.abc import Sequence

    from verl.models.packed import PrefixRun, Segment


def _tokens(ranges: Iterable[tuple[int, int]], device: torch.device) -> torch.Tensor:
    """int64: the token numbers of (start, length) ranges, one after another."""
    parts = [torch.arange(start, start + length) for start, length in ranges]
    return to_device(torch.cat(parts), device)


class VarlenPlan:
    """A layout's segments as index tensors on the device: made once a batch, used by every layer.

    `runs` are the responses that lie side by side and see one prompt: one sequence of the second call each.
    """

    def __init__(self, segments: Sequence[Segment], runs: Sequence[PrefixRun], device: torch.device):
        lengths = [s.length for s in segments]
        self.causal = spans_of(lengths, lengths, device)
        self.has_prefixes = bool(runs)
        if runs:
            self.bridge = spans_of([r.length for r in runs], [r.prefix_length for r in runs], device)
            self.queries = _tokens(((r.start, r.length) for r in runs), device)
            self.keys = _tokens(((r.prefix_start, r.prefix_length) for r in runs), device)


def spans_of(queries: Sequence[int], keys: Sequence[int], device: torch.device) -> Spans:
    """Sequences of these lengths, back to back."""
    starts = torch.zeros(2, len(queries) + 1, dtype=torch.int32)
    starts[:, 1:] = torch.tensor([queries, keys]).cumsum(1)
    start_q, start_k = to_device(starts, device)
    return Spans(start_q, start_k, max(queries), max(keys))


def varlen_attention(
    plan: VarlenPlan,
    q: torch.Tensor,
    k: torch.Tensor,
    v: torch.Tensor,
    scale: float | None,
    kernel: VarlenKernel = FLASH,
) -> torch.Tensor:
    """q [1, heads, tokens, head_dim], k and v [1, kv_heads, tokens, ...] -> [1, tokens, heads, value_dim];
    differentiable in all three."""
    scale = q.shape[-1] ** -0.5 if scale is None else scale
    tokens_first = [x[0].transpose(0, 1) for x in (q, k, v)]
    return _VarlenParts.apply(*tokens_first, plan, scale, kernel).unsqueeze(0)


class _VarlenParts(torch.autograd.Function):
    """q, k, v [tokens, heads, dim] -> out [tokens, heads, value_dim]."""

    @staticmethod
    def forward(
        ctx: Any,
        q: torch.Tensor,
        k: torch.Tensor,
        v: torch.Tensor,
        plan: VarlenPlan,
        scale: float,
        kernel: VarlenKernel,
    ) -> torch.Tensor:
        out, lse = kernel.forward(q, k, v, plan.causal, True, scale)
        if plan.has_prefixes:
            here, there = plan.queries, plan.keys
            part, part_lse = kernel.forward(q[here], k[there], v[there], plan.bridge, False, scale)
            out, lse = _merged(out, lse, part, part_lse, here)
        ctx.save_for_backward(q, k, v, out, lse)
        ctx.plan, ctx.scale, ctx.kernel = plan, scale, kernel
        return out

    @staticmethod
    def backward(ctx: Any, *grads: torch.Tensor) -> tuple[torch.Tensor | None, ...]:
        q, k, v, out, lse = ctx.saved_tensors
        plan, scale, backward = ctx.plan, ctx.scale, ctx.kernel.backward
        grad = grads[0]
        dq, dk, dv = backward(grad, q, k, v, out, lse, plan.causal, True, scale)
        if plan.has_prefixes:
            here, there = plan.queries, plan.keys
            inputs = (grad[here], q[here], k[there], v[there], out[here], lse[:, here])
            part_q, part_k, part_v = backward(*inputs, plan.bridge, False, scale)
            dq.index_add_(0, here, part_q)
            dk.index_add_(0, there, part_k)
            dv.index_add_(0, there, part_v)
        return dq, dk, dv, None, None, None


def _merged(
    out: torch.Tensor, lse: torch.Tensor, part: torch.Tensor, part_lse: torch.Tensor, here: torch.Tensor
) -> tuple[torch.Tensor, torch.Tensor]:
    """(out, lse) with a second part folded in at the tokens `here`: a softmax over both sets of keys, in float32 or
    wider."""
    mine = lse[:, here]
    total = torch.logaddexp(mine, part_lse)
    weights = [(x - total).exp().t().unsqueeze(-1) for x in (mine, part_lse)]
    merged = (out[here] * weights[0] + part * weights[1]).to(out.dtype)
    return out.index_copy(0, here, merged), lse.index_copy(1, here, total)
