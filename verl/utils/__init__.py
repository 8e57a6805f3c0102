"""Door: helpers that scripts import from here."""

from typing import Any

from verl.compat.tokenizers import hf_processor, hf_tokenizer
from verl.parallel.placement import set_device_map

__all__ = ["hf_processor", "hf_tokenizer", "set_device_map"]


def __getattr__(name: str) -> Any:
    if name in (
        "benchmark_nccl",
        "benchmark_throughput",
    ):  # not an AttributeError, which `from ... import` would not show
        raise ImportError(
            f"{name} is not available in this version. `verl doctor` measures this machine, and `verl show RUN` says where "
            "the time of a run goes."
        )
    raise AttributeError(f"module 'verl.utils' has no attribute {name!r}")
