"""The spmd runtime: every rank runs the whole program (`torchrun --nproc_per_node=N ... verl train ...`).

Each rank holds the small batch of a step whole, takes its share of every call, and gets the results of all, so that all ranks
go the same way through the program. Only rank 0 writes.
"""

from __future__ import annotations

from typing import Any

from verl.config import VerlConfig
from verl.parallel.collectives import Collectives, Peer
from verl.parallel.device import make_current, resolve_device
from verl.parallel.dispatch import Plan
from verl.parallel.placement import Placement
from verl.parallel.serialize import from_bytes, to_bytes
from verl.runtime.rank import Seat, check_meshes
from verl.runtime.rank_workers import Host
from verl.runtime.role_groups import make_groups
from verl.runtime.roles import Roles
from verl.runtime.worker_group import WorkerGroup


class SpmdRuntime:
    """See verl.runtime.api.Runtime."""

    name = "spmd"

    def __init__(self, config: VerlConfig, peer: Peer):
        self.config = config
        self.rank = peer.rank
        self.leads = peer.rank == 0
        self.placement = Placement.of(config, peer.world_size)
        check_meshes(config, self.placement)
        self.device = local_device(config, peer.local_rank)
        make_current(self.device)
        timeout_s = config.actor_rollout_ref.nccl_timeout
        self.comm = Collectives.start(
            peer,
            device_type=self.device.type,
            timeout_s=timeout_s,
            start_timeout_s=config.trainer.ray_wait_register_center_timeout,
            call_timeout_s=max(timeout_s, config.trainer.call_timeout_s),
        )
        self._host: Host | None = None

    def build_roles(self, *, total_steps: int, data_sources: list[str], train: bool = True) -> Roles:
        seat = Seat(
            self.config, self.placement, self.rank, self.device, total_steps, data_sources, train,
            timeout_s=self.config.actor_rollout_ref.nccl_timeout,
        )  # fmt: skip
        with self.comm.doing("building the roles"):
            host = self._host = Host(seat, self.comm)
            facts = from_bytes(self.comm.all_gather(to_bytes(host.facts()))[0])
        roles = make_groups(seat, self._run, facts)
        roles.rollout.publish = host.publish
        roles.end = self._end
        return roles

    def any(self, flag: bool) -> bool:
        with self.comm.doing("agreeing whether to stop"):
            return self.comm.any(flag)

    def from_leader(self, value: Any) -> Any:
        with self.comm.doing("hearing what rank 0 has decided"):
            return from_bytes(self.comm.broadcast(to_bytes(value) if self.leads else None, 0))

    def close(self) -> None:
        self._end()
        self.comm.close()

    def _end(self) -> None:
        if self._host is not None:
            self._host.close()

    def _run(self, group: WorkerGroup, method: str, plan: Plan, blocking: bool) -> Any:
        """This rank's part of a call, and everybody's results."""
        host, ranks, payload = self._host, group.mesh.ranks, b""
        assert host is not None
        if self.rank in ranks:
            index = ranks.index(self.rank)
            call = plan.calls[index]
            if call is not None:
                result = host.call(group.name, method, *call)
                payload = to_bytes(result) if index in plan.answering else b""
        with self.comm.doing(f"{group.name}.{method}: results"):
            parts = self.comm.all_gather(payload)
        return plan.collect([from_bytes(parts[ranks[index]]) for index in plan.answering])


def local_device(config: VerlConfig, local_rank: int) -> Any:
    """The device of the process that is number `local_rank` on its machine."""
    device = resolve_device(config.trainer.device)
    return resolve_device(f"cuda:{local_rank}") if device.type == "cuda" else device
