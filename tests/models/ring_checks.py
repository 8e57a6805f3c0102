"""Checks of ring attention on gloo ranks, for test_ring.py."""

import torch
import torch.distributed as dist

from tests.engines.parallel_checks import on
from verl.models.attention import Scoring
from verl.models.ops.linear import Matmul
from verl.models.ops.varlen import PackedSegment
from verl.models.packed import HeadViews, PackedLayout, as_heads
from verl.models.parallel import ring
from verl.models.parallel.sequence import SequenceLayout, num_head_ranks

HEADS = [(3, 1), (2, 1), (1, 1), (6, 3), (6, 2), (4, 4)]
SCORING = Scoring(0.3, None)


def random_layout(seed):
    """Prompts with responses, of random lengths; some are longer than a block."""
    generator = torch.Generator().manual_seed(seed)

    def number(limit):
        return 1 + int(torch.randint(limit, (), generator=generator))

    segments, end = [], 0
    for _ in range(number(4)):
        prompt = PackedSegment(end, number(30))
        segments.append(prompt)
        end += prompt.length
        for _ in range(number(4) - 1):
            segments.append(PackedSegment(end, number(20), prompt.start, prompt.length))
            end += segments[-1].length
    return PackedLayout(segments), end


def random_heads(seed, tokens, heads, kv_heads, dim=8, value_dim=8):
    generator = torch.Generator().manual_seed(seed)
    shapes = (heads, dim), (kv_heads, dim), (kv_heads, value_dim), (heads, value_dim)
    return [torch.randn(tokens, *shape, generator=generator, dtype=torch.float64) for shape in shapes]


def expected_of(layout, q, k, v, grad):
    """(out, gradients) on one device, tokens first."""
    inputs = [as_heads(x).detach().requires_grad_() for x in (q, k, v)]
    out = layout.attend(0, *inputs, SCORING)[0]
    return [out.detach(), *(x[0].transpose(0, 1) for x in torch.autograd.grad(out, inputs, grad))]


def mine(x, size):
    """The tokens of this rank, with padding behind the last one."""
    padded = torch.cat([x, x.new_ones(size * dist.get_world_size() - len(x), *x.shape[1:])])
    return padded[size * dist.get_rank() :][:size].clone()


def by_autograd(layout, q, k, v, grad):
    inputs = [as_heads(x).requires_grad_() for x in (q, k, v)]
    out = layout.attend(0, *inputs, SCORING)[0]
    return [out.detach(), *(x[0].transpose(0, 1) for x in torch.autograd.grad(out, inputs, grad))]


def by_hand(layout, q, k, v, grad):
    heads, matmul = HeadViews(*map(as_heads, (q, k, v))), Matmul(q.dtype, q.device)
    attended = layout.attend_kept(0, heads, SCORING, matmul, True)
    into = HeadViews(*(as_heads(torch.empty_like(x)) for x in (q, k, v)))
    layout.attend_backward(heads, attended, grad.flatten(1), SCORING.scale, matmul, into)
    return [attended.out.view(grad.shape), *(x[0].transpose(0, 1) for x in into)]


@on(2, 4)
def check_ring(folder):
    """The largest gap to one device, over layouts, heads and both backwards; the number of ranks in each ring."""
    gap, rings = 0.0, set()
    for seed in range(24):
        (layout, tokens), (heads, kv_heads) = random_layout(seed), HEADS[seed % len(HEADS)]
        values = random_heads(seed, tokens, heads, kv_heads, value_dim=8 if seed % 4 else 4)
        expected, ranks = expected_of(layout, *values), dist.get_world_size()
        size = -(-tokens // ranks)
        rings.add(ranks // num_head_ranks(heads, kv_heads, ranks))
        parts = [mine(x, size) for x in values]
        parts[3][max(0, tokens - size * dist.get_rank()) :] = 0.0  # no loss reads padding
        for run in (by_autograd, by_hand) if seed % 4 else (by_autograd,):  # values of other heads have autograd
            sequence = SequenceLayout(layout, tokens, size, dist.group.WORLD)
            for ours, theirs in zip(run(sequence, *(x.clone() for x in parts)), expected, strict=True):
                part = theirs[size * dist.get_rank() :][:size]
                if len(part):
                    gap = max(gap, float((ours[: len(part)] - part).abs().max()))
    gaps = torch.tensor([gap], dtype=torch.float64)
    dist.all_reduce(gaps, op=dist.ReduceOp.MAX)
    return {"gap": float(gaps), "rings": sorted(rings)}


@on(4)
def check_hops(folder):
    """Messages of all ranks in a forward and backward, for one row of all tokens, and for rows of 6 in blocks of 10."""
    counts = {}
    for name, lengths in (("long", [40]), ("short", [6] * 6)):
        layout = PackedLayout([PackedSegment(sum(lengths[:i]), length) for i, length in enumerate(lengths)])
        values = [mine(x, 10) for x in random_heads(0, sum(lengths), 1, 1)]
        sequence, begun = SequenceLayout(layout, sum(lengths), 10, dist.group.WORLD), []

        def counted(ops, send=dist.batch_isend_irecv, begun=begun):
            begun.extend(op for op in ops if op.op is dist.isend)
            return send(ops)

        ring.dist.batch_isend_irecv, original = counted, dist.batch_isend_irecv
        try:
            by_hand(sequence, *values)
        finally:
            ring.dist.batch_isend_irecv = original
        total = torch.tensor([len(begun)])
        dist.all_reduce(total)
        counts[name] = int(total)
    return counts
