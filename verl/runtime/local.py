"""Runtimes without a driver: every role in this process, so that a breakpoint works anywhere; or equal ranks under torchrun."""

import torch

from verl.data_proto.future import Finished
from verl.parallel.collectives import Collectives, Peer
from verl.parallel.device import make_current, resolve_device
from verl.parallel.dispatch import CallPlan
from verl.parallel.serialize import from_bytes, to_bytes
from verl.roles.api import Roles, SpecSource, Value
from verl.runtime.rank import RankContext, check_meshes, set_queues
from verl.runtime.rank_workers import RankWorkers
from verl.runtime.role_groups import make_groups
from verl.runtime.worker_group import WorkerGroup


class LocalRuntime:
    """See verl.runtime.api.Runtime. After `build_roles`, `workers` holds the workers of the roles."""

    name = "local"
    rank = 0
    is_rank_zero = True

    def __init__(self, source: SpecSource):
        self.source = source
        self.workers: RankWorkers | None = None
        specs = source.specs()
        check_meshes(specs, specs.place(1), self.rank)

    def build_roles(self, *, total_steps: int, data_sources: list[str], train: bool = True) -> Roles:
        """See Runtime. The rollout engine generates with the trained module itself: there is one copy of the weights."""
        specs = self.source.specs(train=train)
        device = resolve_device(specs.run.device)
        context = RankContext(specs, specs.place(1), 0, device, total_steps, data_sources)
        workers = self.workers = RankWorkers(context, None)
        return make_groups(context, self._run, workers.facts(), workers.weights, self.close)

    def any(self, flag: bool) -> bool:
        return flag

    def broadcast(self, value: Value, /) -> Value:
        return value

    def close(self) -> None:
        if self.workers is not None:
            self.workers.close()

    def _run(self, group: WorkerGroup, method: str, plan: CallPlan, blocking: bool) -> object:
        call = plan.calls[0]
        assert self.workers is not None
        assert call is not None
        value = plan.collect([self.workers.call(group.name, method, *call)])
        return value if blocking else Finished(value)


class SpmdRuntime:
    """See verl.runtime.api.Runtime."""

    name = "spmd"

    def __init__(self, source: SpecSource, peer: Peer):
        self.source = source
        self.rank = peer.rank
        self.is_rank_zero = peer.rank == 0
        specs = source.specs()
        self.placement = specs.place(peer.world_size)
        check_meshes(specs, self.placement, self.rank)
        self.device = local_device(specs.run.device, peer.local_rank)
        set_queues(specs, peer.world_size)
        make_current(self.device)
        self.comm = Collectives.start(
            peer,
            device_type=self.device.type,
            timeout_s=specs.run.collective_timeout_s,
            start_timeout_s=specs.run.start_timeout_s,
            call_timeout_s=max(specs.run.collective_timeout_s, specs.run.call_timeout_s),
        )
        self._workers: RankWorkers | None = None

    def build_roles(self, *, total_steps: int, data_sources: list[str], train: bool = True) -> Roles:
        specs = self.source.specs(train=train)
        context = RankContext(specs, self.placement, self.rank, self.device, total_steps, data_sources)
        with self.comm.doing("building the roles"):
            workers = self._workers = RankWorkers(context, self.comm)
            facts = from_bytes(self.comm.all_gather(to_bytes(workers.facts()))[0])
        return make_groups(context, self._run, facts, workers.weights, self._end)

    def any(self, flag: bool) -> bool:
        with self.comm.doing("agreeing whether to stop"):
            return self.comm.any(flag)

    def broadcast(self, value: Value, /) -> Value:
        with self.comm.doing("receiving a decision of rank 0"):
            received: Value = from_bytes(self.comm.broadcast(to_bytes(value) if self.is_rank_zero else None, 0))
        return received

    def close(self) -> None:
        self._end()
        self.comm.close()

    def _end(self) -> None:
        if self._workers is not None:
            self._workers.close()

    def _run(self, group: WorkerGroup, method: str, plan: CallPlan, blocking: bool) -> object:
        """This rank's part of a call, and the results of all ranks."""
        workers, ranks, payload = self._workers, group.mesh.ranks, b""
        assert workers is not None
        if self.rank in ranks:
            index = ranks.index(self.rank)
            call = plan.calls[index]
            if call is not None:
                result = workers.call(group.name, method, *call)
                payload = to_bytes(result) if index in plan.answering else b""
        with self.comm.doing(f"{group.name}.{method}: results"):
            parts = self.comm.all_gather(payload)
        value = plan.collect([from_bytes(parts[ranks[index]]) for index in plan.answering])
        return value if blocking else Finished(value)


def local_device(name: str, local_rank: int) -> torch.device:
    """The device of process `local_rank` of a node; `name` as in trainer.device."""
    device = resolve_device(name)
    return resolve_device(f"cuda:{local_rank}") if device.type == "cuda" else device
