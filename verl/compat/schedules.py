"""Learning-rate schedules as torch's LambdaLR, for recipes with optimizers of their own; runs use verl.models.optim."""

from __future__ import annotations

import math

from torch.optim import Optimizer
from torch.optim.lr_scheduler import LambdaLR


def get_cosine_schedule_with_warmup(
    optimizer: Optimizer,
    num_warmup_steps: int,
    num_training_steps: int,
    min_lr_ratio: float = 0.0,
    num_cycles: float = 0.5,
    last_epoch: int = -1,
    init_lr_ratio: float | None = None,
) -> LambdaLR:
    """Linear warm-up from `init_lr_ratio` (default: `min_lr_ratio`) to 1, then max(min, cos(2 pi num_cycles p)
    (1 - min) / 2 + (1 + min) / 2), with p the share of the steps after the warm-up that are done."""
    least = 0.0 if min_lr_ratio is None else min_lr_ratio
    first = least if init_lr_ratio is None else init_lr_ratio

    def factor(step: int) -> float:
        if step < num_warmup_steps:
            return first + (1 - first) * step / max(1, num_warmup_steps)
        progress = (step - num_warmup_steps) / max(1, num_training_steps - num_warmup_steps)
        return max(least, math.cos(2 * math.pi * num_cycles * progress) * (1 - least) / 2 + (1 + least) / 2)

    return LambdaLR(optimizer, factor, last_epoch)


def get_constant_schedule_with_warmup(optimizer: Optimizer, num_warmup_steps: int, last_epoch: int = -1) -> LambdaLR:
    """Linear warm-up from 0 to 1, then 1."""
    return LambdaLR(optimizer, lambda step: min(1.0, step / max(1, num_warmup_steps)), last_epoch)
