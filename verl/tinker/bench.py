"""The workers of the service: one that trains and samples, or by trainer.placement a process for each, on Ray."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, replace
from typing import cast

import torch

from verl.config import PPOConfig
from verl.data_proto.tokenizer import Tokenizer
from verl.errors import ConfigError
from verl.models.load import load_tokenizer
from verl.programs.api import ProgramSpecs
from verl.programs.ppo_roles import ppo_roles
from verl.roles.api import RoleSpecs, WorkerSpec
from verl.runtime.api import choose, open_runtime
from verl.tinker.workbench import Workbench
from verl.tinker.worker import BenchFacts, BenchWorker


class ServiceRoles:
    """The roles of a service, on the devices of a run's actor and rollout."""

    @classmethod
    def roles(cls, config: PPOConfig, *, train: bool = True) -> RoleSpecs:
        """See DeclaresRoles."""

        def build(device: torch.device) -> BenchWorker:
            return BenchWorker(Workbench(config, device))

        workers = tuple(WorkerSpec(name, BenchWorker, build) for name in ("actor", "rollout"))
        return replace(ppo_roles(config, train=False), rollout=None, reward=None, workers=workers)


@dataclass(frozen=True)
class Bench:
    """Handles of the workers that train and that sample, which are `is_apart` or one, and the tokenizer."""

    training: BenchWorker
    sampling: BenchWorker
    facts: BenchFacts
    tokenizer: Tokenizer
    is_apart: bool


@contextmanager
def open_bench(config: PPOConfig) -> Iterator[Bench]:
    """The workers of a service in their processes, which end on leaving. Raises ConfigError for a placement that the service
    cannot have."""
    name, source = config.actor_rollout_ref.rollout.name, ProgramSpecs(ServiceRoles, config)
    if name != "native":
        raise ConfigError(
            f"The service samples by the native engine, and LoRA of {name} is not available. Leave out rollout.name."
        )
    specs = source.specs()
    if choose(specs) == "spmd":
        raise ConfigError(
            "The service is one process, which starts others by trainer.placement. Run it without torchrun."
        )
    devices = specs.place(None).devices
    for role in ("actor", "rollout"):
        if len(devices[role]) > 1:
            raise ConfigError(
                f"The service has one process that trains and one that samples, and {role} is on {len(devices[role])} "
                "devices. Set trainer.placement={actor:[0],rollout:[1]}, or leave it out."
            )
    with open_runtime(source) as runtime:
        roles = runtime.build_roles(total_steps=1, data_sources=[])
        training, sampling = (cast(BenchWorker, roles.workers[name]) for name in ("actor", "rollout"))
        tokenizer = load_tokenizer(config.actor_rollout_ref.model)
        yield Bench(training, sampling, training.facts(), tokenizer, roles.num_devices > 1)
