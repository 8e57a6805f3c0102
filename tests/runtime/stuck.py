"""`actor_rollout_ref.model.external_lib=tests.runtime.stuck`: the environment's STUCK says what hangs, on the last rank."""

import os
import time

import torch.distributed as dist

from verl.checkpoint import store
from verl.roles.model import ModelRole


def sleeps_forever(*_, **__):
    time.sleep(600)


def is_last():
    return not dist.is_initialized() or dist.get_rank() == dist.get_world_size() - 1


def update(self, *arguments, _update=ModelRole.update, **more):
    return sleeps_forever() if is_last() else _update(self, *arguments, **more)


if os.environ.get("STUCK") == "update":
    update.__dict__.update(ModelRole.update.__dict__)  # what @register has noted
    ModelRole.update = update
if os.environ.get("STUCK") == "save":
    store.write_manifest = sleeps_forever
