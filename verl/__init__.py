"""verl: reinforcement-learning post-training for large language models.

`import verl` imports neither torch nor Ray: the names below are resolved on first use, and import paths of other releases
are made on import (verl/compat/finder.py). It also sets how torch's threads wait, if torch is imported afterwards
(verl/parallel/openmp.py).
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from verl._version import __version__
from verl.compat.finder import install
from verl.parallel.process_settings import spin_briefly

if TYPE_CHECKING:
    from verl.compat.runner import RLRunner
    from verl.data_proto.proto import DataProto, DataProtoItem
    from verl.parallel.placement import DataParallelConfig
    from verl.runtime.dataflow import Controller

install()
spin_briefly()  # torch reads the setting when it is imported

_LAZY = {
    "Controller": "verl.runtime.dataflow",
    "DataParallelConfig": "verl.parallel.placement",
    "DataProto": "verl.data_proto.proto",
    "DataProtoItem": "verl.data_proto.proto",
    "RLRunner": "verl.compat.runner",
}

__all__ = ["Controller", "DataParallelConfig", "DataProto", "DataProtoItem", "RLRunner", "__version__"]


def __getattr__(name: str) -> Any:
    if name in _LAZY:
        import importlib

        return getattr(importlib.import_module(_LAZY[name]), name)
    raise AttributeError(f"module 'verl' has no attribute {name!r}")
