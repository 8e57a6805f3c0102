"""Attention over a packed batch by the compiled kernels, for segments in the order of the kernels."""

from __future__ import annotations

from bisect import bisect_left, bisect_right
from collections.abc import Sequence
from typing import Any

import torch

from verl.models.ops.compiled import AttentionCall, Heads, num_threads, run_attention

_PAD = 32  # of kernels.h


class CompiledPlan:
    """The segments of a layout as the kernels read them. Segments that share keys are a group, long ones come first."""

    def __init__(self, segments: Sequence[Any]):
        present = [s for s in segments if s.length]
        groups = sorted(_connected(present), key=_cost, reverse=True)
        ordered = [s for group in groups for s in group]
        numbers: dict[tuple[int, int], int] = {}
        rows, self.packed_rows = [], 0
        indices = []
        for s in ordered:
            ranges = [(s.start, s.length), *([(s.prefix_start, s.prefix_length)] if s.prefix_length else [])]
            for start, length in ranges:
                if (start, length) not in numbers:
                    numbers[start, length] = len(numbers)
                    rows.append((start, length, self.packed_rows))
                    self.packed_rows += -(-length // _PAD) * _PAD
            number, *prefix = (numbers[r] for r in ranges)
            indices.append((s.start, s.length, number, prefix[0] if prefix else -1))
        self.longest = max((s.length for s in present), default=0)
        self.longest_seen = max((s.prefix_length + s.length for s in present), default=0)
        self.ranges = torch.tensor(rows, dtype=torch.int64).view(-1, 3)
        self.segments = torch.tensor(indices, dtype=torch.int64).view(-1, 4)
        self.groups = torch.tensor([0, *map(len, groups)], dtype=torch.int64).cumsum(0)


def _cost(group: Sequence[Any]) -> int:
    return sum(s.length * (s.length + s.prefix_length) for s in group)


def _connected(segments: Sequence[Any]) -> list[list[Any]]:
    """Segments by the tokens that they share keys of, directly or through other segments."""
    starts, root = [s.start for s in segments], list(range(len(segments)))

    def root_of(index: int) -> int:
        while root[index] != index:
            index = root[index]
        return index

    for index, segment in enumerate(segments):
        if segment.prefix_length:
            first = bisect_right(starts, segment.prefix_start) - 1
            for other in range(first, bisect_left(starts, segment.prefix_start + segment.prefix_length)):
                root[root_of(index)] = root_of(other)
    groups: dict[int, list[object]] = {}
    for index, segment in enumerate(segments):
        groups.setdefault(root_of(index), []).append(segment)
    return list(groups.values())


def compiled_attention(
    plan: CompiledPlan, q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, out: torch.Tensor, scale: float
) -> torch.Tensor:
    """Attention into `out`, shaped as q [1, heads, tokens, head_dim]; returns the log-sum-exp [1, heads, tokens]."""
    lse = torch.empty(q.shape[2], q.shape[1])
    _run(plan, scale, lse, backward=False, q=q, k=k, v=v, out=out)
    return lse.t().unsqueeze(0)


def compiled_attention_backward(
    plan: CompiledPlan,
    d_out: torch.Tensor,
    q: torch.Tensor,
    k: torch.Tensor,
    v: torch.Tensor,
    out: torch.Tensor,
    lse: torch.Tensor,
    scale: float,
    into: Sequence[torch.Tensor],
) -> None:
    """Writes the gradients of q, k and v into the three tensors `into`; they may be narrower."""
    dq, dk, dv = (x if x.dtype == q.dtype else torch.empty_like(x, dtype=q.dtype) for x in into)
    lse = lse[0].t().contiguous()
    _run(plan, scale, lse, backward=True, q=q, k=k, v=v, out=out, d_out=d_out, dq=dq, dk=dk, dv=dv)
    for target, gradient in zip(into, (dq, dk, dv), strict=True):
        if target is not gradient:
            target.copy_(gradient)


def _run(plan: CompiledPlan, scale: float, lse: torch.Tensor, *, backward: bool, **tensors: torch.Tensor) -> None:
    written = [tensors[name] for name in ("dq", "dk", "dv")] if backward else [tensors["out"]]
    assert all(x.stride(-1) == 1 for x in written)
    dtype = tensors["q"].dtype
    assert lse.dtype == torch.float32
    assert all(x.dtype == dtype for x in tensors.values())
    read = {name: x if x.stride(-1) == 1 else x.contiguous() for name, x in tensors.items()}
    _, num_heads, tokens, head_dim = read["q"].shape
    call = AttentionCall(
        num_heads, read["k"].shape[1], head_dim, tokens, plan.longest_seen if dtype == torch.bfloat16 else plan.longest,
        plan.packed_rows, len(plan.ranges), len(plan.segments), len(plan.groups) - 1, num_threads(read["q"].numel()),
        dtype == torch.bfloat16, scale,
        plan.ranges.data_ptr(), plan.segments.data_ptr(), plan.groups.data_ptr(), lse=lse.data_ptr(),
        **{name: Heads(x.data_ptr(), x.stride(2), x.stride(1)) for name, x in read.items()},
    )  # fmt: skip
    run_attention(call, backward)
