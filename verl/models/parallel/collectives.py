"""Collectives with a gradient, on tensors that a group of ranks computes together.

In all of them every rank of the group computes the same loss, so that a gradient is either complete or a part of a
sum, as the names say.
"""

from collections.abc import Sequence

import torch
import torch.distributed as dist
from torch.distributed.tensor import DTensor

from verl.models.hf_module import AutogradContext
from verl.parallel.slices import even_span

Group = dist.ProcessGroup
# its newer name if there is one: the older one warns then
gather_into = getattr(dist, "all_gather_single", None) or dist.all_gather_into_tensor


def local(tensor: torch.Tensor) -> torch.Tensor:
    """The part of a sharded tensor that this rank holds; another tensor itself."""
    return tensor.to_local() if isinstance(tensor, DTensor) else tensor


def even_sizes(total: int, num_ranks: int) -> list[int]:
    """`total` rows, columns or tokens over ranks: the first ones get one more if it does not divide."""
    spans = (even_span(total, num_ranks, rank) for rank in range(num_ranks))
    return [stop - first for first, stop in spans]


def own_range(total: int, group: Group) -> tuple[int, int]:
    """First index and number of the rows, columns or tokens that `even_sizes` gives to this rank."""
    first, stop = even_span(total, group.size(), group.rank())
    return first, stop - first


class _Enter(torch.autograd.Function):
    @staticmethod
    def forward(ctx: AutogradContext, x: torch.Tensor, group: Group) -> torch.Tensor:
        ctx.group = group
        return x.view_as(x)

    @staticmethod
    def backward(ctx: AutogradContext, *grads: torch.Tensor) -> tuple[torch.Tensor | None, ...]:
        grad = grads[0].contiguous().clone()  # autograd may still need the one it gave
        dist.all_reduce(grad, group=ctx.group)
        return grad, None


class _Leave(torch.autograd.Function):
    @staticmethod
    def forward(ctx: object, x: torch.Tensor, group: Group) -> torch.Tensor:
        total = x.contiguous().clone()
        dist.all_reduce(total, group=group)
        return total

    @staticmethod
    def backward(ctx: object, *grads: torch.Tensor) -> tuple[torch.Tensor | None, ...]:
        return grads[0], None


def enter_group(x: torch.Tensor, group: Group) -> torch.Tensor:
    """`x`, equal on all ranks, before each rank uses it for its own part: its gradient is summed."""
    return _Enter.apply(x, group) if group.size() > 1 else x


def leave_group(x: torch.Tensor, group: Group) -> torch.Tensor:
    """The sum of all ranks' parts `x`; its gradient is equal on all ranks."""
    return _Leave.apply(x, group) if group.size() > 1 else x


class _GatherRows(torch.autograd.Function):
    @staticmethod
    def forward(ctx: AutogradContext, x: torch.Tensor, sizes: Sequence[int], group: Group) -> torch.Tensor:
        ctx.start, ctx.size = sum(sizes[: group.rank()]), len(x)
        return gather_rows(x, sizes, group)

    @staticmethod
    def backward(ctx: AutogradContext, *grads: torch.Tensor) -> tuple[torch.Tensor | None, ...]:
        return grads[0].narrow(0, ctx.start, ctx.size), None, None


def gather_rows_with_grad(x: torch.Tensor, sizes: Sequence[int], group: Group) -> torch.Tensor:
    """All ranks' rows, in rank order; the gradient of the rows here is equal on all ranks, and is taken as it is."""
    return _GatherRows.apply(x, tuple(sizes), group) if group.size() > 1 else x


def gather_rows(x: torch.Tensor, sizes: Sequence[int], group: Group) -> torch.Tensor:
    """All ranks' rows `x` [sizes[rank], ...], in rank order. Rows are padded on the way if ranks have unequal counts."""
    num_padded = max(sizes)
    if group.size() == 1 or num_padded == 0:
        return x
    mine = x.contiguous()
    if len(mine) < num_padded:
        mine = torch.cat([mine, mine.new_zeros(num_padded - len(mine), *mine.shape[1:])])
    everything = mine.new_empty(num_padded * len(sizes), *mine.shape[1:])
    gather_into(everything, mine, group=group)
    if len(set(sizes)) == 1:
        return everything
    return torch.cat([everything.narrow(0, num_padded * rank, size) for rank, size in enumerate(sizes)])


class _Exchange(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: AutogradContext, x: torch.Tensor, received: Sequence[int], sent: Sequence[int], group: Group
    ) -> torch.Tensor:
        ctx.received, ctx.sent, ctx.group = received, sent, group
        return _all_to_all(x, received, sent, group)

    @staticmethod
    def backward(ctx: AutogradContext, *grads: torch.Tensor) -> tuple[torch.Tensor | None, ...]:
        return _all_to_all(grads[0], ctx.sent, ctx.received, ctx.group), None, None, None


def exchange_rows(x: torch.Tensor, received: Sequence[int], sent: Sequence[int], group: Group) -> torch.Tensor:
    """`sent[r]` rows of `x` go to rank r, in order; returns the `received[r]` rows from each rank r, in rank order."""
    rows: torch.Tensor = _Exchange.apply(x, tuple(received), tuple(sent), group)
    return rows


def _all_to_all(x: torch.Tensor, received: Sequence[int], sent: Sequence[int], group: Group) -> torch.Tensor:
    out = x.new_empty(sum(received), *x.shape[1:])
    dist.all_to_all_single(out, x.contiguous(), list(received), list(sent), group=group)
    return out
