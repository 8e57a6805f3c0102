"""An engine for tests, on the CPU."""

import torch

from verl.config import FSDPConfig, ModelConfig, OptimConfig
from verl.engines.local import LocalEngine


def make_engine(
    path, cls=LocalEngine, *, dtype="float32", model=None, engine=None, optim=None, trainable=True, **settings
):
    """`model`, `engine` and `optim` are values of their sections; other settings are arguments of `cls`."""
    return cls(
        model=ModelConfig(path=str(path), **(model or {})),
        engine=FSDPConfig(dtype=dtype, **(engine or {})),
        optim=OptimConfig(**{"lr": 1e-2, **(optim or {})}) if trainable else None,
        **{"head": "lm", "device": torch.device("cpu"), "total_steps": 10, **settings},
    )
