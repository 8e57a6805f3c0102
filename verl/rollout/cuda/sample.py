"""Drawing tokens on the device without waiting for it: what verl.rollout.sampling does, in two reads of the logits."""

from __future__ import annotations

import torch
import torch.nn.functional as F

from verl.data_proto.samples import SamplingParams
from verl.rollout.cuda.fused import Parts
from verl.rollout.sampling import sample

_CHUNKS = (512, 256, 128, 64)  # tokens per partial sum; one that divides the vocabulary spares a copy of the logits


def waits_for_device(params: SamplingParams) -> bool:
    """Whether drawing has to look at a tensor from the host: top-p decides by the values how far it sorts."""
    return params.temperature != 0 and params.top_p < 1


def draw_tokens(
    logits: torch.Tensor, keys: torch.Tensor, drawn: torch.Tensor, params: SamplingParams, parts: Parts
) -> tuple[torch.Tensor, torch.Tensor]:
    """Tokens (int64 [rows]) and log-probs (float32 [rows]) as `verl.rollout.sampling.sample` defines them, for float32
    logits [rows, vocab]; the uniforms are those of `keys` at position `drawn` (int64 [rows])."""
    u = parts.uniforms_at(keys, drawn)
    filtered = params.top_k > 0 or params.top_p < 1 or params.min_p > 0
    if params.temperature == 0 or filtered:
        return sample(logits, params, u)
    return _draw_chunked(logits, params.temperature, u, parts)


def _draw_chunked(
    logits: torch.Tensor, temperature: float, u: torch.Tensor, parts: Parts
) -> tuple[torch.Tensor, torch.Tensor]:
    vocab = logits.shape[1]
    chunk = next((c for c in _CHUNKS if vocab % c == 0), 0)
    if not chunk:
        chunk = 256
        logits = F.pad(logits, (0, -vocab % chunk), value=float("-inf"))
    peak, sums = parts.chunk_sums(logits, temperature, chunk)
    cdf = sums.double().cumsum(-1)
    target = u[:, None] * cdf[:, -1:]
    number = torch.searchsorted(cdf, target, right=True).clamp_(max=cdf.shape[-1] - 1)
    before = torch.where(number > 0, cdf.gather(-1, (number - 1).clamp_(min=0)), 0.0)
    picked = logits.unflatten(-1, (-1, chunk)).gather(1, number[:, :, None].expand(-1, -1, chunk)).squeeze(1)
    z = picked / temperature - peak
    inside = z.exp().double().cumsum(-1)
    # the partial sums were taken in float32: u may point a rounding beyond the chunk, then its last token is meant
    rest = torch.minimum(target - before, inside[:, -1:] * (1 - 2.0**-50))
    within = torch.searchsorted(inside, rest, right=True).clamp_(max=chunk - 1)
    log_probs = z.gather(-1, within).squeeze(-1) - cdf[:, -1].log().to(z.dtype)
    return (number * chunk + within).squeeze(-1).clamp_(max=vocab - 1), log_probs
