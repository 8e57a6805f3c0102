"""DeepSpeed itself: imported once, for the device of the run, and started over a model."""

from __future__ import annotations

import importlib
import logging
import os
from collections.abc import Mapping
from types import ModuleType
from typing import cast

import torch
import torch.distributed as dist

from verl.engines.api import require_library


def load_deepspeed(device: torch.device) -> ModuleType:
    """The package, imported for the kind of `device`: it decides on a kind when it is first imported."""
    require_library("deepspeed")
    if device.type == "cpu":
        os.environ.setdefault("DS_ACCELERATOR", "cpu")
    os.environ.setdefault("LOCAL_RANK", str(device.index or 0))
    import deepspeed

    if device.type == "cpu":
        # `from deepspeed.comm import torch` is PyTorch
        backend = importlib.import_module("deepspeed.comm.torch")
        # A faster all-reduce in shared memory. It is compiled for minutes at the first start, with ninja. It waits without
        # limit for the lock of a build that was killed. gloo sums here.
        vars(backend)["build_shm_op"] = lambda: None
    logging.getLogger("DeepSpeed").setLevel(logging.WARNING)
    return cast("ModuleType", deepspeed)


def start_deepspeed(model: object, optimizer: object, config: Mapping[str, object], device: torch.device) -> object:
    """DeepSpeed's engine around `model`. `optimizer` None: only computes."""
    deepspeed = load_deepspeed(device)
    _forget_groups()
    deepspeed.init_distributed(dist_init_required=False, verbose=False)
    engine, *_ = deepspeed.initialize(model=model, optimizer=optimizer, config=dict(config), dist_init_required=False)
    return engine


def combined_norm(norms: list[torch.Tensor]) -> torch.Tensor:
    """The norm of all groups of parameters; infinite if one is not finite."""
    from deepspeed.runtime.utils import combine_grad_norm_groups

    return cast("torch.Tensor", combine_grad_norm_groups(norms))


def _forget_groups() -> None:
    """DeepSpeed keeps process groups for as long as the process lives, but a later run in it has new ones."""
    from deepspeed.comm import comm
    from deepspeed.utils import groups

    if _world and _world[0] is not dist.group.WORLD:
        importlib.reload(groups)
        comm.cdb = None
    _world[:] = [dist.group.WORLD]


_world: list[object] = []  # the default group at the time when DeepSpeed made its groups
