"""The programs. `DynamicConfigScheduler` is resolved on first use, so that importing this is cheap."""

from __future__ import annotations

from typing import Any

__all__ = ["DynamicConfigScheduler"]


def __getattr__(name: str) -> Any:
    if name in __all__:
        import importlib

        return getattr(importlib.import_module("verl.run.schedule"), name)
    if name in ("PPOTrainer", "RLTrainer", "RLRunner"):  # not an AttributeError, which `from ... import` would not show
        raise ImportError(
            f"{name} is not available in this version. Train with `verl train key=value ...`, or from Python with "
            "verl.cli.main.main(['train', 'key=value', ...]); examples/01_first_grpo_run.py does."
        )
    raise AttributeError(f"module 'verl.trainer' has no attribute {name!r}")
