"""Exact attention over a packed batch, without a tokens x tokens mask.

A packed batch is a row of segments. The tokens of a segment see one another causally and, before that, every token of
one earlier segment, the prefix: a response sees its prompt. Attention is then a causal part inside each segment plus
a full part against its prefix. Both parts return their log-sum-exp, so they merge exactly (Milakov and Gimelshein
2018, the online softmax). The backward of a flash kernel needs only the final output and log-sum-exp, so each part is
differentiated separately.
"""

from __future__ import annotations

import itertools
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from functools import partial
from typing import NamedTuple

import torch
import torch.nn.functional as F
from torch.utils.checkpoint import checkpoint

from verl.models.attention import Scoring
from verl.models.delta_net import DeltaInputs, DeltaPlan
from verl.models.hf_module import AutogradContext
from verl.models.ops import compiled
from verl.models.ops.compiled_attention import CompiledPlan, compiled_attention, compiled_attention_backward
from verl.models.ops.linear import Matmul
from verl.models.ops.varlen import (
    PackedSegment,
    PrefixRun,
    TokenSpans,
    VarlenKernel,
    VarlenPlan,
    flash_runs,
    varlen_attention,
)
from verl.models.routing import Routing

_flash = torch.ops.aten._scaled_dot_product_flash_attention_for_cpu
_flash_backward = torch.ops.aten._scaled_dot_product_flash_attention_for_cpu_backward


@dataclass(frozen=True)
class CausalRun:
    """`count` adjacent segments of equal `length`: one batched causal call."""

    start: int
    count: int
    length: int


class PackedLayout:
    """The tokens that each token sees; passed to the model as `layout=`. Segments lie back to back and cover all tokens.

    With `chunk_tokens`, attention that needs memory for each pair of tokens takes so many queries at a time, and computes
    them again in the backward; flash kernels need no such memory. `routing` is of the tokens in a mixture of experts.
    """

    def __init__(
        self, segments: Sequence[PackedSegment], chunk_tokens: int | None = None, routing: Routing | None = None
    ):
        self.segments = tuple(segments)
        self.chunk_tokens, self.routing = chunk_tokens, routing
        self.causal_runs = tuple(_causal_runs(self.segments))
        self.prefix_runs = tuple(prefix_runs(self.segments))
        self.longest = max((s.prefix_length + s.length for s in self.segments), default=0)
        self._plans: dict[int | None, VarlenPlan] = {}  # by window
        self._compiled_plan: CompiledPlan | None = None
        self._delta_plan: DeltaPlan | None = None

    def recur(self, layer: int, inputs: DeltaInputs) -> torch.Tensor:
        """The outputs [tokens, heads, value_dim] of linear attention; a row's state begins with the row."""
        if self._delta_plan is None:
            self._delta_plan = DeltaPlan(self.segments, inputs.kernel.shape[2] - 1, inputs.mixed.device)
        return inputs.packed(self._delta_plan)

    def attend(self, layer: int, q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, scoring: Scoring) -> torch.Tensor:
        """q [1, heads, tokens, head_dim], k [1, kv_heads, tokens, head_dim], v [1, kv_heads, tokens, value_dim].

        Returns [1, tokens, heads, value_dim].
        """
        scoring = self.without_idle_window(scoring)
        kernel = choose_kernel(q, scoring)
        if kernel == "varlen":
            return varlen_attention(self._varlen_plan(q.device, scoring.window), q, k, v, scoring.scale)
        if kernel == "flash_cpu":
            padding = q.shape[-1] - v.shape[-1]
            out: torch.Tensor = _FlashParts.apply(q, k, F.pad(v, (0, padding)) if padding else v, self, scoring.scale)
            return out[..., : v.shape[-1]] if padding else out
        return masked_attention(q, k, v, self.segments, scoring, self.chunk_tokens)

    def attend_kept(self, index: int, heads: HeadViews, scoring: Scoring, by: Matmul, keep: bool) -> Attended:
        """Attention of layer `index`; with `keep`, fit for `attend_backward`."""
        q, k, v = heads.q, heads.k, heads.v
        if choose_kernel(q, self.without_idle_window(scoring)) == "flash_cpu":
            _, num_heads, tokens, head_dim = q.shape
            q, k, v = by.operand(q), by.operand(k), by.operand(v)
            out = q.new_empty(tokens, num_heads, head_dim)
            lse = flash_forward(self, q, k, v, as_heads(out), scoring.scale)
            return Attended(out.flatten(1).to(heads.q.dtype), lse if keep else None)
        if not keep:
            return Attended(self.attend(index, q, k, v, scoring)[0].flatten(1))
        q, k, v = (x.detach().requires_grad_() for x in (q, k, v))
        with torch.enable_grad():
            attended = self.attend(index, q, k, v, scoring)
        return Attended(attended.detach()[0].flatten(1), graph=(attended, (q, k, v)))

    def attend_backward(
        self, heads: HeadViews, attended: Attended, d_out: torch.Tensor, scale: float, by: Matmul, into: HeadViews
    ) -> None:
        """Writes the gradients of queries, keys and values into `into`, given the gradient of the output."""
        if attended.graph is not None:
            out, leaves = attended.graph
            grads = torch.autograd.grad(out, leaves, d_out.view_as(out))
            for target, grad in zip(into, grads, strict=True):
                target.copy_(grad)
            return
        assert attended.lse is not None
        shape = (d_out.shape[0], heads.q.shape[1], heads.q.shape[3])
        out, d_out = (by.operand(as_heads(x.view(shape))) for x in (attended.out, d_out))
        q, k, v = by.operand(heads.q), by.operand(heads.k), by.operand(heads.v)
        flash_backward(self, d_out, q, k, v, out, attended.lse, scale, into)

    def without_idle_window(self, scoring: Scoring) -> Scoring:
        """`scoring` without a window that is as long as every row: it hides no token."""
        return scoring if scoring.window is None or scoring.window < self.longest else scoring._replace(window=None)

    def _varlen_plan(self, device: torch.device, window: int | None) -> VarlenPlan:
        if window not in self._plans:
            self._plans[window] = VarlenPlan(self.segments, self.prefix_runs, device, window)
        return self._plans[window]

    @property
    def compiled_plan(self) -> CompiledPlan:
        """The layout as compiled kernels read it."""
        if self._compiled_plan is None:
            self._compiled_plan = CompiledPlan(self.segments)
        return self._compiled_plan


def choose_kernel(q: torch.Tensor, scoring: Scoring) -> str:
    """The one place that decides the code of a layer: "varlen" (flash attention on CUDA), "flash_cpu" or
    "masked"."""
    if scoring.softcap is None and flash_runs(q.device, q.dtype, q.shape[-1]):
        return "varlen"
    if scoring.window is not None or scoring.softcap is not None:
        return "masked"
    return "flash_cpu" if q.device.type == "cpu" else "masked"


def _causal_runs(segments: Sequence[PackedSegment]) -> Iterator[CausalRun]:
    for length, run in itertools.groupby(segments, key=lambda s: s.length):
        members = list(run)
        yield CausalRun(members[0].start, len(members), length)


def prefix_runs(segments: Sequence[PackedSegment]) -> Iterator[PrefixRun]:
    for (start, length), run in itertools.groupby(segments, key=lambda s: (s.prefix_start, s.prefix_length)):
        if length:
            members = list(run)
            yield PrefixRun(members[0].start, sum(m.length for m in members), start, length)


def _batched(x: torch.Tensor, run: CausalRun) -> torch.Tensor:
    """[1, heads, tokens, ...] -> the run's tokens as a view [count, heads, length, ...]."""
    batched: torch.Tensor = (
        x[0].narrow(1, run.start, run.count * run.length).unflatten(1, (run.count, run.length)).transpose(0, 1)
    )
    return batched


def _flash_sequences(
    q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, spans: TokenSpans, causal: bool, scale: float
) -> tuple[torch.Tensor, torch.Tensor]:
    out, width = torch.empty_like(q), v.shape[-1]
    lse = torch.empty(len(q), q.shape[1], dtype=torch.promote_types(q.dtype, torch.float32))
    v = F.pad(v, (0, q.shape[-1] - width))
    for here, keys in _sequences(spans):
        part, part_lse = _flash(*(as_heads(x) for x in (q[here], k[keys], v[keys])), 0.0, causal, scale=scale)
        out[here], lse[here] = part[0].transpose(0, 1), part_lse[0].t()
    return out[..., :width], lse.t()


def _flash_sequences_backward(
    grad: torch.Tensor, q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, out: torch.Tensor, lse: torch.Tensor,
    spans: TokenSpans, causal: bool, scale: float,
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:  # fmt: skip
    width = v.shape[-1]
    grad, v, out = (F.pad(x, (0, q.shape[-1] - width)) for x in (grad, v, out))
    grads = torch.zeros_like(q), torch.zeros_like(k), torch.zeros_like(v)
    for here, keys in _sequences(spans):
        inputs = [as_heads(x) for x in (grad[here], q[here], k[keys], v[keys], out[here])]
        parts = _flash_backward(*inputs, lse[:, here].unsqueeze(0), 0.0, causal, scale=scale)
        for total, where, part in zip(grads, (here, keys, keys), parts, strict=True):
            total[where] = part[0].transpose(0, 1)
    return grads[0], grads[1], grads[2][..., :width]


def _sequences(spans: TokenSpans) -> Iterator[tuple[slice, slice]]:
    """Queries and keys of each sequence."""
    queries, keys = (itertools.pairwise(starts.tolist()) for starts in (spans.start_q, spans.start_k))
    return ((slice(*q), slice(*k)) for q, k in zip(queries, keys, strict=True))


FLASH_ON_CPU = VarlenKernel("flash_cpu", _flash_sequences, _flash_sequences_backward)


class _FlashParts(torch.autograd.Function):
    """All parts of one layer. Memory order of the output is [tokens, heads, head_dim]; the next projection
    reads."""

    @staticmethod
    def forward(
        ctx: AutogradContext, q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, layout: PackedLayout, scale: float
    ) -> torch.Tensor:
        _, heads, tokens, head_dim = q.shape
        out = q.new_empty(1, tokens, heads, head_dim).transpose(1, 2)
        lse = flash_forward(layout, q, k, v, out, scale)
        ctx.save_for_backward(q, k, v, out, lse)
        ctx.layout, ctx.scale = layout, scale
        return out.transpose(1, 2)

    @staticmethod
    def backward(ctx: AutogradContext, *grads: torch.Tensor) -> tuple[torch.Tensor | None, ...]:
        q, k, v, out, lse = ctx.saved_tensors
        into = (torch.empty_like(q), torch.empty_like(k), torch.empty_like(v))
        flash_backward(ctx.layout, grads[0].transpose(1, 2), q, k, v, out, lse, ctx.scale, into)
        return *into, None, None


def flash_forward(
    layout: PackedLayout, q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, out: torch.Tensor, scale: float
) -> torch.Tensor:
    """Attention of all parts into `out`, shaped as `q` [1, heads, tokens, head_dim]; returns the log-sum-exp
    [1, heads, tokens], float32 or wider."""
    _, heads, tokens, _ = q.shape
    if compiled.usable(q, k, v):
        return compiled_attention(layout.compiled_plan, q, k, v, out, scale)
    wide = torch.promote_types(q.dtype, torch.float32)
    lse = torch.empty(1, tokens, heads, dtype=wide, device=q.device).transpose(1, 2)
    for run in layout.causal_runs:
        part, part_lse = _flash(_batched(q, run), _batched(k, run), _batched(v, run), 0.0, True, scale=scale)
        _batched(out, run).copy_(part)
        _batched(lse, run).copy_(part_lse)
    for bridge in layout.prefix_runs:
        queries, prefix = _tokens(bridge.start, bridge.length), _tokens(bridge.prefix_start, bridge.prefix_length)
        part, part_lse = _flash(queries(q), prefix(k), prefix(v), 0.0, False, scale=scale)
        _merge_(queries(out), queries(lse), part, part_lse)
    return lse


def flash_backward(
    layout: PackedLayout,
    d_out: torch.Tensor,
    q: torch.Tensor,
    k: torch.Tensor,
    v: torch.Tensor,
    out: torch.Tensor,
    lse: torch.Tensor,
    scale: float,
    into: Sequence[torch.Tensor],
) -> None:
    """Writes the gradients of q, k and v into the three tensors `into`, given what flash_forward took and gave."""
    if compiled.usable(q, k, v):
        compiled_attention_backward(layout.compiled_plan, d_out, q, k, v, out, lse, scale, into)
        return
    dq, dk, dv = into
    for run in layout.causal_runs:  # these cover every token once, so they may overwrite
        inputs = [_batched(x, run) for x in (d_out, q, k, v, out, lse)]
        parts = _flash_backward(*inputs, 0.0, True, scale=scale)
        for gradient, part in zip((dq, dk, dv), parts, strict=True):
            _batched(gradient, run).copy_(part)
    for bridge in layout.prefix_runs:
        queries, prefix = _tokens(bridge.start, bridge.length), _tokens(bridge.prefix_start, bridge.prefix_length)
        inputs = [queries(d_out), queries(q), prefix(k), prefix(v), queries(out), queries(lse)]
        part_q, part_k, part_v = _flash_backward(*inputs, 0.0, False, scale=scale)
        queries(dq).add_(part_q)
        prefix(dk).add_(part_k)
        prefix(dv).add_(part_v)


class HeadViews(NamedTuple):
    """Queries, keys and values as attention reads them: [1, heads, tokens, head_dim] each, views of [tokens, ...]."""

    q: torch.Tensor
    k: torch.Tensor
    v: torch.Tensor


class Attended(NamedTuple):
    """`out` [tokens, heads * head_dim], and the values that the backward needs."""

    out: torch.Tensor
    lse: torch.Tensor | None = None
    graph: tuple[torch.Tensor, tuple[torch.Tensor, ...]] | None = None
    inside: tuple[HeadViews, Attended] | None = None  # of all tokens and some heads, if ranks divide the tokens


def as_heads(x: torch.Tensor) -> torch.Tensor:
    """[tokens, heads, head_dim] -> [1, heads, tokens, head_dim], a view."""
    return x.transpose(0, 1).unsqueeze(0)


def _tokens(start: int, length: int) -> Callable[[torch.Tensor], torch.Tensor]:
    return lambda x: x.narrow(2, start, length)


def _merge_(out: torch.Tensor, lse: torch.Tensor, part: torch.Tensor, part_lse: torch.Tensor) -> None:
    """Fold a second part into (out, lse), in place: a softmax over both sets of keys."""
    total = torch.logaddexp(lse, part_lse)
    share = (part_lse - total).exp_().unsqueeze(-1)
    if out.dtype == share.dtype:
        out.lerp_(part, share)
    else:  # lse is float32 or wider, so bfloat16 parts are merged in float32
        out.copy_(torch.lerp(out.to(share.dtype), part.to(share.dtype), share))
    lse.copy_(total)


def masked_attention(
    q: torch.Tensor,
    k: torch.Tensor,
    v: torch.Tensor,
    segments: Sequence[PackedSegment],
    scoring: Scoring,
    chunk_tokens: int | None = None,
) -> torch.Tensor:
    """PackedSegment by segment in plain differentiable operations, for layers with a window or a cap, and for other devices.

    Memory: [heads, length, prefix + length] scores of each segment (softcap), or none (SDPA); in chunks, of `chunk_tokens`
    queries at a time. Shapes as in `attend`.
    """
    outs = []
    for segment in segments:
        size = max(1, min(chunk_tokens or segment.length, segment.length))
        for first in range(0, segment.length, size):
            queries = (first, min(size, segment.length - first))
            part = partial(_attend_part, segment=segment, queries=queries, scoring=scoring)
            if size < segment.length and torch.is_grad_enabled():
                out = checkpoint(part, q, k, v, use_reentrant=False, preserve_rng_state=False)
            else:
                out = part(q, k, v)
            outs.append(out.transpose(1, 2))
    return torch.cat(outs, dim=1)


def _attend_part(
    q: torch.Tensor,
    k: torch.Tensor,
    v: torch.Tensor,
    *,
    segment: PackedSegment,
    queries: tuple[int, int],
    scoring: Scoring,
) -> torch.Tensor:
    """`queries` are (first, count) within the segment; before them lie its prefix and its own first tokens."""
    (first, count), window = queries, scoring.window
    # a window that begins inside what lies before hides the head of that from every query
    hidden = 0 if window is None else max(0, segment.prefix_length + first - window + 1)
    num_prefix, num_row = min(hidden, segment.prefix_length), max(0, hidden - segment.prefix_length)
    prefix = _tokens(segment.prefix_start + num_prefix, segment.prefix_length - num_prefix)
    row_tokens = _tokens(segment.start + num_row, first + count - num_row)
    in_prefix, num_before = segment.prefix_length > num_prefix, segment.prefix_length + first - hidden
    keys, values = (torch.cat([prefix(x), row_tokens(x)], dim=2) if in_prefix else row_tokens(x) for x in (k, v))
    mask = None
    if num_before or window is not None or scoring.softcap is not None:
        mask = _visible(count, num_before, window, q.device)
    return _attend_dense(_tokens(segment.start + first, count)(q), keys, values, mask, scoring)


def _visible(length: int, num_before: int, sliding_window: int | None, device: torch.device) -> torch.Tensor:
    """[length, num_before + length], true if query `num_before + i` may look at key `j`."""
    query = torch.arange(num_before, num_before + length, device=device).unsqueeze(1)
    key = torch.arange(num_before + length, device=device)
    visible = key <= query
    return visible if sliding_window is None else visible & (key > query - sliding_window)


def _attend_dense(
    q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, mask: torch.Tensor | None, scoring: Scoring
) -> torch.Tensor:
    scale, _, softcap = scoring
    if softcap is None:
        return F.scaled_dot_product_attention(q, k, v, mask, is_causal=mask is None, scale=scale, enable_gqa=True)
    assert mask is not None
    groups = q.shape[1] // k.shape[1]
    k, v = k.repeat_interleave(groups, dim=1), v.repeat_interleave(groups, dim=1)
    scores = q @ k.transpose(-1, -2) * scale
    scores = softcap * torch.tanh(scores / softcap)
    wide = torch.promote_types(q.dtype, torch.float32)
    weights = scores.masked_fill(~mask, float("-inf")).softmax(dim=-1, dtype=wide)
    return weights.to(q.dtype) @ v
