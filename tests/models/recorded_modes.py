"""A record of the deterministic mode of PyTorch's operators."""

import torch
from torch.utils._python_dispatch import TorchDispatchMode

_INDEXED_WRITES = ("index_copy", "index_copy_", "index_add", "index_add_", "index_put", "index_put_", "_index_put_impl_",
                   "scatter", "scatter_", "scatter_add", "scatter_add_")  # fmt: skip


class RecordedModes(TorchDispatchMode):
    """(deterministic mode, warn_only) at every operator that runs inside."""

    def __init__(self):
        super().__init__()
        self.modes: dict[str, set[tuple[bool, bool]]] = {}

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        deterministic = torch.are_deterministic_algorithms_enabled()
        mode = (deterministic, deterministic and torch.is_deterministic_algorithms_warn_only_enabled())
        self.modes.setdefault(func.overloadpacket.__name__, set()).add(mode)
        return func(*args, **(kwargs or {}))

    def of(self, *names):
        return set().union(*(self.modes.get(name, set()) for name in names))

    def of_indexed_writes(self):
        """Modes of the indexed writes: CUDA sorts for them in deterministic mode."""
        return self.of(*_INDEXED_WRITES)
