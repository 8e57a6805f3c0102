"""Door: helpers that scripts import from here."""

from typing import Any

from verl.parallel.placement import set_device_map

__all__ = ["hf_tokenizer", "set_device_map"]


def hf_tokenizer(name_or_path: str, trust_remote_code: bool = False, **_other: Any) -> Any:
    """The tokenizer of a folder or hub name, with a pad token. Raises ModelError."""
    from verl.config import ModelConfig
    from verl.models.load import load_tokenizer

    return load_tokenizer(ModelConfig(path=name_or_path, trust_remote_code=trust_remote_code))


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
