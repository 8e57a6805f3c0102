"""Feed-forward over a few tokens at a time, so that its activations never exist for a batch at once.

A feed-forward keeps several times the width of a layer for each token until its backward. In chunks only its input is kept;
each chunk is computed again when the backward reaches it. The result differs by the rounding of matmuls of another
height at most.
"""

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import torch
from torch import nn
from torch.utils.checkpoint import checkpoint

from verl.models.parallel.experts import is_experts


@contextmanager
def chunked_feed_forward(module: nn.Module, chunk_tokens: int | None) -> Iterator[None]:
    """Inside, forward and backward of `module` (a causal language model or a value model) compute the feed-forward of each
    layer over `chunk_tokens` tokens at a time; None: as always. Mixtures of experts stay undivided, since they choose
    among tokens."""
    parts = _feed_forwards(module) if chunk_tokens is not None else []
    forwards = [vars(part).get("forward") for part in parts]  # None if it is the class's, as almost always
    for part in parts:
        part.forward = _in_chunks(part.forward, chunk_tokens or 1)
    try:
        yield
    finally:
        for part, before in zip(parts, forwards, strict=True):
            del part.forward
            if before is not None:
                part.forward = before


def _feed_forwards(module: Any) -> list[Any]:
    mlps = [getattr(layer, "mlp", None) for layer in getattr(module.get_decoder(), "layers", ())]
    return [part for part in mlps if part is not None and not any(map(is_experts, part.modules()))]


def _in_chunks(forward: Callable[[torch.Tensor], torch.Tensor], size: int) -> Callable[[torch.Tensor], torch.Tensor]:
    def chunked(x: torch.Tensor) -> torch.Tensor:
        if x.shape[1] <= size:
            return forward(x)
        if not torch.is_grad_enabled():
            return torch.cat([forward(part) for part in x.split(size, dim=1)], dim=1)
        parts = [
            checkpoint(forward, part, use_reentrant=False, preserve_rng_state=False) for part in x.split(size, dim=1)
        ]
        return torch.cat(parts, dim=1)

    return chunked
