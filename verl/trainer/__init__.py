"""The programs. `DynamicConfigScheduler` is resolved on first use, so that importing this is cheap."""

from __future__ import annotations

from typing import Any

__all__ = ["DynamicConfigScheduler"]


def __getattr__(name: str) -> Any:
    if name in __all__:
        import importlib

        return getattr(importlib.import_module("verl.trainer.phases"), name)
    raise AttributeError(f"module 'verl.trainer' has no attribute {name!r}")
