"""Log-probabilities over ranks that each hold a part of the vocabulary.

As verl.models.log_probs, with the softmax statistics summed over the ranks: a few numbers per token travel, logits never
do. Every rank ends with the same statistics; the gradient of the hidden states is summed over the ranks.
"""

from collections.abc import Collection

import torch
import torch.distributed as dist
import torch.nn.functional as F

from verl.models.hf_module import AutogradContext
from verl.models.log_probs import OPTIONAL, Head, TokenStats, logit_grad_, read_columns
from verl.models.ops.linear import Matmul
from verl.models.parallel.collectives import gather_rows

_CHUNK_ELEMENTS = 1 << 25  # logits held at a time


def parallel_log_probs(
    hidden: torch.Tensor,
    weight: torch.Tensor,
    targets: torch.Tensor,
    temperature: float,
    group: dist.ProcessGroup,
    first_token: int,
    *,
    optional: Collection[str] = (),
    candidates: torch.Tensor | None = None,
    top: int = 0,
    bias: torch.Tensor | None = None,
    softcap: float | None = None,
    logit_scale: float = 1.0,
) -> TokenStats:
    """TokenStats of hidden [tokens, hidden_size] at targets [tokens], for rows `first_token`... of the output projection,
    weight [part of the vocabulary, hidden_size]. Everything but weight and bias is equal on all ranks of `group`. Other
    arguments are as in verl.models.log_probs.token_log_probs; `top` is at most the size of the vocabulary."""
    head = Head(temperature, logit_scale, softcap)
    chunk = max(1, min(len(targets), _CHUNK_ELEMENTS // weight.shape[0]))
    wants = tuple(name in optional for name in OPTIONAL)
    here = None if candidates is None else candidates - first_token
    return TokenStats(
        *_ParallelLogProbs.apply(
            hidden, weight, bias, targets - first_token, head, wants, here, (top, first_token), chunk, group
        )
    )


class _ParallelLogProbs(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: AutogradContext,
        hidden: torch.Tensor,
        weight: torch.Tensor,
        bias: torch.Tensor | None,
        targets: torch.Tensor,
        head: Head,
        wants: tuple[bool, ...],
        candidates: torch.Tensor | None,
        top: tuple[int, int],
        chunk: int,
        group: dist.ProcessGroup,
    ) -> tuple[torch.Tensor | None, ...]:
        wide = torch.promote_types(hidden.dtype, torch.float32)
        # rows: log-prob, log-sum-exp, entropy, sum of squares, whether no logit is greater, mean logit
        stats = torch.zeros(6, len(hidden), dtype=wide, device=hidden.device)
        chosen = None if candidates is None else stats.new_zeros(candidates.shape)
        listed: list[tuple[torch.Tensor, torch.Tensor]] = []
        buffer = torch.empty(chunk, weight.shape[0], dtype=wide, device=hidden.device)
        for start in range(0, len(hidden), chunk):
            part = slice(start, start + chunk)
            z = _logits(hidden[part], weight, bias, head, buffer)
            if chosen is not None and candidates is not None:
                column, owned = _owned(candidates[part], z.shape[1])
                chosen[part] = z.gather(1, column).where(owned, 0.0)
            listed += [_top(z, *top, group)] if top[0] else []
            stats[:, part] = _statistics(z, targets[part], group, wants)
        log_probs, lse, entropy, squared, correct, mean = stats.unbind()
        if chosen is not None:
            dist.all_reduce(chosen, group=group)
            chosen -= lse.unsqueeze(1)
        best: list[torch.Tensor | None] = [torch.cat(parts) for parts in zip(*listed, strict=True)] or [None, None]
        if best[0] is not None:
            best[0] -= lse.unsqueeze(1)
        ctx.set_materialize_grads(False)
        ctx.save_for_backward(hidden, weight, bias, targets, lse, entropy, squared, candidates)
        ctx.head, ctx.chunk, ctx.group = head, chunk, group
        each = (entropy, squared, correct, mean * head.temperature)
        *optional, last = (x.clone() if want else None for x, want in zip(each, wants, strict=True))
        ctx.mark_non_differentiable(*(x for x in (optional[2], *best, last) if x is not None))
        return log_probs.clone(), *optional, chosen, *best, last

    @staticmethod
    def backward(ctx: AutogradContext, *grads: torch.Tensor | None) -> tuple[torch.Tensor | None, ...]:
        hidden, weight, bias, targets, lse, entropy, squared, candidates = ctx.saved_tensors
        read, column_grads = read_columns(targets, candidates, grads)
        wide, chunk = lse.dtype, ctx.chunk
        if all(g is None for g in column_grads):
            return (None,) * 10
        matmul = Matmul(hidden.dtype, hidden.device)
        d_hidden = torch.zeros(hidden.shape, dtype=wide, device=hidden.device)
        d_weight = torch.zeros(weight.shape, dtype=wide, device=weight.device) if ctx.needs_input_grad[1] else None
        d_bias = torch.zeros_like(bias, dtype=wide) if bias is not None and ctx.needs_input_grad[2] else None
        buffer = torch.empty(chunk, weight.shape[0], dtype=wide, device=hidden.device)
        for start in range(0, len(hidden), chunk):
            part = slice(start, start + chunk)
            z = _logits(hidden[part], weight, bias, ctx.head, buffer)
            here = [None if g is None else g[part] for g in column_grads]
            column, owned = _owned(read[part], z.shape[1])
            stats = (lse[part], entropy[part], squared[part])
            z.sub_(lse[part].unsqueeze(1))
            logit_grad_(z, column, here, stats, ctx.head, matmul, owned)
            if d_bias is not None:
                d_bias += z.sum(dim=0)
            dz = z.to(hidden.dtype)
            d_hidden[part] = dz @ weight
            if d_weight is not None:
                d_weight += dz.t() @ hidden[part]
        dist.all_reduce(d_hidden, group=ctx.group)
        return (
            d_hidden.to(hidden.dtype),
            None if d_weight is None else d_weight.to(weight.dtype),
            None if d_bias is None else d_bias.to(bias.dtype),
            *(None,) * 7,
        )


def _logits(
    hidden: torch.Tensor, weight: torch.Tensor, bias: torch.Tensor | None, head: Head, out: torch.Tensor
) -> torch.Tensor:
    """Rows of this part's logits, in `out` [at least rows, part of the vocabulary]; returns the view that was filled."""
    return head.transform_(out[: len(hidden)].copy_(hidden @ weight.t()), bias)


def _statistics(
    z: torch.Tensor, targets: torch.Tensor, group: dist.ProcessGroup, wants: tuple[bool, ...]
) -> torch.Tensor:
    """[6, tokens] of logits z [tokens, part of the vocabulary]: two reductions, one for the peak and one for sums."""
    peak = z.amax(dim=1)
    dist.all_reduce(peak, dist.ReduceOp.MAX, group=group)
    exp = (z - peak.unsqueeze(1)).exp_()
    column, owned = _owned(targets.unsqueeze(1), z.shape[1])
    sums = torch.zeros(6, len(z), dtype=z.dtype, device=z.device)
    sums[0] = exp.sum(dim=1)
    sums[1] = z.gather(1, column).where(owned, 0.0).squeeze(1)
    if wants[1]:
        sums[3] = exp.square().sum(dim=1)
    if wants[0]:
        sums[2] = exp.mul_(z).sum(dim=1)
    if wants[3]:
        sums[4], sums[5] = z.sum(dim=1), z.shape[1]
    dist.all_reduce(sums, group=group)
    total, chosen, weighted, squared, logits, vocabulary = sums.unbind()
    lse, correct = total.log() + peak, (chosen >= peak).to(z)
    mean = logits / vocabulary.clamp(min=1)
    return torch.stack([chosen - lse, lse, lse - weighted / total, squared / total.square(), correct, mean])


def _top(z: torch.Tensor, count: int, first_token: int, group: dist.ProcessGroup) -> tuple[torch.Tensor, torch.Tensor]:
    """(logits, token ids) [tokens, count] of the largest ones on all ranks, descending."""
    values, ids = z.topk(min(count, z.shape[1]), dim=1)
    lacking = count - values.shape[1]  # of a part of the vocabulary that has fewer tokens
    values, ids = F.pad(values, (0, lacking), value=float("-inf")), F.pad(ids + first_token, (0, lacking))
    values, ids = (gather_rows(x.t(), [count] * group.size(), group).t() for x in (values, ids))
    values, order = values.topk(count, dim=1)
    return values, ids.gather(1, order)


def _owned(columns: torch.Tensor, size: int) -> tuple[torch.Tensor, torch.Tensor]:
    """Columns [tokens, n] to look at, and whether each is really here."""
    owned = (columns >= 0) & (columns < size)
    return columns.where(owned, 0), owned
