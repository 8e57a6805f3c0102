"""The threshold of top-p by Triton: a program bisects the bits of a row's threshold over its probabilities."""

from __future__ import annotations

import torch
import triton
import triton.language as tl

_BLOCK = 4096
_TWO = 0x40000000  # the bits of 2.0, above every probability


def launch_top_p_threshold(probs: torch.Tensor, needed: torch.Tensor) -> torch.Tensor:
    """See verl.rollout.sampling; probs float32."""
    probs = probs if probs.stride(1) == 1 else probs.contiguous()
    rows, vocab = probs.shape
    threshold = probs.new_empty(rows, 1)
    if rows:
        block = min(triton.next_power_of_2(vocab), _BLOCK)
        _kernel[(rows,)](
            probs, needed.contiguous(), threshold, probs.stride(0), vocab, _TWO,
            BLOCK=block, NUM_BLOCKS=triton.cdiv(vocab, block), num_warps=8,
        )  # fmt: skip
    return threshold


@triton.jit
def _kernel(
    probs, needed, threshold, row_stride, vocab, highest, BLOCK: tl.constexpr, NUM_BLOCKS: tl.constexpr
):  # fmt: skip
    row = tl.program_id(0).to(tl.int64)
    at, one = tl.arange(0, BLOCK), tl.arange(0, 1)
    enough = tl.load(needed + row + one)
    low = tl.zeros([1], tl.int32)
    high = tl.zeros([1], tl.int32) + highest
    for _ in range(31):
        middle = low + (high - low) // 2
        bound, mass = middle.to(tl.float32, bitcast=True), tl.zeros([1], tl.float64)
        for block in range(NUM_BLOCKS):
            place = block * BLOCK + at
            values = tl.load(probs + row * row_stride + place, mask=place < vocab, other=0.0)
            mass += tl.sum(tl.where(values >= bound, values, 0.0).to(tl.float64), axis=0)
        holds = mass >= enough
        low, high = tl.where(holds, middle, low), tl.where(holds, high, middle)
    tl.store(threshold + row + one, low.to(tl.float32, bitcast=True))
