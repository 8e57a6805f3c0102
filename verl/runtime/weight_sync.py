"""New weights for the rollout of one rank: the transfer from the ranks that train, and the switch to generation and back.

sync(version)       weights reach the rollout: they are its own already, or a transfer plan runs, or they are gathered whole
end_generation()    the rollout keeps the weights that it was sent; the rank returns to the state that training left
"""

from __future__ import annotations

import logging
import math
from collections.abc import Iterator
from contextlib import AbstractContextManager, nullcontext

import torch

from verl.engines.api import TrainEngine
from verl.parallel.collectives import Collectives
from verl.parallel.serialize import from_bytes, to_bytes
from verl.reshard.grouping import consecutive_engines
from verl.reshard.layout import RolloutLayout, TrainingLayout
from verl.reshard.update import PlannedUpdate, plan_update
from verl.roles.rollout import RolloutWorker
from verl.rollout.api import Weights
from verl.runtime.mode_switch import ModeSwitch
from verl.runtime.rank import POLICY, RankContext
from verl.runtime.switch_memory import SwitchMemory

log = logging.getLogger(__name__)

_BUCKET_BYTES = 64 << 20  # weights that travel to another process at a time


class RankWeightSync:
    """The WeightSync of one rank; all ranks of a run call `sync` together. `engine` trains the policy on this rank, None where
    another rank does. `comm` is None in a run of one process."""

    def __init__(self, context: RankContext, comm: Collectives | None, engine: TrainEngine | None):
        self.context = context
        self.comm = comm
        self.engine = engine
        self.switch = ModeSwitch(engine, context.rollout.section, context.device, gives_back=context.has_own_weights)
        self.rollout: RolloutWorker | None = None
        self.memory: SwitchMemory | None = None  # None: nothing is copied
        self.update: PlannedUpdate | None = None  # None: there is one set of weights, or they are gathered whole

    def connect(self, rollout: RolloutWorker | None) -> None:
        """The rollout of this rank, None where it has none. Plans the transfer, with all ranks."""
        self.rollout = rollout
        context = self.context
        if self.comm is not None and not context.shares_weights and not context.has_own_weights:
            training, layout = layouts(context)
            replica = None if rollout is None else rollout.replica
            self.update = plan_update(
                self.comm, training, layout, engine=self.engine, replica=replica, device=context.device
            )
        if not context.shares_weights:
            self.memory = SwitchMemory(context.device, self._weight_bytes())

    def sync(self, version: int, weights: Weights | None = None) -> None:
        """See WeightSync. A rank that is in no process group is given whole `weights`, by name."""
        with self._doing("weights.sync"):
            self.switch.to_generation()
            if self.context.has_own_weights:  # the transfer needs memory for them
                self.switch.free_training_memory()
            with nullcontext() if self.memory is None else self.memory.measuring():
                self._transfer(version, weights)
            self.switch.free_training_memory()

    def end_generation(self) -> dict[str, float]:
        """Generation has ended and the KV cache is freed; returns the memory of the last switch. Raises ModelError when weights
        have changed since `sync`."""
        if self.update is not None:
            self.update.check_held()  # before a sample trains that other weights have made
        self.switch.to_training()
        return {} if self.memory is None else self.memory.metrics()

    def _weight_bytes(self) -> int:
        """Bytes of the weights that this rank generates with, or of the whole model where another process does or none."""
        if self.rollout is not None and self.rollout.replica is not None:
            return sum(p.nbytes for p in self.rollout.replica.module.parameters())
        if self.engine is None:
            return 0
        layout = self.engine.weight_layout()
        return 0 if layout is None else sum(map(math.prod, layout.shapes.values())) * layout.dtype.itemsize

    def _transfer(self, version: int, weights: Weights | None) -> None:
        way = (
            "are shared" if self.context.shares_weights else "come by plan" if self.update is not None else "come whole"
        )
        log.debug("Weights of version %d %s.", version, way)
        if self.update is not None:
            self.update()
        elif not self.context.shares_weights and weights is None:
            weights = self._whole_weights()
        if self.rollout is not None:
            self.rollout.set_weights(version, weights)
        for _ in weights or ():  # a rank that trains and does not generate takes part in the gathering
            pass

    def _whole_weights(self) -> Iterator[tuple[str, torch.Tensor]]:
        """The whole weights, tensor by tensor, on the ranks of the policy and of the rollout alike."""
        placement = self.context.placement.devices
        if set(placement["rollout"]) <= set(placement[POLICY]):
            return self.engine.gather_weights() if self.engine is not None else iter(())
        return self._broadcast_weights()

    def _broadcast_weights(self) -> Iterator[tuple[str, torch.Tensor]]:
        """From the first rank of the policy to all processes of the run, in buckets."""
        source = self.context.placement.devices[POLICY][0]
        assert self.comm is not None
        if self.engine is None:
            while bucket := from_bytes(self.comm.broadcast(None, source)):
                yield from bucket
            return
        bucket, size = [], 0
        for name, tensor in self.engine.gather_weights():
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
        assert self.comm is not None
        self.comm.broadcast(to_bytes(bucket) if self.comm.rank == source else None, source)

    def _doing(self, call: str) -> AbstractContextManager[object]:
        return nullcontext() if self.comm is None else self.comm.doing(call)


def layouts(context: RankContext) -> tuple[TrainingLayout, RolloutLayout]:
    """Layouts of the policy in training, and in the rollout replicas, whose ranks divide the experts."""
    copies = context.rollout_mesh()
    engines = consecutive_engines(copies.ranks, dict(copies.axes)["tp"])
    return (
        context.training_layout(POLICY),
        RolloutLayout(engines, expert_groups=tuple(group for copy in engines for group in copy)),
    )
