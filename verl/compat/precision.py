"""`verl.utils.torch_dtypes.PrecisionType`: the spellings of number formats."""

from __future__ import annotations

from typing import Any

import torch

HALF_LIST: list[Any] = [16, "16", "fp16", "float16", torch.float16]
FLOAT_LIST: list[Any] = [32, "32", "fp32", "float32", torch.float32]
BFLOAT_LIST: list[Any] = ["bf16", "bfloat16", torch.bfloat16]


class PrecisionType:
    """Names of number formats as constants, and the torch dtype of each spelling."""

    HALF = "16"
    FLOAT = "32"
    FULL = "64"
    BFLOAT = "bf16"
    MIXED = "mixed"

    @staticmethod
    def supported_type(precision: Any) -> bool:
        """Whether `precision` is one of the constants."""
        return precision in (
            PrecisionType.HALF, PrecisionType.FLOAT, PrecisionType.FULL, PrecisionType.BFLOAT, PrecisionType.MIXED,
        )  # fmt: skip

    @staticmethod
    def supported_types() -> list[str]:
        """The constants."""
        return [
            PrecisionType.HALF, PrecisionType.FLOAT, PrecisionType.FULL, PrecisionType.BFLOAT, PrecisionType.MIXED,
        ]  # fmt: skip

    @staticmethod
    def is_fp16(precision: Any) -> bool:
        """Whether it spells float16."""
        return precision in HALF_LIST

    @staticmethod
    def is_fp32(precision: Any) -> bool:
        """Whether it spells float32."""
        return precision in FLOAT_LIST

    @staticmethod
    def is_bf16(precision: Any) -> bool:
        """Whether it spells bfloat16."""
        return precision in BFLOAT_LIST

    @staticmethod
    def to_dtype(precision: Any) -> torch.dtype:
        """The torch dtype of a spelling: 16, "fp16", "bf16", "float32", a dtype, ... Raises RuntimeError for another."""
        for spellings in (HALF_LIST, FLOAT_LIST, BFLOAT_LIST):
            if precision in spellings:
                return spellings[-1]
        raise RuntimeError(f"{precision!r} is not a precision; write fp32, bf16 or fp16.")

    @staticmethod
    def to_str(precision: torch.dtype) -> str:
        """ "fp16", "fp32" or "bf16". Raises RuntimeError for another dtype."""
        for name, dtype in (("fp16", torch.float16), ("fp32", torch.float32), ("bf16", torch.bfloat16)):
            if precision == dtype:
                return name
        raise RuntimeError(f"{precision!r} has no name here; there are float32, bfloat16 and float16.")
