"""Fraction of the masters' movement since the start of the run that the rounded compute weights show.

    visible = <weights now - weights at start, masters now - masters at start> / |masters now - masters at start|^2

It is near 1 if rounding hides nothing, also with dithered rounding, and near 0 if updates are lost. It is estimated from
a fixed sample of each tensor, so that no second copy of the model is kept.
"""

from __future__ import annotations

from collections.abc import Iterable
from typing import TYPE_CHECKING

import torch

if TYPE_CHECKING:
    from verl.models.optim import Rounded

SAMPLE = 4096  # elements of each tensor on each rank, evenly spaced


class VisibleUpdate:
    """Movement since the start of the run: construct it when the model is loaded, before a checkpoint is."""

    def __init__(self, parameters: Iterable[Rounded]):
        self._start = {p.name: (_sample(p.weights), _sample(p.master)) for p in parameters}

    def sums(self, parameters: Iterable[Rounded]) -> dict[str, torch.Tensor]:
        """Name -> [<dw, dm>, <dm, dm>] of this rank's sample, float64."""
        sums = {}
        for name, weights, master, _ in parameters:
            before = self._start[name]
            seen_change, moved = (
                _sample(now).to(master.device) - then.to(master.device)
                for now, then in zip((weights, master), before, strict=True)
            )
            sums[name] = torch.stack([seen_change.dot(moved), moved.dot(moved)])
        return sums


def ratio(sums: torch.Tensor) -> float | None:
    """<dw, dm> / <dm, dm> of `sums` over all parameters and ranks; None while nothing has moved."""
    seen_change, moved = sums.tolist()
    return seen_change / moved if moved > 0 else None


def _sample(tensor: torch.Tensor) -> torch.Tensor:
    flat = tensor.reshape(-1)
    return flat[:: max(1, -(-flat.numel() // SAMPLE) | 1)].double()  # odd: not always of the same columns
