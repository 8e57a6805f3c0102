"""Workers of the service: one process that trains and samples, or by trainer.placement a process for each, on Ray. Each holds
models by their ids, and the weights of samplers by their digests."""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Collection, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, replace
from typing import Any, cast

import torch

from verl.config import PPOConfig
from verl.data_proto.tokenizer import Tokenizer
from verl.errors import ConfigError, ModelError
from verl.families import engine_facts, needs_engine
from verl.models.adapter_weights import AdapterWeights
from verl.models.load import load_tokenizer
from verl.models.optim import AdamStep
from verl.parallel.register import Dispatch, Execute, register
from verl.parallel.serialize import record
from verl.programs.api import ProgramSpecs
from verl.programs.ppo_roles import ppo_roles
from verl.roles.api import RoleSpecs, WorkerSpec
from verl.runtime.api import choose, open_runtime
from verl.tinker.adapters import Adapter
from verl.tinker.open_lane import OpenLane
from verl.tinker.records import SampleOutput, SamplingRequest, TrainingOutput, TrainingRequest
from verl.tinker.workbench import Workbench

_MOST_HELD = 8  # weights of samplers between two batches

for _cls in (Adapter, AdapterWeights, AdamStep):
    record(_cls)

_ON_FIRST: dict[str, Any] = {"dispatch_mode": Dispatch.ONE_TO_ALL, "execute_mode": Execute.RANK_ZERO}


@record
@dataclass(frozen=True)
class BenchFacts:
    """The base model: the size of its vocabulary, tokens of the longest sequence, family, the largest rank of an adapter,
    samples of a tenant that decode at once, and the end-of-sequence tokens."""

    vocabulary: int
    longest: int
    architecture: str
    most_rank: int
    most_rows: int
    ends: tuple[int, ...]


class BenchWorker:
    """A workbench with the models that train on it, and the weights of samplers that were used last."""

    def __init__(self, bench: Workbench):
        self.bench = bench
        self.adapters: dict[str, Adapter] = {}
        self._held: OrderedDict[str, AdapterWeights] = OrderedDict()
        self._lanes: dict[tuple[int, str | None], OpenLane] = {}  # with the digest, if adapters do not mix

    @register(**_ON_FIRST)
    def facts(self) -> BenchFacts:
        bench = self.bench
        assert bench.engine.spec is not None
        rank, rows, ends = bench.engine.spec.rank, bench.most_rows, tuple(bench.eos_token_ids)
        return BenchFacts(bench.vocabulary, bench.longest, bench.architecture, rank, rows, ends)

    @register(**_ON_FIRST)
    def create(self, model_id: str, rank: int, seed: int, parts: Collection[str]) -> int:
        """Make a new model; returns its optimizer steps, 0."""
        self.adapters[model_id] = self.bench.engine.new_adapter(rank, seed, parts)
        return 0

    @register(**_ON_FIRST)
    def put(self, model_id: str, adapter: Adapter) -> int:
        """Let a model be `adapter`; returns its optimizer steps."""
        self.adapters[model_id] = adapter.to(self.bench.engine.device)
        return adapter.num_steps

    @register(**_ON_FIRST)
    def taken(self, model_id: str) -> Adapter:
        """Forget a model: its adapter on the host, with its gradients."""
        adapter = self._adapter(model_id)
        del self.adapters[model_id]
        return adapter.to(torch.device("cpu"))

    @register(**_ON_FIRST)
    def state(self, model_id: str, *, optimizer: bool) -> Adapter:
        """A model without its gradients, to be read before it trains on; `optimizer` says whether with its slots."""
        adapter = self._adapter(model_id)
        return Adapter(adapter.weights, adapter.num_steps, adapter.slots if optimizer else {})

    @register(**_ON_FIRST)
    def discard(self, model_id: str) -> None:
        """Forget the gradients of a model, if it exists."""
        if model_id in self.adapters:
            self.adapters[model_id].discard()

    @register(**_ON_FIRST, blocking=False)
    def drop(self, model_id: str) -> None:
        """Forget a model, after the call that computes now."""
        self.adapters.pop(model_id, None)

    @register(**_ON_FIRST)
    def forward_backward(self, request: TrainingRequest) -> TrainingOutput:
        return self.bench.forward_backward(self._adapter(request.model_id), request)

    @register(**_ON_FIRST)
    def optim_step(self, model_id: str, values: AdamStep) -> dict[str, float]:
        return self.bench.optim_step(self._adapter(model_id), values)

    @register(**_ON_FIRST)
    def missing(self, digests: Sequence[str]) -> list[str]:
        """The digests of weights that `sample` needs to be given."""
        return [digest for digest in digests if digest not in self._held]

    @register(**_ON_FIRST)
    def sample(
        self,
        lane: int,
        longest: int,
        requests: Sequence[tuple[int, str | None, SamplingRequest]],
        weights: dict[str, AdapterWeights],
        tokens: int,
    ) -> list[tuple[int, SampleOutput]]:
        """Add requests to a lane by their numbers, each under the weights of its digest (None: the base model), and let the
        lane take steps of about `tokens` tokens: the requests that have ended. A failure ends the lane. `weights` has the ones
        that are `missing` here; all stay for later calls, up to a number."""
        device, mixes = self.bench.engine.device, self.bench.mixes_adapters()
        self._held |= {digest: adapter.to(device) for digest, adapter in weights.items()}
        for used in dict.fromkeys(digest for _, digest, _ in requests if digest is not None):
            self._held.move_to_end(used)
        try:
            for number, digest, request in requests:
                key = (lane, None if mixes else digest)
                if key not in self._lanes:
                    self._lanes[key] = self.bench.open_lane(request.params, longest)
                self._lanes[key].add(number, None if digest is None else self._held[digest], request)
            opened = [self._lanes[key] for key in self._lanes if key[0] == lane]
            ended = [pair for one in opened for pair in self.bench.advance(one, tokens // len(opened))]
        except BaseException:
            self._lanes = {key: one for key, one in self._lanes.items() if key[0] != lane}
            raise
        self._lanes = {key: one for key, one in self._lanes.items() if not one.is_empty}
        while len(self._held) > _MOST_HELD:
            self._held.popitem(last=False)
        return ended

    def _adapter(self, model_id: str) -> Adapter:
        if model_id not in self.adapters:
            raise ModelError(f"The model {model_id} has ended with its session.")
        return self.adapters[model_id]


class ServiceRoles:
    """The roles of a service, on the devices of a run's actor and rollout."""

    @classmethod
    def roles(cls, config: PPOConfig, *, train: bool = True) -> RoleSpecs:
        def build(device: torch.device) -> BenchWorker:
            return BenchWorker(Workbench(config, device))

        workers = tuple(WorkerSpec(name, BenchWorker, build) for name in ("actor", "rollout"))
        return replace(ppo_roles(config, train=False), rollout=None, reward=None, workers=workers)


@dataclass(frozen=True)
class Bench:
    """Handles of the workers that train and that sample (one worker, unless they are `is_apart`), and the tokenizer."""

    training: BenchWorker
    sampling: BenchWorker
    facts: BenchFacts
    tokenizer: Tokenizer
    is_apart: bool


def check_service(config: PPOConfig) -> None:
    """Raise ConfigError for an engine or a placement that the service cannot have."""
    name, source = config.actor_rollout_ref.rollout.name, ProgramSpecs(ServiceRoles, config)
    if not engine_facts(name).samples_adapters:
        raise ConfigError(f"{needs_engine('The service', 'samples_adapters')}, not {name}. Leave out rollout.name.")
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


@contextmanager
def open_bench(config: PPOConfig) -> Iterator[Bench]:
    """The workers of a service in their processes; these end on leaving."""
    with open_runtime(ProgramSpecs(ServiceRoles, config)) as runtime:
        roles = runtime.build_roles(total_steps=1, data_sources=[])
        training, sampling = (cast(BenchWorker, roles.workers[name]) for name in ("actor", "rollout"))
        tokenizer = load_tokenizer(config.actor_rollout_ref.model)
        yield Bench(training, sampling, training.facts(), tokenizer, roles.num_devices > 1)
