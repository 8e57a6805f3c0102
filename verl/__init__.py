"""verl: reinforcement-learning post-training for large language models.

Importing this package is cheap on purpose (no torch, no Ray): the names below are resolved on first use. Imported before
torch, it also sets how torch's threads wait (verl.parallel.openmp).
"""

from __future__ import annotations

from typing import Any

from verl._version import __version__
from verl.parallel.openmp import spin_briefly

spin_briefly()  # torch, once imported, has read its setting

_LAZY = {
    "DataParallelConfig": "verl.parallel.placement",
    "DataProto": "verl.data_proto.proto",
    "DataProtoItem": "verl.data_proto.proto",
}

__all__ = ["DataParallelConfig", "DataProto", "DataProtoItem", "__version__"]


def __getattr__(name: str) -> Any:
    if name in _LAZY:
        import importlib

        return getattr(importlib.import_module(_LAZY[name]), name)
    raise AttributeError(f"module 'verl' has no attribute {name!r}")
