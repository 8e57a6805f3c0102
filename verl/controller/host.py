"""One process of a run over several: its workers, the calls on them, and how new weights reach those that generate."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import torch

from verl.controller.build import Seat, build_workers
from verl.parallel.collectives import Collectives
from verl.parallel.wire import from_bytes, to_bytes

_BUCKET_BYTES = 64 << 20  # weights that travel to another process at a time


class Host:
    """The workers of `seat`. All hosts of a run are made at the same time: engines of several ranks meet while they are."""

    def __init__(self, seat: Seat, comm: Collectives):
        self.seat = seat
        self.comm = comm
        self.workers = build_workers(seat)

    def call(self, role: str, method: str, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        """Run a method of one of the workers; communication that fails inside names the rank at fault."""
        with self.comm.doing(f"{role}.{method}"):
            return getattr(self.workers[role], method)(*args, **kwargs)

    def publish(self, version: int) -> None:
        """The actor's weights become those of the samples made from now on, under `version`. Every host calls this."""
        with self.comm.doing("rollout.publish"):
            weights = None if self.seat.shares_weights else self._weights()
            if "rollout" in self.workers:
                self.workers["rollout"].publish(version, weights)
            for _ in weights or ():  # a rank that trains and does not generate has its part in the gathering
                pass

    def facts(self) -> dict[str, Any]:
        """What a run shows about itself at its start."""
        for role in ("actor", "rollout", "reference", "critic"):
            worker = self.workers.get(role)
            if worker is not None:
                return module_facts(worker.engine.module, self.seat.device)
        return {}

    def close(self) -> None:
        """End the children of this process."""
        if "reward" in self.workers:
            self.workers["reward"].close()

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


def module_facts(module: torch.nn.Module, device: torch.device) -> dict[str, Any]:
    """Device, number format, size and threads of a run."""
    return {
        "device": str(device),
        "dtype": str(next(module.parameters()).dtype).removeprefix("torch."),
        "parameters": sum(p.numel() for p in module.parameters()),
        "threads": torch.get_num_threads(),
    }
