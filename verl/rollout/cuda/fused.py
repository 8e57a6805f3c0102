"""Parts of a decode step that torch.compile fuses. On a GPU each is compiled to a kernel or two; elsewhere, and where no
compiler works, it runs as written. verl.models.cuda.pointwise has the parts with kernels of their own."""

from __future__ import annotations

import functools
import logging
from collections.abc import Callable
from typing import Any, NamedTuple

import torch

from verl.rollout.uniforms import uniforms_at

log = logging.getLogger(__name__)


def merged_attention(
    own: torch.Tensor, own_lse: torch.Tensor, prefix: torch.Tensor, prefix_lse: torch.Tensor, place: torch.Tensor
) -> torch.Tensor:
    """Attention to two disjoint sets of keys, from that to each: [rows, heads, head_dim].

    `own` [rows, heads, head_dim], `own_lse` [heads, rows]. The prefix part comes in places, of which row r has `place[r]`
    (int64 [rows]), with the query heads of a key head before the key heads: `prefix` [places, groups, kv_heads, head_dim],
    `prefix_lse` [kv_heads, places, groups].
    """
    theirs = prefix[place].transpose(1, 2).flatten(1, 2)
    their_lse = prefix_lse[:, place].transpose(0, 1).flatten(1, 2)
    share = torch.sigmoid(their_lse - own_lse.t()).unsqueeze(-1)
    return (own + (theirs - own) * share).to(own.dtype)


class Parts(NamedTuple):
    """The functions of this file, as written or compiled."""

    merged_attention: Callable[..., torch.Tensor]
    uniforms_at: Callable[..., torch.Tensor]


_FUNCTIONS: tuple[Callable[..., Any], ...] = (merged_attention, uniforms_at)


@functools.cache
def parts(compiled: bool) -> Parts:
    """All parts; the compiled ones are compiled when they are first called, once per process."""
    return Parts(*(_compiled(f) if compiled else f for f in _FUNCTIONS))


def _compiled(function: Callable[..., Any]) -> Callable[..., Any]:
    fast: Callable[..., Any] | None = torch.compile(function)

    @functools.wraps(function)
    def call(*args: Any) -> Any:
        nonlocal fast
        if fast is not None:
            try:
                return fast(*args)
            except Exception as error:  # a compiler fails in many ways, and none of them may cost the run
                if isinstance(error, torch.OutOfMemoryError):
                    raise
                log.warning("%s is not compiled (%s: %s)", function.__name__, type(error).__name__, str(error)[:200])
                fast = None
        return function(*args)

    return call
