"""Batch invariance of the native engine: whether a sample's bits depend on the other samples of its batch.

It holds for plain decoders on a CPU when every operation that mixes rows is verified, by experiment at start or from only
the shapes. Matmuls run in tiles (prepacked_linear.py). Attention runs in blocks that gave a row the bits of a single row
(decode_attention.py). The cuts of a prompt depend only on its own length. The rest works row by row (checked here).
"""

from __future__ import annotations

import functools
from typing import Any

import numpy as np
import torch
from torch import nn

from verl.config import RolloutConfig, full_key
from verl.errors import ConfigError
from verl.models.cpu.weights import DenseDecoder, Projection
from verl.rollout.api import Invariance
from verl.rollout.native.torch.forward import DenseForward, compiled
from verl.rollout.native.torch.prepacked_linear import padding_cost, tiles_of

KEY = full_key("rollout.batch_invariant")
_MOST_COST = 1.10  # of the time of matmuls, with auto
_GRAIN = 32768  # elements below which torch does not divide an elementwise operation among threads
_VECTORS = 64  # elements: torch computes the rest of a share, below this number, by other, scalar code
_CHECKED_ROWS = (1, 3, 8, 65)


def examine(module: nn.Module, config: RolloutConfig) -> Invariance:
    """Whether samples of `module` under this RolloutConfig are batch-invariant. Raises ConfigError when they are not, and
    batch_invariant=require."""
    invariance = _examined(module, config)
    if config.batch_invariant == "require" and not invariance.holds:
        raise ConfigError(
            f"{KEY}=require cannot be kept: {invariance.why}. Set it to auto to run without the guarantee."
        )
    return invariance


def _examined(module: Any, config: RolloutConfig) -> Invariance:
    if config.batch_invariant == "off":
        return Invariance(False, f"{KEY}=off")
    device = next(module.parameters()).device
    if device.type != "cpu":
        return Invariance(False, f"it is not verified on {device.type}")
    forward = DenseForward.of(module, prepack=False)
    if forward is None:
        return Invariance(False, "the model's own modules compute it, by kernels that were not verified")
    decoder, head = forward.decoder, module.get_output_embeddings()
    projection = Projection(head.weight.detach(), head.bias, (head,))
    required = config.batch_invariant == "require"
    kernels = compiled(module, decoder, projection, prepack=config.prepack_weights, required=required)
    if kernels is not None:
        equal = head.weight.dtype == torch.bfloat16 and kernels.equals_trainer(decoder)
        trainers = ", the order of the fused training forward" if equal else ""
        return Invariance(True, f"the compiled kernels add up every row in one order{trainers}")
    obstacle = _obstacle(decoder, head, config.max_num_batched_tokens + config.max_num_seqs)
    if obstacle is not None:
        return Invariance(False, obstacle)
    cost = _cost(decoder, head, config.prepack_weights)
    if config.batch_invariant == "auto" and cost > _MOST_COST:
        return Invariance(
            False, f"this CPU's matmuls of few rows would take about {cost - 1:.0%} longer; {KEY}=require accepts that"
        )
    return Invariance(True, "matmuls in tiles and attention in blocks that gave equal bits on this CPU")


def _cost(decoder: DenseDecoder, head: nn.Linear, prepack: bool) -> float:
    """Time of all matmuls in tiles over their time without, estimated."""
    projections = [*decoder.projections(), Projection(head.weight.detach(), head.bias, (head,))]
    costs = [padding_cost(tiles_of(p.weight, p.bias is not None, prepack)) for p in projections]
    weights = [p.weight.numel() for p in projections]
    return sum(c * w for c, w in zip(costs, weights, strict=True)) / sum(weights)


def _obstacle(decoder: DenseDecoder, head: nn.Linear, most_rows: int) -> str | None:
    """The first unverified condition other than matmuls and attention; None when all are verified."""
    if any(layer.sliding_window is not None for layer in decoder.layers):
        return "the model has a sliding window, whose masks depend on the longest row"
    if decoder.num_heads * decoder.head_dim % 16 or decoder.num_kv_heads * decoder.head_dim % 16:
        return "the model's heads do not fill cache lines, so that a row's place in memory may matter"
    dtype, threads = head.weight.dtype, torch.get_num_threads()
    inner = decoder.layers[0].down.weight.shape[1] if decoder.layers else _VECTORS
    if not _divides_evenly(inner, most_rows, threads):
        return f"{threads} threads divide the {inner} activations of a row; OMP_NUM_THREADS=1 or a power of two may do"
    if not _rows_alike(decoder.embed.shape[1], len(head.weight), dtype, threads):
        return "this torch build's norms or softmax gave a row other bits beside other rows"
    return None


def _divides_evenly(width: int, most_rows: int, threads: int) -> bool:
    """Whether the shares of all threads end where vectors end, for 1 to `most_rows` rows: SiLU's scalar code rounds otherwise
    than its vector code."""
    numel = width * np.arange(1, most_rows + 1)
    shares = -(-numel // np.minimum(threads, -(-numel // _GRAIN)))
    return width % _VECTORS == 0 and not (shares % _VECTORS).any()


@functools.cache
def _rows_alike(hidden: int, vocab: int, dtype: torch.dtype, threads: int) -> bool:
    """Whether operations along a row, and exponentials and logarithms at any place, give the bits of a single row."""
    del threads  # other kernels may be chosen for another number of them
    generator = torch.Generator().manual_seed(0)
    wide = torch.promote_types(dtype, torch.float32)
    state, logits = (torch.randn(1, width, generator=generator).to(wide) for width in (hidden, vocab))
    state = state.to(dtype)

    def along(rows: int) -> list[torch.Tensor]:
        x, scores = state.repeat(rows, 1), logits.repeat(rows, 1)
        norms = torch.linalg.vector_norm(x, dim=-1, keepdim=True, dtype=wide)
        return [norms, scores.softmax(-1), scores.logsumexp(-1), scores.sum(-1)]

    alone = along(1)
    beside = (zip(alone, along(rows), strict=True) for rows in _CHECKED_ROWS)
    values = torch.rand(4096, generator=generator).to(wide) + 0.01
    pointwise = (torch.equal(f(values), torch.cat([f(x) for x in values.split(37)])) for f in (torch.exp, torch.log))
    return all(torch.equal(b, a.expand_as(b)) for pairs in beside for a, b in pairs) and all(pointwise)
