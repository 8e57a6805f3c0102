"""One process of a run over several: its workers, the calls on them, and how new weights reach those that generate."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace
from functools import partial
from typing import Any

import torch

from verl.parallel.collectives import Collectives
from verl.parallel.device import visible_devices
from verl.parallel.mesh import Mesh
from verl.parallel.serialize import from_bytes, to_bytes
from verl.reshard.grouping import consecutive_engines
from verl.reshard.layout import RolloutLayout, TrainingLayout
from verl.reshard.update import PlannedUpdate, plan_update
from verl.runtime.build import build_workers
from verl.runtime.mode_switch import Switch
from verl.runtime.rank import Seat, engine_section

_BUCKET_BYTES = 64 << 20  # weights that travel to another process at a time


class Host:
    """The workers of `seat`. All hosts of a run are made at the same time: engines of several ranks meet while they are."""

    def __init__(self, seat: Seat, comm: Collectives):
        self.seat = seat = _with_device_names(seat, comm)
        self.comm = comm
        self.workers = build_workers(seat)
        trained = self.workers["actor"].engine if "actor" in self.workers else None
        self.switch = Switch(trained, seat.config.actor_rollout_ref.rollout, seat.device)
        self.update: PlannedUpdate | None = None  # None: there is one set of weights, or they are gathered whole
        try:
            if not seat.shares_weights and not seat.has_own_weights:
                self.update = self._plan()
        except BaseException:
            self.close()
            raise

    def call(self, role: str, method: str, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        """Run a method of one of the workers; communication that fails inside names the rank at fault."""
        with self.comm.doing(f"{role}.{method}"):
            result = getattr(self.workers[role], method)(*args, **kwargs)
            if (role, method) == ("rollout", "end_generation"):
                if self.update is not None:
                    self.update.check_held()  # before a sample trains that other weights have made
                self.switch.to_training()
            return result

    def publish(self, version: int) -> None:
        """The actor's weights become those of the samples made from now on, under `version`. Every host calls this."""
        with self.comm.doing("rollout.publish"):
            self.switch.to_generation(partial(self._hand_over, version))

    def _hand_over(self, version: int) -> None:
        weights = None
        if self.update is not None:
            self.update()
        elif not self.seat.shares_weights:
            weights = self._weights()
        if "rollout" in self.workers:
            self.workers["rollout"].publish(version, weights)
        for _ in weights or ():  # a rank that trains and does not generate has its part in the gathering
            pass

    def facts(self) -> dict[str, Any]:
        """What a run shows about itself at its start."""
        there = [self.workers[role] for role in ("actor", "rollout", "reference", "critic") if role in self.workers]
        facts = module_facts(there[0].engine, self.seat.device) if there else {}
        return facts | generation_facts(self.workers["rollout"].engine) if "rollout" in self.workers else facts

    def close(self) -> None:
        """End the children of this process."""
        for role in ("reward", "rollout"):
            if role in self.workers:
                self.workers[role].close()

    def _plan(self) -> PlannedUpdate | None:
        training, rollout = layouts(self.seat)
        actor, generating = self.workers.get("actor"), self.workers.get("rollout")
        return plan_update(
            self.comm,
            training,
            rollout,
            engine=None if actor is None else actor.engine,
            replica=None if generating is None else generating.replica,
            device=self.seat.device,
        )

    def _weights(self) -> Iterator[tuple[str, torch.Tensor]]:
        """The whole weights, tensor by tensor, on the ranks of the actor and of the rollout alike."""
        placement = self.seat.placement.devices
        if set(placement["rollout"]) <= set(placement["actor"]):
            return self.workers["actor"].engine.gather_weights() if "actor" in self.workers else iter(())
        return self._carried_weights()

    def _carried_weights(self) -> Iterator[tuple[str, torch.Tensor]]:
        """From the first rank of the actor to all processes of the run, in buckets."""
        source = self.seat.placement.devices["actor"][0]
        if "actor" not in self.workers:
            while bucket := from_bytes(self.comm.broadcast(None, source)):
                yield from bucket
            return
        bucket, size = [], 0
        for name, tensor in self.workers["actor"].engine.gather_weights():
            yield name, tensor
            bucket.append((name, tensor if self.comm.rank == source else None))
            size += tensor.numel() * tensor.element_size()
            if size >= _BUCKET_BYTES:
                self._send(bucket, source)
                bucket, size = [], 0
        if bucket:
            self._send(bucket, source)
        self._send([], source)

    def _send(self, bucket: list[tuple[str, torch.Tensor | None]], source: int) -> None:
        self.comm.broadcast(to_bytes(bucket) if self.comm.rank == source else None, source)


def _with_device_names(seat: Seat, comm: Collectives) -> Seat:
    """An engine process may span the GPUs of several ranks, each of which may see its own alone."""
    plan = seat.engine_plan
    if seat.device.type != "cuda" or plan.where != "process" or len(plan.replicas[0].ranks) == 1:
        return seat
    own = visible_devices()[seat.device.index or 0]
    return replace(seat, device_names=tuple(from_bytes(name) for name in comm.all_gather(to_bytes(own))))


def layouts(seat: Seat) -> tuple[TrainingLayout, RolloutLayout]:
    """Where the policy lies while it trains, and in the copies that generate, whose ranks divide the experts."""
    mesh, copies = seat.mesh("actor"), seat.rollout_mesh()
    experts = 1 if mesh is None else engine_section(seat.config, "actor").expert_parallel_size
    engines = consecutive_engines(copies.ranks, dict(copies.axes)["tp"])
    return (
        TrainingLayout(mesh or Mesh.flat(seat.placement.devices["actor"]), experts),
        RolloutLayout(engines, expert_groups=tuple(group for copy in engines for group in copy)),
    )


def generation_facts(engine: Any) -> dict[str, str]:
    """Whether samples are batch-invariant, and why."""
    if not hasattr(engine, "invariance"):
        return {"batch_invariant": f"no: nothing was proven about {type(engine).__name__}"}
    dtype = str(next(engine.module.parameters()).dtype).removeprefix("torch.")
    return {"batch_invariant": f"{engine.invariance()} ({dtype})"}


def module_facts(engine: Any, device: torch.device) -> dict[str, Any]:
    """Device, number format, size and threads of a run, by one of its engines."""
    module = engine.module if hasattr(engine, "module") else engine.skeleton
    return {
        "device": str(device),
        "dtype": str(next(module.parameters()).dtype).removeprefix("torch."),
        "parameters": sum(p.numel() for p in module.parameters()),
        "threads": torch.get_num_threads(),
    }
