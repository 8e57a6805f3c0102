"""Tensors of a model folder that no engine trains, and that every checkpoint has again: heads that predict further tokens,
which transformers' models leave out, and buffers, such as the biases by which routers choose experts."""

from __future__ import annotations

from functools import partial
from pathlib import Path
from typing import Any

import torch
from torch import nn

from verl.engines.api import Deferred
from verl.errors import ModelError
from verl.models.folder import fetch, opened, read_headers
from verl.models.heads import is_further_head

_DTYPES = {"F64": torch.float64, "F32": torch.float32, "BF16": torch.bfloat16, "F16": torch.float16, "I64": torch.int64}


class UntrainedTensors:
    """The tensors of the folder or hub name `source` that training `module` leaves as they are. `deferred` has them by name;
    it is empty on a rank without weight files, which writes no checkpoint."""

    def __init__(self, module: Any, source: str):
        self._config = module.config
        states = module.state_dict(keep_vars=True)
        self._buffers = {name for name, tensor in states.items() if not isinstance(tensor, nn.Parameter)}
        self.deferred: dict[str, Deferred] = {}
        try:
            folder = fetch(source, weights=False)
            headers = read_headers(folder)
        except ModelError:
            return
        for name, header in headers.items():
            if name in self and header.dtype in _DTYPES:
                build = partial(_read, folder / header.file, name)
                self.deferred[name] = Deferred(header.shape, _DTYPES[header.dtype], build, is_collective=False)

    def __contains__(self, name: str) -> bool:
        return name in self._buffers or is_further_head(name, self._config)


def _read(file: Path, name: str) -> torch.Tensor:
    with opened(file) as tensors:
        tensor: torch.Tensor = tensors.get_tensor(name)
        return tensor
