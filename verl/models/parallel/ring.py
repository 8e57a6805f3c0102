"""Ring attention (Liu et al. 2023, arXiv:2310.01889) over packed batches with shared prompts.

The tokens of a batch lie in blocks of equal size on the ranks of a ring. Queries stay. Keys and values of a block go from
rank to rank as far as queries see them, and each rank merges its parts by their log-sum-exps:

    step  rank 0         rank 1         rank 2         rank 3
    0     block 0        block 1        block 2        block 3
    1                    block 0        block 1        block 2
    2                                   block 0        block 1     a row of all four blocks; of rows that end in the
    3                                                  block 0     next block, step 1 is the last

The next block travels while one is used. The backward computes in these steps too, and sends the gradients of a block straight
to its rank.
"""

from collections.abc import Iterator, Sequence

import torch
import torch.distributed as dist

from verl.errors import ConfigError
from verl.models.attention import Scoring
from verl.models.hf_module import AutogradContext
from verl.models.ops.linear import Matmul
from verl.models.ops.varlen import (
    FLASH,
    Bridge,
    PackedSegment,
    PrefixRun,
    VarlenKernel,
    VarlenPlan,
    flash_runs,
    varlen_backward,
    varlen_forward,
)
from verl.models.packed import FLASH_ON_CPU, Attended, HeadViews, PackedLayout, as_heads, prefix_runs

Parts = tuple[torch.Tensor, torch.Tensor, torch.Tensor]  # of q, k and v, [tokens, heads, dim]


class RingLayout:
    """An AttentionLayout for one block of `size` tokens of `full`. `ranks` of `group` hold the blocks in order, this one block
    `index`; tokens of `full` may end within a block."""

    def __init__(self, full: PackedLayout, size: int, ranks: Sequence[int], index: int, group: dist.ProcessGroup):
        self.full, self.size, self.index, self.group = full, size, index, group
        self.chunk_tokens = full.chunk_tokens
        self._ranks = [dist.get_global_rank(group, rank) for rank in ranks]
        self._seen = _seen_blocks(full.segments, size, len(ranks))
        # hops that a block makes, since a rank so far behind sees it
        self._hops = [
            max((rank - block for rank, blocks in enumerate(self._seen) if block in blocks), default=0)
            for block in range(len(ranks))
        ]
        self._plan: VarlenPlan | None = None
        self._bridges: dict[int, list[Bridge]] = {}

    def attend(self, layer: int, q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, scoring: Scoring) -> torch.Tensor:
        """As AttentionLayout.attend, with the tokens of the block in and out."""
        tokens_first = [x[0].transpose(0, 1) for x in (q, k, v)]
        out: torch.Tensor = _Ring.apply(*tokens_first, self, self._scale(scoring))
        return out.unsqueeze(0)

    def attend_kept(self, index: int, heads: HeadViews, scoring: Scoring, by: Matmul, keep: bool) -> Attended:
        """As PackedLayout.attend_kept."""
        q, k, v = (by.operand(x)[0].transpose(0, 1) for x in heads)
        out, lse = self.forward(q, k, v, self._scale(scoring))
        return Attended(out.flatten(1).to(heads.q.dtype), lse if keep else None)

    def attend_backward(
        self, heads: HeadViews, attended: Attended, d_out: torch.Tensor, scale: float, by: Matmul, into: HeadViews
    ) -> None:
        """As PackedLayout.attend_backward."""
        assert attended.lse is not None
        q, k, v = (by.operand(x)[0].transpose(0, 1) for x in heads)
        out, grad = (by.operand(x).view(len(x), q.shape[1], -1) for x in (attended.out, d_out))
        for target, gradient in zip(into, self.backward(grad, q, k, v, out, attended.lse, scale), strict=True):
            target.copy_(as_heads(gradient))

    def forward(
        self, q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, scale: float
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """(out [tokens, heads, value_dim], its log-sum-exp [heads, tokens])."""
        kernel, arriving = _kernel(q), self._arriving(k, v)
        out, lse = varlen_forward(self._own(q.device), q, k, v, scale, kernel)
        out = out.to(torch.promote_types(out.dtype, torch.float32))
        for step, block in arriving:
            if block is not None:
                for bridge in self._bridges_to(self.index - step, q.device):
                    bridge.forward(out, lse, q, *_parted(block, k, v), scale, kernel)
        return out.to(q.dtype), lse

    def backward(
        self, grad: torch.Tensor, q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, out: torch.Tensor,
        lse: torch.Tensor, scale: float,
    ) -> Parts:  # fmt: skip
        """The gradients of q, k and v; keys and values add up those of ranks in order."""
        kernel, arriving = _kernel(q), self._arriving(k, v)
        wide = torch.promote_types(q.dtype, torch.float32)
        plan, returns = self._own(q.device), []
        d_q, d_k, d_v = (x.to(wide) for x in varlen_backward(plan, grad, q, k, v, out, lse, scale, kernel))
        for step, block in arriving:
            here, behind = self.index - step, self.index + step
            sent = received = None
            if block is not None and here in self._seen[self.index]:
                keys, values = _parted(block, k, v)
                parts = d_q, *(torch.zeros_like(x, dtype=wide) for x in (keys, values))
                for bridge in self._bridges_to(here, q.device):
                    bridge.backward(parts, grad, q, keys, values, out, lse, scale, kernel)
                sent = _joined(*parts[1:]).to(k.dtype)
            if behind < len(self._seen) and self.index in self._seen[behind]:
                received = torch.empty_like(_joined(k, v))
            returns.append((self._begin(sent, here, received, behind), sent, received))
        for works, _, received in returns:
            _wait(works)
            for total, part in zip((d_k, d_v), () if received is None else _parted(received, k, v), strict=False):
                total += part
        return d_q.to(q.dtype), d_k.to(k.dtype), d_v.to(v.dtype)

    def _arriving(self, k: torch.Tensor, v: torch.Tensor) -> Iterator[tuple[int, torch.Tensor | None]]:
        """(step, keys and values of the block that has come so far, if one comes). The first step begins at once."""
        mine = _joined(k, v)
        coming = self._pass_on(1, mine, mine)

        def blocks() -> Iterator[tuple[int, torch.Tensor | None]]:
            nonlocal coming
            for step in range(1, max(self._hops) + 1):
                held, works = coming
                _wait(works)
                coming = self._pass_on(step + 1, held, mine)
                yield step, held

        return blocks()

    def _pass_on(
        self, step: int, held: torch.Tensor | None, like: torch.Tensor
    ) -> tuple[torch.Tensor | None, list[dist.Work]]:
        """Begin step `step`: the block `held` goes a rank further and another one comes, as far as they are seen."""
        sent, comes = self.index - step + 1, self.index - step
        goes_on = held is not None and self._hops[sent] >= step
        buffer = torch.empty_like(like) if comes >= 0 and self._hops[comes] >= step else None
        return buffer, self._begin(held if goes_on else None, self.index + 1, buffer, self.index - 1)

    def _begin(self, send: torch.Tensor | None, to: int, receive: torch.Tensor | None, of: int) -> list[dist.Work]:
        """Begin to send a tensor to the rank of block `to`, and to receive one of the rank of block `of`.

        All ranks call this in one order, so that NCCL has no cycle."""
        ops = [] if send is None else [dist.P2POp(dist.isend, send, self._ranks[to], self.group)]
        ops += [] if receive is None else [dist.P2POp(dist.irecv, receive, self._ranks[of], self.group)]
        return dist.batch_isend_irecv(ops) if ops else []

    def _own(self, device: torch.device) -> VarlenPlan:
        """Of queries and keys of this block."""
        if self._plan is None:
            segments = list(_clipped(self.full.segments, self.index, self.index, self.size))
            end = segments[-1].start + segments[-1].length if segments else 0
            if end < self.size:  # behind the last token of the batch
                segments.append(PackedSegment(end, self.size - end))
            self._plan = VarlenPlan(segments, list(prefix_runs(segments)), device)
        return self._plan

    def _bridges_to(self, block: int, device: torch.device) -> list[Bridge]:
        """Of queries of this block and keys of an earlier one: prefixes, and the row at the border of this block."""
        if block not in self._bridges:
            runs = list(prefix_runs(list(_clipped(self.full.segments, self.index, block, self.size))))
            first, start = self.index * self.size, block * self.size
            rows = []
            for segment in self.full.segments:
                end = segment.start + segment.length
                if segment.start < min(first, start + self.size) and end > first:
                    begin = max(segment.start, start)
                    length = min(end, first + self.size) - first
                    rows.append(PrefixRun(0, length, begin - start, start + self.size - begin))
            self._bridges[block] = [Bridge(part, device) for part in (runs, rows) if part]
        return self._bridges[block]

    def _scale(self, scoring: Scoring) -> float:
        scoring = self.full.without_idle_window(scoring)
        if scoring.window is not None or scoring.softcap is not None:
            raise ConfigError(
                "Ring attention has no windows and no caps of scores. Choose a ulysses_sequence_parallel_size (with Megatron "
                "context_parallel_size) that divides the attention heads."
            )
        return scoring.scale


class _Ring(torch.autograd.Function):
    """q, k, v [tokens, heads, dim] -> out [tokens, heads, value_dim]."""

    @staticmethod
    def forward(
        ctx: AutogradContext, q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, ring: RingLayout, scale: float
    ) -> torch.Tensor:
        out, lse = ring.forward(q, k, v, scale)
        ctx.save_for_backward(q, k, v, out, lse)
        ctx.ring, ctx.scale = ring, scale
        return out

    @staticmethod
    def backward(ctx: AutogradContext, *grads: torch.Tensor) -> tuple[torch.Tensor | None, ...]:
        return *ctx.ring.backward(grads[0], *ctx.saved_tensors, ctx.scale), None, None


def _kernel(q: torch.Tensor) -> VarlenKernel:
    if q.device.type == "cpu":
        return FLASH_ON_CPU
    if flash_runs(q.device, q.dtype, q.shape[-1]):
        return FLASH
    raise ConfigError(
        "Ring attention needs flash attention: bfloat16 or float16 on NVIDIA from Ampere on. Choose a "
        "ulysses_sequence_parallel_size (with Megatron context_parallel_size) that divides the attention heads."
    )


def _wait(works: list[dist.Work]) -> None:
    for work in works:
        work.wait()


def _joined(k: torch.Tensor, v: torch.Tensor) -> torch.Tensor:
    return torch.cat([k.flatten(1), v.flatten(1)], dim=1)


def _parted(joined: torch.Tensor, k: torch.Tensor, v: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """Views of `joined`, shaped as `k` and `v`."""
    keys, values = joined.split([k.shape[1] * k.shape[2], v.shape[1] * v.shape[2]], dim=1)
    return keys.unflatten(1, k.shape[1:]), values.unflatten(1, v.shape[1:])


def _clipped(segments: Sequence[PackedSegment], block: int, prefix_block: int, size: int) -> Iterator[PackedSegment]:
    """The tokens of each segment within a block, and of its prefix within block `prefix_block`, counted from their starts."""
    for segment in segments:
        start, length = _within(segment.start, segment.length, block, size)
        if length:
            prefix = _within(segment.prefix_start, segment.prefix_length, prefix_block, size)
            yield PackedSegment(start, length, *prefix)


def _within(start: int, length: int, block: int, size: int) -> tuple[int, int]:
    first = max(start, block * size)
    return first - block * size, max(0, min(start + length, (block + 1) * size) - first)


def _seen_blocks(segments: Sequence[PackedSegment], size: int, num_blocks: int) -> list[set[int]]:
    """For each block, the earlier ones with keys that its queries see."""
    earlier: list[set[int]] = [set() for _ in range(num_blocks)]
    for segment in segments:
        first, last = segment.start // size, (segment.start + segment.length - 1) // size
        prefix: set[int] = set()
        if segment.prefix_length:
            end = segment.prefix_start + segment.prefix_length - 1
            prefix = set(range(segment.prefix_start // size, end // size + 1))
        for block in range(first, last + 1):
            earlier[block] |= (prefix | set(range(first, block))) - {block}
    assert all(key < block for block, keys in enumerate(earlier) for key in keys), "a prefix lies before its segments"
    return earlier
