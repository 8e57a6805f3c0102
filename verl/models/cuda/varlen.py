"""Attention over sequences of different lengths that lie back to back: PyTorch's flash kernels, and what they compute.

Shapes, everywhere: q [query tokens, heads, head_dim], k and v [key tokens, kv_heads, head_dim], out like q, lse
[heads, query tokens], the log-sum-exp of a query's scores in float32 or wider. Query head h reads key head
h // (heads // kv_heads). With `causal`, the last query of a sequence sees its last key, the one before it all but the
last, and so on. The backward takes the output and log-sum-exp of the softmax that the scores took part in, which may be
wider than these keys: then the gradients are those of this part of it.
"""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import NamedTuple

import torch
import torch.nn.functional as F

_MULTIPLE = 8  # flash kernels read heads in vectors of 8 numbers
_WIDEST_HEAD = 256


class Spans(NamedTuple):
    """Where the sequences lie. Sequence i has the queries [start_q[i], start_q[i + 1]) and the keys
    [start_k[i], start_k[i + 1]), or, where `used_k` is given, the `used_k[i]` keys from start_k[i] on: keys may then be
    shared by sequences and lie anywhere. int32 on the device, start_q and start_k [sequences + 1], used_k [sequences];
    `max_q` and `max_k` bound the lengths."""

    start_q: torch.Tensor
    start_k: torch.Tensor
    max_q: int
    max_k: int
    used_k: torch.Tensor | None = None


class VarlenKernel(NamedTuple):
    """forward(q, k, v, spans, causal, scale) -> (out, lse); backward(grad, q, k, v, out, lse, spans, causal, scale) ->
    gradients of q, k and v. Keys in no sequence get gradients without meaning."""

    name: str
    forward: Callable[..., tuple[torch.Tensor, torch.Tensor]]
    backward: Callable[..., tuple[torch.Tensor, torch.Tensor, torch.Tensor]]


def flash_runs(device: torch.device, dtype: torch.dtype, head_dim: int) -> bool:
    """Whether `FLASH` can compute this: NVIDIA from Ampere on, half precision, heads of at most 256."""
    half = dtype in (torch.bfloat16, torch.float16)
    return device.type == "cuda" and half and head_dim <= _WIDEST_HEAD and _has_flash(device)


@functools.cache
def _has_flash(device: torch.device) -> bool:
    built = torch.version.cuda is not None and torch.backends.cuda.is_flash_attention_available()
    return built and torch.cuda.get_device_capability(device) >= (8, 0)


def _flash_forward(
    q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, spans: Spans, causal: bool, scale: float
) -> tuple[torch.Tensor, torch.Tensor]:
    width = v.shape[-1]
    out, lse, *_ = torch.ops.aten._flash_attention_forward(
        *_padded(q, k, v),
        spans.start_q,
        spans.start_k,
        spans.max_q,
        spans.max_k,
        0.0,
        causal,
        False,
        scale=scale,
        seqused_k=spans.used_k,
    )
    if lse.shape != (q.shape[1], q.shape[0]):
        raise RuntimeError(
            f"Flash attention of PyTorch {torch.__version__} returned a log-sum-exp of shape {tuple(lse.shape)} for "
            f"{q.shape[0]} tokens and {q.shape[1]} heads; use PyTorch 2.8 or newer."
        )
    return out[..., :width], lse


def _flash_backward(
    grad: torch.Tensor,
    q: torch.Tensor,
    k: torch.Tensor,
    v: torch.Tensor,
    out: torch.Tensor,
    lse: torch.Tensor,
    spans: Spans,
    causal: bool,
    scale: float,
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    width_q, width_v = q.shape[-1], v.shape[-1]
    no_dropout = torch.zeros(2, dtype=torch.uint64, device=q.device)  # the state of a generator that is not used
    grad_q, grad_k, grad_v = torch.ops.aten._flash_attention_backward(
        *_padded(grad, q, k, v, out),
        lse,
        spans.start_q,
        spans.start_k,
        spans.max_q,
        spans.max_k,
        0.0,
        causal,
        no_dropout,
        torch.empty(0, device=q.device),
        scale=scale,
    )
    return grad_q[..., :width_q], grad_k[..., :width_q], grad_v[..., :width_v]


def _padded(*tensors: torch.Tensor) -> list[torch.Tensor]:
    """All with heads of one width that the kernels take; zeros change neither scores nor the values that are kept."""
    width = -(-max(x.shape[-1] for x in tensors) // _MULTIPLE) * _MULTIPLE
    return [x if x.shape[-1] == width else F.pad(x, (0, width - x.shape[-1])) for x in tensors]


FLASH = VarlenKernel("flash", _flash_forward, _flash_backward)


def _ranges(spans: Spans) -> list[tuple[slice, slice]]:
    """(queries, keys) of each sequence that has both."""
    start_q, start_k = spans.start_q.tolist(), spans.start_k.tolist()
    ends = start_k[1:]
    if spans.used_k is not None:
        ends = [start + used for start, used in zip(start_k[:-1], spans.used_k.tolist(), strict=True)]
    pairs = [(slice(start_q[i], start_q[i + 1]), slice(start_k[i], end)) for i, end in enumerate(ends)]
    return [(a, b) for a, b in pairs if a.stop > a.start and b.stop > b.start]


def _scores(q: torch.Tensor, k: torch.Tensor, causal: bool, scale: float) -> torch.Tensor:
    """[heads, queries, keys] of one sequence, float32 or wider."""
    wide = torch.promote_types(q.dtype, torch.float32)
    keys = k.to(wide).repeat_interleave(q.shape[1] // k.shape[1], dim=1)
    scores = torch.einsum("qhd,khd->hqk", q.to(wide), keys) * scale
    if causal:
        hidden = torch.ones(scores.shape[1:], dtype=torch.bool, device=q.device).triu(k.shape[0] - q.shape[0] + 1)
        scores.masked_fill_(hidden, float("-inf"))
    return scores


def _plain_forward(
    q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, spans: Spans, causal: bool, scale: float
) -> tuple[torch.Tensor, torch.Tensor]:
    wide = torch.promote_types(q.dtype, torch.float32)
    out = q.new_zeros(*q.shape[:2], v.shape[-1])
    lse = torch.full((q.shape[1], q.shape[0]), float("inf"), dtype=wide, device=q.device)
    for here, there in _ranges(spans):
        scores = _scores(q[here], k[there], causal, scale)
        lse[:, here] = scores.logsumexp(-1)
        values = v[there].to(wide).repeat_interleave(q.shape[1] // v.shape[1], dim=1)
        out[here] = torch.einsum("hqk,khd->qhd", scores.softmax(-1), values).to(q.dtype)
    return out, lse


def _plain_backward(
    grad: torch.Tensor,
    q: torch.Tensor,
    k: torch.Tensor,
    v: torch.Tensor,
    out: torch.Tensor,
    lse: torch.Tensor,
    spans: Spans,
    causal: bool,
    scale: float,
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    groups = q.shape[1] // k.shape[1]
    grads = [torch.zeros_like(x) for x in (q, k, v)]
    wide = lse.dtype
    for here, there in _ranges(spans):
        p = (_scores(q[here], k[there], causal, scale) - lse[:, here].unsqueeze(-1)).exp()
        keys, values = (x[there].to(wide).repeat_interleave(groups, dim=1) for x in (k, v))
        upstream = grad[here].to(wide)
        delta = (upstream * out[here]).sum(-1).t().unsqueeze(-1)  # [heads, queries, 1]
        ds = p * (torch.einsum("qhd,khd->hqk", upstream, values) - delta) * scale
        _add(grads[0][here], torch.einsum("hqk,khd->qhd", ds, keys), 1)
        _add(grads[1][there], torch.einsum("hqk,qhd->khd", ds, q[here].to(wide)), groups)
        _add(grads[2][there], torch.einsum("hqk,qhd->khd", p, upstream), groups)
    return grads[0], grads[1], grads[2]


def _add(target: torch.Tensor, part: torch.Tensor, groups: int) -> None:
    """`part` [tokens, heads, dim], summed over the query heads of each key head."""
    target.add_(part.unflatten(1, (-1, groups)).sum(2).to(target.dtype))


# By the definition, sequence by sequence: the reference, and the way where flash does not run. Waits for the device.
PLAIN = VarlenKernel("plain", _plain_forward, _plain_backward)
