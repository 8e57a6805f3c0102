"""Sums of a softmax over chunks of the vocabulary, by Triton: sampler and head read [rows, vocabulary] only here. The order
of a row's sums does not depend on other rows.
"""

from __future__ import annotations

from typing import NamedTuple

import torch
import triton
import triton.language as tl

CHUNK = 256  # tokens, as in verl.rollout.sampling
_TILE = 4096  # logits of a program


class Transform(NamedTuple):
    """Final logits of z: softcap * tanh(scale * (z + bias) / softcap) / temperature; no cap if `softcap` is 0."""

    bias: torch.Tensor | None = None
    scale: float = 1.0
    softcap: float = 0.0
    temperature: float = 1.0

    def arguments(self) -> dict[str, object]:
        """Arguments of a kernel."""
        return {
            "bias": self.bias,
            "scale": self.scale,
            "softcap": self.softcap,
            "temperature": self.temperature,
            "HAS_BIAS": self.bias is not None,
            "HAS_CAP": self.softcap != 0.0,
        }


def chunk_sums(z: torch.Tensor, transform: Transform, *, moments: bool) -> torch.Tensor:
    """float32 [2 or 5, rows, chunks] of z [rows, vocabulary]. With m the greatest final logit f of a chunk: m, and sums of
    exp(f - m) and, with `moments`, of exp(f - m) (f - m), exp(2 (f - m)) and f."""
    rows, vocab = z.shape
    assert z.stride(1) == 1
    num_chunks = triton.cdiv(vocab, CHUNK)
    sums = z.new_empty(5 if moments else 2, rows, num_chunks, dtype=torch.float32)
    block = min(triton.next_power_of_2(num_chunks), _TILE // CHUNK)
    if rows:
        _chunks_kernel[(rows, triton.cdiv(num_chunks, block))](
            z, sums, z.stride(0), vocab, num_chunks, sums.stride(0), **transform.arguments(),
            MOMENTS=moments, CHUNK=CHUNK, CHUNKS_BLOCK=block, num_warps=8,
        )  # fmt: skip
    return sums


@triton.jit
def _chunks_kernel(
    z, sums, row_stride, vocab, num_chunks, plane, bias, scale, softcap, temperature, HAS_BIAS: tl.constexpr,
    HAS_CAP: tl.constexpr, MOMENTS: tl.constexpr, CHUNK: tl.constexpr, CHUNKS_BLOCK: tl.constexpr,
):  # fmt: skip
    row = tl.program_id(0).to(tl.int64)
    chunk = tl.program_id(1) * CHUNKS_BLOCK + tl.arange(0, CHUNKS_BLOCK)
    at = chunk[:, None] * CHUNK + tl.arange(0, CHUNK)[None, :]
    inside = at < vocab
    raw = tl.load(z + row * row_stride + at, mask=inside, other=float("-inf")).to(tl.float32)
    f = final_logits(raw, bias, at, inside, scale, softcap, temperature, HAS_BIAS, HAS_CAP)
    peak = tl.max(f, axis=1)
    below = f - tl.where(peak == float("-inf"), 0.0, peak)[:, None]
    weight = tl.exp(below)
    to = sums + row * num_chunks + chunk
    tl.store(to, peak, mask=chunk < num_chunks)
    tl.store(to + plane, tl.sum(weight, axis=1), mask=chunk < num_chunks)
    if MOMENTS:
        tl.store(to + 2 * plane, tl.sum(tl.where(weight == 0.0, 0.0, weight * below), axis=1), mask=chunk < num_chunks)
        tl.store(to + 3 * plane, tl.sum(weight * weight, axis=1), mask=chunk < num_chunks)
        tl.store(to + 4 * plane, tl.sum(tl.where(inside, f, 0.0), axis=1), mask=chunk < num_chunks)


@triton.jit
def final_logits(raw, bias, at, inside, scale, softcap, temperature, HAS_BIAS: tl.constexpr, HAS_CAP: tl.constexpr):
    """See Transform; minus infinity if not `inside`."""
    if HAS_BIAS:
        raw += tl.load(bias + at, mask=inside, other=0.0).to(tl.float32)
    f = raw * scale
    if HAS_CAP:
        f = softcap * _tanh(f / softcap)
    return tl.where(inside, tl.div_rn(f, temperature), float("-inf"))


@triton.jit
def _tanh(x):
    square = x * x
    series = x * (1 + square * (-1 / 3 + square * (2 / 15 + square * (-17 / 315 + square * (62 / 2835)))))
    decay = tl.exp(-2 * tl.abs(x))
    far = (1 - decay) / (1 + decay)
    return tl.where(square < 0.0625, series, tl.where(x < 0, -far, far))
