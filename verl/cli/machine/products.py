"""Whether this CPU's matrix products give a row the same bits for every number of rows."""

from __future__ import annotations

import torch

from verl.models.matmul import Products
from verl.rollout.native.prepacked_linear import padding_cost, tiles_of

_SHAPE = (960, 576)  # weights of a small model; other shapes may get other kernels, and a run looks at its own
_CPU = torch.device("cpu")


def equal_rows() -> dict[str, object]:
    """`bf16`: "native" or "widened". `tiles`: dtype -> numbers of rows with equal bits, and the estimated cost of padding to
    them, as a factor."""
    tiles = {}
    for dtype in (torch.float32, torch.bfloat16):
        found = tiles_of(torch.empty(_SHAPE, dtype=dtype), False, True)
        tiles[str(dtype).removeprefix("torch.")] = {"rows": list(found), "cost": padding_cost(found)}
    return {"bf16": "widened" if Products(torch.bfloat16, _CPU).widens else "native", "tiles": tiles}
