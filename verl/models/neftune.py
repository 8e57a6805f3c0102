"""Noise on the token embeddings in training (NEFTune, Jain et al. 2023, arXiv:2310.05914).

e + alpha / sqrt(L d) * u,   u ~ U(-1, 1)^(L x d),   for the L tokens of a row and embeddings of d elements
"""

from __future__ import annotations

from dataclasses import replace

import torch
import xxhash

from verl.models.packing import PackedBatch
from verl.parallel.device import to_device


def with_noise(packed: PackedBatch, alpha: float, hidden_size: int, seed: int) -> PackedBatch:
    """`packed`, laid out without shared prompts, with noise for the embeddings of its input tokens.

    The noise of a row depends only on `seed` and its tokens: not on micro-batches, padding, the order of rows or ranks.
    """
    rows = []
    for segment in packed.layout.segments:
        ids = packed.input_ids[0, segment.start : segment.start + segment.length].cpu()
        generator = torch.Generator().manual_seed(xxhash.xxh64_intdigest(ids.numpy().tobytes(), seed=seed))
        uniform = torch.rand(segment.length, hidden_size, generator=generator)
        rows.append((2 * uniform - 1) * (alpha / (segment.length * hidden_size) ** 0.5))
    noise = torch.cat(rows) if rows else torch.zeros(0, hidden_size)
    return replace(packed, noise=to_device(noise, packed.input_ids.device))
