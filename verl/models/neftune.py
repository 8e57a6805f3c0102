"""Noise on the token embeddings in training (NEFTune, Jain et al. 2023, arXiv:2310.05914).

e + alpha / sqrt(L d) * u,   u ~ U(-1, 1)^(L x d),   for the L tokens of a row and embeddings of d elements
"""

import torch
import xxhash


def noise_of(ids: torch.Tensor, alpha: float, hidden_size: int, seed: int) -> torch.Tensor:
    """The noise [tokens, hidden_size] of a row with the tokens `ids`, on the CPU.

    It depends only on `seed` and the tokens: not on micro-batches, padding, the order of rows or ranks.
    """
    generator = torch.Generator().manual_seed(xxhash.xxh64_intdigest(ids.numpy().tobytes(), seed=seed))
    uniform = torch.rand(len(ids), hidden_size, generator=generator)
    size: float = alpha / (len(ids) * hidden_size) ** 0.5
    return (2 * uniform - 1) * size
