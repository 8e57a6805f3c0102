"""Attention to one part of the keys, with its log-sum-exp, so that parts can be merged exactly.

The kernel is aten's flash attention for CPU, the fastest exact one at decode shapes (measured against batched matrix
products and one call per row); a plain one stands in for soft-capped scores and other devices.
"""

from __future__ import annotations

from typing import NamedTuple

import torch

_FLASH = getattr(torch.ops.aten, "_scaled_dot_product_flash_attention_for_cpu", None)


class Scoring(NamedTuple):
    """How a layer turns q and k into scores: q.k * scale, capped to softcap * tanh(score / softcap), the newest `window`
    tokens only."""

    scale: float
    window: int | None
    softcap: float | None


def additive_mask(visible: torch.Tensor, dtype: torch.dtype) -> torch.Tensor:
    """0 where visible, else a finite number so low that it weighs 0: a part of which nothing is visible then merges with
    weight 0, where minus infinity would give NaN."""
    low = torch.finfo(dtype).min / 2
    return torch.where(visible, 0.0, low).to(dtype)


def attend_part(
    q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, mask: torch.Tensor | None, scoring: Scoring
) -> tuple[torch.Tensor, torch.Tensor]:
    """Attention of q [batch, kv_heads, queries, head_dim] to k, v [batch, kv_heads, tokens, head_dim] with an additive
    mask: the output and the log-sum-exp of its scores, float32 [batch, kv_heads, queries]."""
    if scoring.softcap is None and q.device.type == "cpu" and _FLASH is not None and k.shape[-1] == v.shape[-1]:
        out, lse = _FLASH(q, k, v, 0.0, False, attn_mask=mask, scale=scoring.scale)
        return out, lse
    return attend_plain(q, k, v, mask, scoring)


def attend_plain(
    q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, mask: torch.Tensor | None, scoring: Scoring
) -> tuple[torch.Tensor, torch.Tensor]:
    """What `attend_part` computes, by its definition."""
    scores = torch.matmul(q, k.transpose(-1, -2)).float() * scoring.scale
    if scoring.softcap is not None:
        scores = torch.tanh(scores / scoring.softcap) * scoring.softcap
    if mask is not None:
        scores = scores + mask
    lse = scores.logsumexp(-1)
    return torch.matmul((scores - lse.unsqueeze(-1)).exp().to(v.dtype), v), lse


def stack_blocks(parts: list[tuple[torch.Tensor, torch.Tensor]]) -> tuple[torch.Tensor, torch.Tensor]:
    """The (out, lse) of consecutive blocks of the batch as one pair."""
    if len(parts) == 1:
        return parts[0]
    return torch.cat([out for out, _ in parts]), torch.cat([lse for _, lse in parts])


def merge(out: torch.Tensor, lse: torch.Tensor, other: torch.Tensor, other_lse: torch.Tensor) -> torch.Tensor:
    """Attention to the union of two disjoint parts of the keys; out [..., head_dim], lse [...]."""
    return torch.lerp(out, other, torch.sigmoid(other_lse - lse).unsqueeze(-1).to(out.dtype))
