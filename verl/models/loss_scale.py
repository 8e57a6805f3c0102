"""The loss scale of float16, with numbers up to 65504 and a smallest step of 6e-8 (Micikevicius et al. 2017,
arXiv:1710.03740, section 3.2)."""

from __future__ import annotations

import math
from dataclasses import dataclass

import torch

_INTERVAL = 400  # optimizer steps between two doublings, as in the existing verl


@dataclass
class LossScale:
    """Factor of the loss before the backward pass. The sums of gradients are divided by it before the optimizer step.

    A step with gradients that overflow is skipped and halves the factor; 400 steps in a row without an overflow double it. It
    stays a power of two, so that multiplying and dividing round nothing.
    """

    value: float = 2.0**16
    num_steps: int = 0  # taken since the factor changed

    @classmethod
    def of(cls, dtype: torch.dtype) -> LossScale | None:
        """The loss scale of a model that computes in `dtype`; None for all dtypes but float16."""
        return cls() if dtype == torch.float16 else None

    def overflows(self, grad_norm: float) -> bool:
        """Whether the gradients overflow because of the factor; at 1 the cause is another one."""
        return not math.isfinite(grad_norm) and self.value > 1.0

    def update(self, grad_norm: float) -> None:
        """Adapt the factor to a step that was taken or has overflowed."""
        if not math.isfinite(grad_norm):
            self.value, self.num_steps = max(1.0, self.value / 2), 0
        elif self.num_steps + 1 == _INTERVAL:
            self.value, self.num_steps = self.value * 2, 0
        else:
            self.num_steps += 1
