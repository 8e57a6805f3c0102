"""Attention over sequences of different lengths that lie back to back, by PyTorch's flash kernels for CUDA.

Shapes, everywhere: q [query tokens, heads, head_dim], k and v [key tokens, kv_heads, head_dim], out like q, lse
[heads, query tokens], the log-sum-exp of a query's scores in float32 or wider. Query head h reads key head
h // (heads // kv_heads). With `causal`, the last query of a sequence sees its last key, the one before it all but the
last, and so on. The backward takes the output and log-sum-exp of the softmax that the scores took part in. That
softmax may cover more keys than these: the gradients are then of only this part of it.
"""

from __future__ import annotations

import functools
import importlib.util
import logging
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from typing import NamedTuple, cast

import torch
import torch.nn.attention
import torch.nn.functional as F

from verl.models.hf_module import AutogradContext
from verl.parallel.device import strictly_deterministic, to_device, write_at

log = logging.getLogger(__name__)

_MULTIPLE = 8  # flash kernels read heads in vectors of 8 numbers
_WIDEST_HEAD = 256
_PAGE_MULTIPLE = 256  # keys; FlashAttention-2 refuses other pages


class TokenSpans(NamedTuple):
    """Positions of the sequences. Sequence i has the queries [start_q[i], start_q[i + 1]) and the keys
    [start_k[i], start_k[i + 1]), or, with `used_k`, the `used_k[i]` keys from start_k[i] on: keys may then be
    shared by sequences and lie anywhere. With `pages` [sequences, most pages], these are the first keys of the pages that it
    names, of `page_size` keys each, and start_k says nothing. int32 on the device, start_q and start_k [sequences + 1], used_k
    [sequences]; `max_q` and `max_k` bound the lengths. With `window`, a causal query sees at most so many keys, its own
    included."""

    start_q: torch.Tensor
    start_k: torch.Tensor
    max_q: int
    max_k: int
    used_k: torch.Tensor | None = None
    pages: torch.Tensor | None = None
    page_size: int = 0
    window: int | None = None


class VarlenKernel(NamedTuple):
    """forward(q, k, v, spans, causal, scale) -> (out, lse); backward(grad, q, k, v, out, lse, spans, causal, scale) ->
    gradients of q, k and v. Keys in no sequence get gradients without meaning. `forward` reads pages of a multiple of
    `page_multiple` tokens; 0: none."""

    name: str
    forward: Callable[..., tuple[torch.Tensor, torch.Tensor]]
    backward: Callable[..., tuple[torch.Tensor, torch.Tensor, torch.Tensor]]
    page_multiple: int = 0


def flash_runs(device: torch.device, dtype: torch.dtype, head_dim: int) -> bool:
    """Whether `FLASH` can compute this: NVIDIA from Ampere on, half precision, heads of at most 256."""
    half = dtype in (torch.bfloat16, torch.float16)
    return device.type == "cuda" and half and head_dim <= _WIDEST_HEAD and _has_flash(device)


@functools.cache
def _has_flash(device: torch.device) -> bool:
    if torch.version.cuda is None or not torch.backends.cuda.is_flash_attention_available():
        return False
    capability = torch.cuda.get_device_capability(device)
    if capability == (9, 0) and importlib.util.find_spec("flash_attn_interface") is not None:
        _take_flash_3()
    return capability >= (8, 0)


def _take_flash_3() -> None:
    """Let PyTorch's flash operators of this process run the kernels of the installed FlashAttention-3."""
    activate = getattr(torch.nn.attention, "activate_flash_attention_impl", None)
    if activate is None:
        return
    try:
        activate("FA3")
        log.info("Attention takes the kernels of the installed FlashAttention-3.")
    except (ImportError, OSError, RuntimeError, ValueError) as error:  # its own kernels stay
        log.warning("FlashAttention-3 is installed, and PyTorch cannot use it: %s", error)


def _flash_forward(
    q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, spans: TokenSpans, causal: bool, scale: float
) -> tuple[torch.Tensor, torch.Tensor]:
    width, paged = v.shape[-1], {}
    if spans.pages is not None:
        k, v = (x.unflatten(0, (-1, spans.page_size)) for x in (k, v))
        paged = {"block_table": spans.pages}
    out, lse, *_ = torch.ops.aten._flash_attention_forward(
        *_padded(q, k, v),
        *spans[:4],  # starts and longest lengths
        0.0,
        causal,
        False,
        scale=scale,
        seqused_k=spans.used_k,
        **_window(spans),
        **paged,
    )
    if lse.shape != (q.shape[1], q.shape[0]):
        raise RuntimeError(
            f"Flash attention of PyTorch {torch.__version__} returned a log-sum-exp of shape {tuple(lse.shape)} for "
            f"{q.shape[0]} tokens and {q.shape[1]} heads; use PyTorch 2.9 or newer."
        )
    return out[..., :width], lse


def _flash_backward(
    grad: torch.Tensor,
    q: torch.Tensor,
    k: torch.Tensor,
    v: torch.Tensor,
    out: torch.Tensor,
    lse: torch.Tensor,
    spans: TokenSpans,
    causal: bool,
    scale: float,
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    width_q, width_v = q.shape[-1], v.shape[-1]
    no_dropout = torch.zeros(2, dtype=torch.uint64, device=q.device)  # the state of a generator that is not used
    with strictly_deterministic():
        grad_q, grad_k, grad_v = torch.ops.aten._flash_attention_backward(
            *_padded(grad, q, k, v, out),
            lse,
            *spans[:4],  # starts and longest lengths
            0.0,
            causal,
            no_dropout,
            torch.empty(0, device=q.device),
            scale=scale,
            **_window(spans),
        )
    return grad_q[..., :width_q], grad_k[..., :width_q], grad_v[..., :width_v]


def _window(spans: TokenSpans) -> dict[str, int]:
    return {} if spans.window is None else {"window_size_left": spans.window - 1, "window_size_right": 0}


def _padded(*tensors: torch.Tensor) -> list[torch.Tensor]:
    """All with heads of one width that the kernels take; zeros change neither scores nor the values that are kept."""
    width = -(-max(x.shape[-1] for x in tensors) // _MULTIPLE) * _MULTIPLE
    return [x if x.shape[-1] == width else F.pad(x, (0, width - x.shape[-1])) for x in tensors]


def _reads_pages() -> bool:
    arguments = torch.ops.aten._flash_attention_forward.default._schema.arguments
    return any(argument.name == "block_table" for argument in arguments)


FLASH = VarlenKernel("flash", _flash_forward, _flash_backward, page_multiple=_PAGE_MULTIPLE if _reads_pages() else 0)


# -- packed batches: all segments causally in one call, all responses against their prompts in another ----------------------


@dataclass(frozen=True)
class PackedSegment:
    """`length` tokens from `start` on, and the prefix that all of them see (none when `prefix_length` is 0).

    >>> prompt = PackedSegment(start=0, length=12)
    >>> responses = [PackedSegment(start, 5, prefix_start=0, prefix_length=12) for start in (12, 17)]
    """

    start: int
    length: int
    prefix_start: int = 0
    prefix_length: int = 0


@dataclass(frozen=True)
class PrefixRun:
    """Adjacent segments that see the same prefix: one full (non-causal) call."""

    start: int
    length: int
    prefix_start: int
    prefix_length: int


class Bridge:
    """Queries that see all keys of a prefix, in one call: one sequence of each run. Runs share no tokens, and neither do their
    prefixes."""

    def __init__(self, runs: Sequence[PrefixRun], device: torch.device):
        self.spans = spans_of([r.length for r in runs], [r.prefix_length for r in runs], device)
        self.queries = _tokens(((r.start, r.length) for r in runs), device)
        self.keys = _tokens(((r.prefix_start, r.prefix_length) for r in runs), device)

    def forward(
        self, out: torch.Tensor, lse: torch.Tensor, q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, scale: float,
        kernel: VarlenKernel,
    ) -> None:  # fmt: skip
        """Folds the prefixes into `out` and `lse`, which have the other keys of the queries."""
        queries_at, keys_at = self.queries, self.keys
        part, part_lse = kernel.forward(q[queries_at], k[keys_at], v[keys_at], self.spans, False, scale)
        _merge(out, lse, part, part_lse, queries_at)

    def backward(
        self, grads: Sequence[torch.Tensor], grad: torch.Tensor, q: torch.Tensor, k: torch.Tensor, v: torch.Tensor,
        out: torch.Tensor, lse: torch.Tensor, scale: float, kernel: VarlenKernel,
    ) -> None:  # fmt: skip
        """Adds the gradients of q, k and v to `grads`, for the output and log-sum-exp over all keys."""
        queries_at, keys_at = self.queries, self.keys
        inputs = (grad[queries_at], q[queries_at], k[keys_at], v[keys_at], out[queries_at], lse[:, queries_at])
        parts = kernel.backward(*inputs, self.spans, False, scale)
        for total, where, part in zip(grads, (queries_at, keys_at, keys_at), parts, strict=True):
            write_at(total, 0, where, total[where] + part)


class VarlenPlan:
    """A layout's segments as index tensors on the device: made once a batch, used by every layer.

    `runs` are the responses that lie side by side and see one prompt.

    With a `window`, the distance from query to key counts in both parts, so there is one call. The keys of a segment are then
    the end of its prompt that the window reaches, and its own; `gathered` has the token numbers of all keys.
    """

    def __init__(
        self,
        segments: Sequence[PackedSegment],
        runs: Sequence[PrefixRun],
        device: torch.device,
        window: int | None = None,
    ):
        lengths = [s.length for s in segments]
        self.bridge = Bridge(runs, device) if runs and window is None else None
        self.gathered = None
        if window is None:
            self.causal = spans_of(lengths, lengths, device)
        else:
            tails = [min(s.prefix_length, window - 1) for s in segments]
            sums = [tail + length for tail, length in zip(tails, lengths, strict=True)]
            self.causal = spans_of(lengths, sums, device)._replace(window=window)
            ends = [(s.prefix_start + s.prefix_length - tail, tail) for s, tail in zip(segments, tails, strict=True)]
            spans_of_rows = [(s.start, s.length) for s in segments]
            self.gathered = _tokens((part for pair in zip(ends, spans_of_rows, strict=True) for part in pair), device)


def spans_of(queries: Sequence[int], keys: Sequence[int], device: torch.device) -> TokenSpans:
    """Sequences of these lengths, back to back."""
    starts = torch.zeros(2, len(queries) + 1, dtype=torch.int32)
    starts[:, 1:] = torch.tensor([queries, keys]).cumsum(1)
    start_q, start_k = to_device(starts, device)
    return TokenSpans(start_q, start_k, max(queries), max(keys))


def varlen_attention(
    plan: VarlenPlan, q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, scale: float, kernel: VarlenKernel = FLASH
) -> torch.Tensor:
    """q [1, heads, tokens, head_dim], k and v [1, kv_heads, tokens, ...] -> [1, tokens, heads, value_dim];
    differentiable in all three."""
    tokens_first = [x[0].transpose(0, 1) for x in (q, k, v)]
    return cast("torch.Tensor", _VarlenParts.apply(*tokens_first, plan, scale, kernel).unsqueeze(0))


class _VarlenParts(torch.autograd.Function):
    """q, k, v [tokens, heads, dim] -> out [tokens, heads, value_dim]."""

    @staticmethod
    def forward(
        ctx: AutogradContext,
        q: torch.Tensor,
        k: torch.Tensor,
        v: torch.Tensor,
        plan: VarlenPlan,
        scale: float,
        kernel: VarlenKernel,
    ) -> torch.Tensor:
        out, lse = varlen_forward(plan, q, k, v, scale, kernel)
        ctx.save_for_backward(q, k, v, out, lse)
        ctx.plan, ctx.scale, ctx.kernel = plan, scale, kernel
        return out

    @staticmethod
    def backward(ctx: AutogradContext, *grads: torch.Tensor) -> tuple[torch.Tensor | None, ...]:
        q, k, v, out, lse = ctx.saved_tensors
        return *varlen_backward(ctx.plan, grads[0], q, k, v, out, lse, ctx.scale, ctx.kernel), None, None, None


def varlen_forward(
    plan: VarlenPlan, q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, scale: float, kernel: VarlenKernel
) -> tuple[torch.Tensor, torch.Tensor]:
    """(out, lse) of a plan, without gradients."""
    keys, values = (k, v) if plan.gathered is None else (k[plan.gathered], v[plan.gathered])
    out, lse = kernel.forward(q, keys, values, plan.causal, True, scale)
    if plan.bridge is not None:
        plan.bridge.forward(out, lse, q, k, v, scale, kernel)
    return out, lse


def varlen_backward(
    plan: VarlenPlan, grad: torch.Tensor, q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, out: torch.Tensor,
    lse: torch.Tensor, scale: float, kernel: VarlenKernel,
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:  # fmt: skip
    """Gradients of q, k and v."""
    keys, values = (k, v) if plan.gathered is None else (k[plan.gathered], v[plan.gathered])
    dq, dk, dv = kernel.backward(grad, q, keys, values, out, lse, plan.causal, True, scale)
    if plan.gathered is not None:
        dk, dv = (_summed_at(plan.gathered, part, len(k)) for part in (dk, dv))
    if plan.bridge is not None:
        plan.bridge.backward((dq, dk, dv), grad, q, k, v, out, lse, scale, kernel)
    return dq, dk, dv


def _merge(
    out: torch.Tensor, lse: torch.Tensor, part: torch.Tensor, part_lse: torch.Tensor, queries_at: torch.Tensor
) -> None:
    """Fold a second part into `out` and `lse` at the tokens `queries_at`: a softmax over both sets of keys."""
    present = lse[:, queries_at]
    total = torch.logaddexp(present, part_lse)
    weights = [(x - total).exp().t().unsqueeze(-1) for x in (present, part_lse)]
    merged = (out[queries_at] * weights[0] + part * weights[1]).to(out.dtype)
    write_at(out, 0, queries_at, merged)
    write_at(lse, 1, queries_at, total)


def _summed_at(where: torch.Tensor, parts: torch.Tensor, size: int) -> torch.Tensor:
    """[size, ...]: the rows of `parts` summed at their places, some of them equal, in float32 or wider."""
    wide = torch.promote_types(parts.dtype, torch.float32)
    return parts.new_zeros(size, *parts.shape[1:], dtype=wide).index_add_(0, where, parts.to(wide)).to(parts.dtype)


def _tokens(ranges: Iterable[tuple[int, int]], device: torch.device) -> torch.Tensor:
    """int64: the token numbers of (start, length) ranges, one after another."""
    parts = [torch.arange(start, start + length) for start, length in ranges]
    return to_device(torch.cat(parts), device)
