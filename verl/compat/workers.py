"""Worker classes that scripts map to roles: `verl.workers.fsdp_workers`, `verl.workers.megatron_workers`, `verl.workers.roles`.

`RayPPOTrainer` takes them as names of roles. The engines of a run compute, so that these classes hold no model.
"""

from __future__ import annotations

from verl.errors import ConfigError
from verl.runtime.user_worker import Worker

WORKERS = (
    "Engines compute here, not worker classes: a subclass of an FSDP or Megatron worker has no part of a run to replace. Name "
    "its loss by register_policy_loss, its model by model.external_lib, or write an engine: CONTRIBUTING.md."
)


class ActorRolloutRefWorker(Worker):
    """The policy, its sampler and its reference. Making one raises ConfigError; `verl.worker` has a class for own loops."""

    def __init__(self, *_: object, **__: object):
        raise ConfigError(f"{type(self).__name__} stands for a role of a run and cannot be made. {WORKERS}")


class AsyncActorRolloutRefWorker(ActorRolloutRefWorker):
    """The same with an asynchronous sampler."""


class CriticWorker(ActorRolloutRefWorker):
    """The value model."""


class RewardModelWorker(ActorRolloutRefWorker):
    """The reward model."""
