"""Attention of one layer as a pair of calls, forward and backward, without a graph between them.

Where the layout computes with the CPU's flash kernel, the pair calls that kernel. Elsewhere it calls the
layout's differentiable `attend` on separate leaf tensors, and keeps the small graph for the backward.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch

from verl.models.attention import Scoring
from verl.models.matmul import Matmul
from verl.models.packed import PackedLayout, choose_kernel, flash_backward, flash_forward


@dataclass(frozen=True)
class HeadViews:
    """Queries, keys and values as attention reads them: [1, heads, tokens, head_dim] each, views of [tokens, ...]."""

    q: torch.Tensor
    k: torch.Tensor
    v: torch.Tensor


@dataclass(frozen=True)
class Attended:
    """`out` [tokens, heads * head_dim], and the values that the backward needs."""

    out: torch.Tensor
    lse: torch.Tensor | None = None
    graph: tuple[torch.Tensor, tuple[torch.Tensor, ...]] | None = None


def attend(layout: PackedLayout, index: int, heads: HeadViews, scoring: Scoring, by: Matmul, keep: bool) -> Attended:
    """Attention of layer `index`; with `keep`, fit for `attend_backward`."""
    q, k, v = heads.q, heads.k, heads.v
    if choose_kernel(q, layout.without_idle_window(scoring)) == "flash_cpu":
        _, num_heads, tokens, head_dim = q.shape
        q, k, v = by.operand(q), by.operand(k), by.operand(v)
        out = q.new_empty(tokens, num_heads, head_dim)
        lse = flash_forward(layout, q, k, v, _as_heads(out), scoring.scale)
        return Attended(out.flatten(1).to(heads.q.dtype), lse if keep else None)
    if not keep:
        return Attended(layout.attend(index, q, k, v, scoring)[0].flatten(1))
    q, k, v = (x.detach().requires_grad_() for x in (q, k, v))
    with torch.enable_grad():
        attended = layout.attend(index, q, k, v, scoring)
    return Attended(attended.detach()[0].flatten(1), graph=(attended, (q, k, v)))


def attend_backward(
    layout: PackedLayout,
    heads: HeadViews,
    attended: Attended,
    d_out: torch.Tensor,
    scale: float,
    by: Matmul,
    into: HeadViews,
) -> None:
    """Writes the gradients of queries, keys and values into `into`, given the gradient of the output."""
    if attended.graph is not None:
        out, leaves = attended.graph
        grads = torch.autograd.grad(out, leaves, d_out.view_as(out))
        for target, grad in zip((into.q, into.k, into.v), grads, strict=True):
            target.copy_(grad)
        return
    assert attended.lse is not None
    shape = (d_out.shape[0], heads.q.shape[1], heads.q.shape[3])
    out, d_out = (by.operand(_as_heads(x.view(shape))) for x in (attended.out, d_out))
    q, k, v = by.operand(heads.q), by.operand(heads.k), by.operand(heads.v)
    flash_backward(layout, d_out, q, k, v, out, attended.lse, scale, (into.q, into.k, into.v))


def _as_heads(x: torch.Tensor) -> torch.Tensor:
    """[tokens, heads, head_dim] -> [1, heads, tokens, head_dim], a view."""
    return x.transpose(0, 1).unsqueeze(0)
