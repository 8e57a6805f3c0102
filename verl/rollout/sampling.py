"""From logits to tokens: one pass, one uniform number per row.

A token is sampled by inverting the cumulative distribution over token ids in vocabulary order. Top-k, top-p and min-p are one
threshold on the probability: tokens at or above it stay, so ties stay together and no rule depends on a sort's order.
"""

import torch
import torch.nn.functional as F

from verl.data_proto.samples import SamplingParams
from verl.models.ops.table import op
from verl.rollout.native.compiled.library import kernels

_CHUNK = 256  # tokens per partial sum; sampling finds the chunk first, then the token in it
_TOP_P_CANDIDATES = 512  # a sort of the complete vocabulary costs ten times as much and is seldom needed


def sample(logits: torch.Tensor, params: SamplingParams, u: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """Sample one token per row of `logits` [rows, vocab] with the uniforms `u` (float64 [rows], unread when greedy).

    Returns tokens (int64 [rows]) and their log-probs (float32 [rows]; float64 for logits in it) under
    softmax(logits / temperature) before top-k, top-p and min-p; greedy takes the argmax and temperature 1. The filters act
    in this order: top-k, then top-p on what top-k left (renormalised), then min-p relative to the likeliest token. `logits`
    is left as it was.
    """
    is_plain = params.temperature == 0 or (params.top_k <= 0 and params.top_p >= 1 and params.min_p <= 0)
    if is_plain and logits.device.type == "cpu" and logits.dtype == torch.float32 and logits.stride(-1) == 1:
        if (compiled := kernels()) is not None:
            return compiled.draw(logits, params.temperature, u)
    if is_plain:
        return sample_unfiltered(logits, u, params.temperature)
    return _sample(logits, u, params.temperature, params)


@op(triton="sampler:launch_sample")
def sample_unfiltered(logits: torch.Tensor, u: torch.Tensor, temperature: float) -> tuple[torch.Tensor, torch.Tensor]:
    """`sample` without top-k, top-p and min-p."""
    return _sample(logits, u, temperature)


def _sample(
    logits: torch.Tensor, u: torch.Tensor, temperature: float, filters: SamplingParams | None = None
) -> tuple[torch.Tensor, torch.Tensor]:
    """`sample` by torch, with the top-k, top-p and min-p of `filters`."""
    logits = logits.to(torch.promote_types(logits.dtype, torch.float32))
    if temperature == 0:
        tokens = logits.argmax(-1)
        return tokens, _pick(logits, tokens) - logits.logsumexp(-1)
    probs = torch.softmax(logits if temperature == 1 else logits / temperature, -1)
    threshold = None if filters is None else keep_threshold(probs, filters)
    tokens = draw(probs if threshold is None else probs.masked_fill(probs < threshold, 0), u)
    return tokens, _pick(probs, tokens).log()


def keep_threshold(probs: torch.Tensor, params: SamplingParams) -> torch.Tensor | None:
    """The least probability that may be sampled, [rows, 1], or None when nothing is cut off."""
    vocab = probs.shape[-1]
    thresholds = []
    top_k = params.top_k if 0 < params.top_k < vocab else 0
    if top_k:
        thresholds.append(probs.topk(top_k, -1).values[:, -1:])
    if params.top_p < 1:
        allowed = probs if not top_k else probs.masked_fill(probs < thresholds[0], 0)
        needed = params.top_p * allowed.sum(-1, keepdim=True).double()
        thresholds.append(top_p_threshold(allowed, needed))
    if params.min_p > 0:
        thresholds.append(params.min_p * probs.amax(-1, keepdim=True))
    return torch.cat(thresholds, -1).amax(-1, keepdim=True) if thresholds else None


@op(triton="threshold:launch_top_p_threshold")
def top_p_threshold(probs: torch.Tensor, needed: torch.Tensor) -> torch.Tensor:
    """The largest probability p [rows, 1] so that the tokens with probability p or more have the mass `needed` (float64
    [rows, 1]). It is the probability of the last token in the smallest such set, likeliest first."""
    return (_ranked_threshold if probs.device.type == "cpu" else _bisected_threshold)(probs, needed)


def _ranked_threshold(probs: torch.Tensor, needed: torch.Tensor) -> torch.Tensor:
    """`top_p_threshold` by a sort of the likeliest tokens."""
    vocab = probs.shape[-1]
    count = min(vocab, _TOP_P_CANDIDATES)
    ranked = probs.topk(count, -1).values
    before = ranked.double().cumsum(-1)
    if count < vocab and bool((before[:, -1:] < needed).any()):
        ranked = probs.sort(-1, descending=True).values
        before = ranked.double().cumsum(-1)
    num_kept = (before < needed).sum(-1, keepdim=True).clamp_(max=ranked.shape[-1] - 1)
    return ranked.gather(-1, num_kept)


def _bisected_threshold(probs: torch.Tensor, needed: torch.Tensor) -> torch.Tensor:
    """`_ranked_threshold` by bisection over the bits of floats: their order is the order of integers. The host does not wait,
    and nothing is sorted."""
    bits = torch.int32 if probs.dtype == torch.float32 else torch.int64
    low = torch.zeros(len(probs), 1, dtype=bits, device=probs.device)
    high = probs.new_full((len(probs), 1), 2.0).view(bits)  # above all
    for _ in range(8 * probs.element_size() - 1):
        middle = low + (high - low) // 2
        mass = probs.masked_fill(probs < middle.view(probs.dtype), 0).sum(-1, keepdim=True, dtype=torch.float64)
        low, high = torch.where(mass >= needed, middle, low), torch.where(mass >= needed, high, middle)
    return low.view(probs.dtype)


def draw(weights: torch.Tensor, u: torch.Tensor) -> torch.Tensor:
    """The token t (int64 [rows]) with cdf(t-1) <= u < cdf(t). cdf sums `weights` [rows, vocab] (not negative, not
    all zero, any scale) in vocabulary order; `u` is float64 [rows] in (0, 1). Never a token of weight 0."""
    rows, vocab = weights.shape
    padded = weights if vocab % _CHUNK == 0 else F.pad(weights, (0, -vocab % _CHUNK))
    chunks = padded.unflatten(1, (padded.shape[1] // _CHUNK, _CHUNK))
    cdf = chunks.sum(-1).double().cumsum(-1)
    target = (u[:, None] * cdf[:, -1:]).contiguous()
    chunk = torch.searchsorted(cdf, target, right=True).clamp_(max=cdf.shape[-1] - 1)
    before = torch.where(chunk > 0, cdf.gather(-1, (chunk - 1).clamp_(min=0)), 0.0)
    inside = chunks[torch.arange(rows, device=weights.device), chunk.squeeze(-1)].double().cumsum(-1)
    # The partial sums were taken in float32: u may point a rounding beyond the chunk, then its last token is meant.
    rest = torch.minimum(target - before, inside[:, -1:] * (1 - 2.0**-50)).contiguous()
    within = torch.searchsorted(inside, rest, right=True).clamp_(max=_CHUNK - 1)
    return (chunk * _CHUNK + within).squeeze(-1).clamp_(max=vocab - 1)


def _pick(values: torch.Tensor, tokens: torch.Tensor) -> torch.Tensor:
    return values.gather(-1, tokens[:, None]).squeeze(-1)
