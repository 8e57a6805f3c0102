"""Workers of the service: one process that trains and samples, or by trainer.placement a process for each, on Ray. Each holds
models by their ids, and the weights of samplers by their digests."""

from collections import OrderedDict
from collections.abc import Collection, Iterator, Sequence
from contextlib import contextmanager, suppress
from dataclasses import dataclass, replace
from typing import Any, cast

import torch

from verl.config import PPOConfig
from verl.data_proto.tokenizer import Tokenizer
from verl.engines.groups import mesh_sizes
from verl.errors import ConfigError, DeadlineError, ModelError
from verl.families import engine_facts, needs_engine
from verl.models.adapter_weights import AdapterWeights
from verl.models.load import load_tokenizer
from verl.models.optim import AdamStep
from verl.parallel.dispatch import CallPlan, GroupShape, MethodCall
from verl.parallel.mesh import Mesh
from verl.parallel.register import Registered, register
from verl.parallel.serialize import record
from verl.programs.api import ProgramSpecs
from verl.programs.ppo_roles import ppo_roles
from verl.roles.api import RoleSpecs, WorkerSpec
from verl.runtime.api import choose, open_runtime
from verl.runtime.worker_group import WorkerGroup
from verl.tinker.adapters import Adapter
from verl.tinker.open_lane import OpenLane
from verl.tinker.outside import check_outside
from verl.tinker.records import SampleOutput, SamplingRequest, TrainingOutput, TrainingRequest
from verl.tinker.workbench import Workbench

_MOST_HELD = 8  # weights of samplers between two batches

for _cls in (Adapter, AdapterWeights, AdamStep):
    record(_cls)


def _together(declared: Registered, group: GroupShape, call: MethodCall) -> CallPlan:
    """All ranks make the call, and the first one answers."""
    return CallPlan([call] * group.world_size, [0], lambda results: results[0])


def _added(declared: Registered, group: GroupShape, call: MethodCall) -> CallPlan:
    """All ranks make the call, and their outputs are added up."""
    return CallPlan([call] * group.world_size, group.mesh.collectors(), TrainingOutput.added)


_TOGETHER: dict[str, Any] = {"dispatch_mode": _together}


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

    @register(**_TOGETHER)
    def facts(self) -> BenchFacts:
        bench = self.bench
        rank = 0 if bench.engine.spec is None else bench.engine.spec.rank
        rows, ends = bench.most_rows, tuple(bench.eos_token_ids)
        return BenchFacts(bench.vocabulary, bench.longest, bench.architecture, rank, rows, ends)

    @register(**_TOGETHER)
    def create(self, model_id: str, rank: int, seed: int, parts: Collection[str]) -> int:
        """Make a new model; returns its optimizer steps, 0."""
        engine = self.bench.engine
        self.adapters[model_id] = engine.held(engine.new_adapter(rank, seed, parts))
        return 0

    @register(**_TOGETHER)
    def put(self, model_id: str, adapter: Adapter) -> int:
        """Let a model be `adapter`; returns its optimizer steps."""
        self.adapters[model_id] = self.bench.engine.held(adapter)
        return adapter.num_steps

    @register(**_TOGETHER)
    def taken(self, model_id: str) -> Adapter:
        """Forget a model: its adapter on the host, with its gradients."""
        adapter = self.bench.engine.whole(self._adapter(model_id))
        del self.adapters[model_id]
        return adapter.to(torch.device("cpu"))

    @register(**_TOGETHER)
    def state(self, model_id: str, *, optimizer: bool) -> Adapter:
        """A model without its gradients, to be read before it trains on; `optimizer` says whether with its slots."""
        held = self._adapter(model_id)
        adapter = self.bench.engine.whole(replace(held, gradients={}, slots=held.slots if optimizer else {}))
        return Adapter(adapter.weights, adapter.num_steps, adapter.slots)

    @register(**_TOGETHER)
    def discard(self, model_id: str) -> None:
        """Forget the gradients of a model, if it exists."""
        if model_id in self.adapters:
            self.adapters[model_id].discard()

    @register(**_TOGETHER, blocking=False)
    def drop(self, model_id: str) -> None:
        """Forget a model, after the call that computes now."""
        self.adapters.pop(model_id, None)

    @register(dispatch_mode=_added)
    def forward_backward(self, request: TrainingRequest) -> TrainingOutput:
        return self.bench.forward_backward(self._adapter(request.model_id), request)

    @register(**_TOGETHER)
    def optim_step(self, model_id: str, values: AdamStep) -> dict[str, float]:
        return self.bench.optim_step(self._adapter(model_id), values)

    @register(**_TOGETHER)
    def missing(self, digests: Sequence[str]) -> list[str]:
        """The digests of weights that `sample` needs to be given."""
        return [digest for digest in digests if digest not in self._held]

    @register(**_TOGETHER)
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
        except BaseException as error:
            for failed in [self._lanes[key] for key in self._lanes if key[0] == lane]:
                with suppress(Exception):  # what went wrong first is raised
                    failed.close()
            self._lanes = {key: one for key, one in self._lanes.items() if key[0] != lane}
            if isinstance(error, DeadlineError):  # of a server that samples, and not of a process here
                raise ModelError(str(error)) from error
            raise
        self._lanes = {key: one for key, one in self._lanes.items() if not one.is_empty}
        while len(self._held) > (_MOST_HELD if self.bench.engine.spec is not None else 1):
            self._held.popitem(last=False)
        return ended

    @register(**_TOGETHER)
    def abort(self, lane: int, numbers: Collection[int]) -> None:
        """Let requests leave a lane before they have ended."""
        for one in [self._lanes[key] for key in self._lanes if key[0] == lane]:
            one.drop(numbers)
        self._lanes = {key: one for key, one in self._lanes.items() if not one.is_empty}

    def _adapter(self, model_id: str) -> Adapter:
        if model_id not in self.adapters:
            raise ModelError(f"The model {model_id} has ended with its session.")
        return self.adapters[model_id]


class ServiceRoles:
    """The roles of a service, on the devices of a run's actor and rollout."""

    @classmethod
    def roles(cls, config: PPOConfig, *, train: bool = True) -> RoleSpecs:
        def build(device: torch.device, mesh: Mesh | None) -> BenchWorker:
            return BenchWorker(Workbench(config, device, mesh))

        engine = config.actor_rollout_ref.actor.fsdp_config
        workers = (WorkerSpec("actor", BenchWorker, build, engine), WorkerSpec("rollout", BenchWorker, build))
        return replace(ppo_roles(config, train=False), rollout=None, reward=None, workers=workers)


@dataclass(frozen=True)
class Bench:
    """Handles of the worker that trains, on one or several ranks, and of each one that samples, and the tokenizer. It is one
    worker, unless they are `is_apart`."""

    training: BenchWorker
    samplers: Sequence[BenchWorker]
    facts: BenchFacts
    tokenizer: Tokenizer
    is_apart: bool


def check_service(config: PPOConfig) -> None:
    """Raise ConfigError for an engine or a placement that the service cannot have."""
    name, source = config.actor_rollout_ref.rollout.name, ProgramSpecs(ServiceRoles, config)
    if not engine_facts(name).samples_adapters:
        raise ConfigError(f"{needs_engine('The service', 'samples_adapters')}, not {name}. Leave out rollout.name.")
    if engine_facts(name).asks_service:
        check_outside(config)
    specs = source.specs()
    if choose(specs) == "spmd":
        raise ConfigError(
            "The service is one process, which starts others by trainer.placement. Run it without torchrun."
        )
    devices, actor = specs.place(None).devices, config.actor_rollout_ref.actor
    training, sampling = devices["actor"], devices["rollout"]
    if len(training) == 1:
        return
    if set(training) & set(sampling):
        raise ConfigError(
            f"The service trains on {len(training)} devices, each with a part of the model, and samples on devices with all of "
            "it. Set trainer.placement={actor:[0,1],rollout:[2]}, or leave it out."
        )
    sizes = mesh_sizes(actor.fsdp_config, len(training))
    if actor.strategy not in ("fsdp", "fsdp2") or sizes["sequence_parallel"] * sizes["tensor_parallel"] > 1:
        raise ConfigError(
            "The service divides a model that trains by FSDP2. Leave out actor.strategy, and tensor_parallel_size and "
            "ulysses_sequence_parallel_size of actor.fsdp_config."
        )


@contextmanager
def open_bench(config: PPOConfig) -> Iterator[Bench]:
    """The workers of a service in their processes; these end on leaving."""
    with open_runtime(ProgramSpecs(ServiceRoles, config)) as runtime:
        roles = runtime.build_roles(total_steps=1, data_sources=[])
        training = cast(BenchWorker, roles.workers["actor"])
        samplers = cast("list[BenchWorker]", cast(WorkerGroup, roles.workers["rollout"]).members())
        tokenizer = load_tokenizer(config.actor_rollout_ref.model)
        yield Bench(training, samplers, training.facts(), tokenizer, roles.num_devices > 1)
