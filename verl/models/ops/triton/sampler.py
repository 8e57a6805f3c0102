"""Tokens of logits by Triton: one read of [rows, vocabulary], then one of the chunk that has the token."""

from __future__ import annotations

import torch
import triton
import triton.language as tl

from verl.models.ops.triton.softmax import CHUNK, Transform, chunk_sums


def launch_sample(logits: torch.Tensor, u: torch.Tensor, temperature: float) -> tuple[torch.Tensor, torch.Tensor]:
    """See verl.rollout.sampling.sample, without filters."""
    logits = logits if logits.stride(1) == 1 else logits.contiguous()
    sums = chunk_sums(logits, Transform(temperature=temperature or 1.0), moments=False)
    _, rows, num_chunks = sums.shape
    tokens = torch.empty(rows, dtype=torch.int64, device=logits.device)
    log_probs = torch.empty(rows, dtype=torch.float32, device=logits.device)
    if rows:
        _draw_kernel[(rows,)](
            logits, sums, u, tokens, log_probs, logits.stride(0), logits.shape[1], num_chunks, sums.stride(0),
            temperature or 1.0, GREEDY=temperature == 0, CHUNK=CHUNK,
            CHUNKS_BLOCK=triton.next_power_of_2(num_chunks), num_warps=4,
        )  # fmt: skip
    return tokens, log_probs


@triton.jit
def _draw_kernel(
    logits, sums, u, tokens, log_probs, row_stride, vocab, num_chunks, plane, temperature, GREEDY: tl.constexpr,
    CHUNK: tl.constexpr, CHUNKS_BLOCK: tl.constexpr,
):  # fmt: skip
    row = tl.program_id(0).to(tl.int64)
    chunks = tl.arange(0, CHUNKS_BLOCK)
    exists = chunks < num_chunks
    peaks = tl.load(sums + row * num_chunks + chunks, mask=exists, other=float("-inf"))
    masses = tl.load(sums + plane + row * num_chunks + chunks, mask=exists, other=0.0)
    top = tl.max(peaks, axis=0)
    cdf = tl.cumsum((masses * tl.exp(peaks - top)).to(tl.float64), axis=0)
    total = tl.max(cdf, axis=0)
    if GREEDY:
        chunk = tl.min(tl.where(peaks == top, chunks, CHUNKS_BLOCK), axis=0)
    else:
        target = tl.load(u + row) * total
        chunk = tl.sum(((cdf <= target) & exists).to(tl.int32), axis=0)
    chunk = tl.minimum(chunk, num_chunks - 1)
    at = tl.arange(0, CHUNK)
    inside = chunk * CHUNK + at < vocab
    raw = tl.load(logits + row * row_stride + chunk * CHUNK + at, mask=inside, other=float("-inf")).to(tl.float32)
    z = tl.div_rn(raw, temperature)
    if GREEDY:
        within = tl.min(tl.where(z == top, at, CHUNK), axis=0)
    else:
        before = tl.sum(tl.where(chunks == chunk - 1, cdf, 0.0), axis=0)
        within_cdf = tl.cumsum(tl.exp(z - top).to(tl.float64), axis=0)
        passed = tl.sum((within_cdf <= tl.maximum(target - before, 0.0)).to(tl.int32), axis=0)
        # the chunk's mass was summed in float32: u may point a rounding beyond it, then its last token is meant
        last = tl.sum((within_cdf < tl.max(within_cdf, axis=0)).to(tl.int32), axis=0)
        within = tl.minimum(passed, last)
    token = tl.minimum(chunk * CHUNK + tl.minimum(within, CHUNK - 1), vocab - 1)
    chosen = tl.max(tl.where(at == token - chunk * CHUNK, z, float("-inf")), axis=0)
    tl.store(tokens + row, token.to(tl.int64))
    tl.store(log_probs + row, chosen - top - tl.log(total.to(tl.float32)))
