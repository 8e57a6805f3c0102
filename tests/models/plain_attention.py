"""The attention of verl.models.ops.varlen by its definition, sequence by sequence: the reference of the flash kernels, and
what stands in for them on a CPU."""

import torch

from verl.models.ops.varlen import TokenSpans, VarlenKernel


def _ranges(spans: TokenSpans) -> list[tuple[slice, slice | torch.Tensor]]:
    """(queries, keys) of each sequence that has both."""
    start_q, start_k = spans.start_q.tolist(), spans.start_k.tolist()
    if spans.pages is not None:
        offsets = torch.arange(spans.page_size, device=spans.pages.device)
        keys = (spans.pages.unsqueeze(-1) * spans.page_size + offsets).flatten(1)
        used = spans.used_k.tolist()
        pairs = [(slice(start_q[i], start_q[i + 1]), keys[i, :count]) for i, count in enumerate(used)]
        return [(a, b) for a, b in pairs if a.stop > a.start and len(b)]
    ends = start_k[1:]
    if spans.used_k is not None:
        ends = [start + used for start, used in zip(start_k[:-1], spans.used_k.tolist(), strict=True)]
    pairs = [(slice(start_q[i], start_q[i + 1]), slice(start_k[i], end)) for i, end in enumerate(ends)]
    return [(a, b) for a, b in pairs if a.stop > a.start and b.stop > b.start]


def _scores(q: torch.Tensor, k: torch.Tensor, causal: bool, scale: float, window: int | None = None) -> torch.Tensor:
    """[heads, queries, keys] of one sequence, float32 or wider."""
    wide = torch.promote_types(q.dtype, torch.float32)
    keys = k.to(wide).repeat_interleave(q.shape[1] // k.shape[1], dim=1)
    scores = torch.einsum("qhd,khd->hqk", q.to(wide), keys) * scale
    if causal:
        hidden = torch.ones(scores.shape[1:], dtype=torch.bool, device=q.device).triu(k.shape[0] - q.shape[0] + 1)
        if window is not None:
            hidden |= torch.ones_like(hidden).tril(k.shape[0] - q.shape[0] - window)
        scores.masked_fill_(hidden, float("-inf"))
    return scores


def _plain_forward(
    q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, spans: TokenSpans, causal: bool, scale: float
) -> tuple[torch.Tensor, torch.Tensor]:
    wide = torch.promote_types(q.dtype, torch.float32)
    out = q.new_zeros(*q.shape[:2], v.shape[-1])
    lse = torch.full((q.shape[1], q.shape[0]), float("inf"), dtype=wide, device=q.device)
    for here, keys_at in _ranges(spans):
        scores = _scores(q[here], k[keys_at], causal, scale, spans.window)
        lse[:, here] = scores.logsumexp(-1)
        values = v[keys_at].to(wide).repeat_interleave(q.shape[1] // v.shape[1], dim=1)
        out[here] = torch.einsum("hqk,khd->qhd", scores.softmax(-1), values).to(q.dtype)
    return out, lse


def _plain_backward(
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
    groups = q.shape[1] // k.shape[1]
    grads = [torch.zeros_like(x) for x in (q, k, v)]
    wide = lse.dtype
    for here, keys_at in _ranges(spans):
        p = (_scores(q[here], k[keys_at], causal, scale, spans.window) - lse[:, here].unsqueeze(-1)).exp()
        keys, values = (x[keys_at].to(wide).repeat_interleave(groups, dim=1) for x in (k, v))
        upstream = grad[here].to(wide)
        delta = (upstream * out[here]).sum(-1).t().unsqueeze(-1)  # [heads, queries, 1]
        ds = p * (torch.einsum("qhd,khd->hqk", upstream, values) - delta) * scale
        _add(grads[0][here], torch.einsum("hqk,khd->qhd", ds, keys), 1)
        _add(grads[1][keys_at], torch.einsum("hqk,qhd->khd", ds, q[here].to(wide)), groups)
        _add(grads[2][keys_at], torch.einsum("hqk,qhd->khd", p, upstream), groups)
    return grads[0], grads[1], grads[2]


def _add(target: torch.Tensor, part: torch.Tensor, groups: int) -> None:
    """`part` [tokens, heads, dim], summed over the query heads of each key head."""
    target.add_(part.unflatten(1, (-1, groups)).sum(2).to(target.dtype))


PLAIN = VarlenKernel("plain", _plain_forward, _plain_backward, page_multiple=1)
