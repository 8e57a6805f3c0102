"""Products of operands in fp8 (e4m3) with a scale for each row of both: for a token, and for an output.

`fp8_rows` is one kernel by Triton. The product is torch's `_scaled_mm`: its sums are float32, and are rounded once.
"""

import torch

from verl.models.ops.table import op
from verl.models.quantized import levels


@op(triton="fp8:launch_fp8_rows")
def fp8_rows(x: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """The levels of `x` [rows, columns] in e4m3, and the scales of its rows, float32 [rows, 1]; see
    verl.models.quantized.levels."""
    return levels(x, "fp8")


class Fp8Weight:
    """A copy of `weight` [outputs, inputs] in fp8 at fixed addresses, for CUDA graphs. A call multiplies `x` [tokens, inputs]
    by it, rounded to the dtype of `x`."""

    def __init__(self, weight: torch.Tensor, bias: torch.Tensor | None):
        self._weight, self._bias = weight, bias
        self._level, self._scale = fp8_rows(weight)

    @property
    def num_bytes(self) -> int:
        """Memory of the copy."""
        return self._level.nbytes + self._scale.nbytes

    def refresh(self) -> None:
        """Round the present values of the weight."""
        for held, present in zip((self._level, self._scale), fp8_rows(self._weight), strict=True):
            held.copy_(present)

    def __call__(self, x: torch.Tensor) -> torch.Tensor:
        level, scale = fp8_rows(x)
        y = torch._scaled_mm(level, self._level.t(), scale_a=scale, scale_b=self._scale.t(), out_dtype=x.dtype)
        return y if self._bias is None else y.add_(self._bias)
