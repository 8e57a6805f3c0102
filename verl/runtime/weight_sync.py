"""New weights for the rollout of one rank: its copy, the transfer from ranks that train, the switch to generation and back.

sync(version)       weights reach the rollout: they are its own already, or a transfer plan runs, or they are gathered whole
end_generation()    the rollout keeps the weights that it was sent; the rank returns to the state that training left
"""

from __future__ import annotations

import logging
import math
from collections.abc import Callable, Iterator, Sequence
from contextlib import nullcontext
from functools import partial
from itertools import count
from typing import Any

import torch
import torch.distributed as dist

from verl.config import ModelConfig, full_key
from verl.engines.api import TrainEngine
from verl.engines.loading import build_module
from verl.errors import ConfigError
from verl.models.hf_module import HFModule
from verl.models.load import load_external, meta_model
from verl.models.padded import require_packed
from verl.models.rounding import Rounding
from verl.models.vision import is_vision_model
from verl.parallel.collectives import Collectives
from verl.parallel.device import compute_dtype
from verl.parallel.engine_plan import EnginePlan
from verl.parallel.placement import Placement
from verl.parallel.serialize import from_bytes, to_bytes
from verl.reshard.device_memory import DeviceSender
from verl.reshard.grouping import consecutive_engines
from verl.reshard.layout import RolloutLayout, TrainingLayout
from verl.reshard.shared_memory import Named, SharedBuckets, bucketed
from verl.reshard.update import PlannedUpdate, plan_update
from verl.reshard.weight_files import write_folder
from verl.roles.rollout import RolloutWorker
from verl.rollout.api import Weights, WeightTransfer
from verl.rollout.rollout_model import Replica
from verl.runtime.mode_switch import ModeSwitch, SwitchMemory
from verl.runtime.rank import POLICY, RankContext
from verl.specs import RolloutSpec, RunSpec

_READER = "verl.reshard.shared_memory:read_shared_bucket"
_DEVICE_READER = "verl.reshard.device_memory:read_device_bucket"  # and of the host's memory
_FOLDER_READER = "verl.reshard.weight_files:read_folder"


def weight_transfer(
    spec: RolloutSpec,
    run: RunSpec,
    device: torch.device,
    plan: EnginePlan | None = None,
    visible_devices: tuple[str, ...] = (),
) -> WeightTransfer:
    """The transfer to an engine on `device`, in the actor's compute dtype. `plan` says how the engine spans the run's devices
    (default: a run of only this process). `visible_devices` are its process's devices, as CUDA_VISIBLE_DEVICES has them."""
    rollout = spec.section
    where = (plan or EnginePlan.of(spec, Placement.from_roles({}, 1))).where
    bucket_bytes = rollout.checkpoint_engine.update_weights_bucket_megabytes << 20
    may_come_back = (where == "process" or rollout.mode == "async") and rollout.max_engine_restarts > 0
    place = KeptBuckets(bucket_bytes).place if may_come_back else _in_turns(bucket_bytes)
    on_device = DeviceSender(device, bucket_bytes, place, keeps=may_come_back) if device.type == "cuda" else None
    return WeightTransfer(
        model=spec.model,
        device=device,
        dtype=compute_dtype(spec.dtype, device),
        write_buckets=on_device or (lambda weights: map(place, count(), bucketed(weights, bucket_bytes))),
        probe=on_device.probe if on_device else None,
        reader=_DEVICE_READER if on_device else _READER,
        write_folder=partial(write_folder, bucket_bytes=bucket_bytes),
        folder_reader=_FOLDER_READER,
        start_timeout_s=run.start_timeout_s,
        call_timeout_s=run.collective_timeout_s,
        in_process=where == "process",
        visible_devices=visible_devices,
    )


class KeptBuckets:
    """All buckets of an update at once, until the next one writes over them: an engine that was lost is sent them again."""

    def __init__(self, bucket_bytes: int):
        self._bucket_bytes = bucket_bytes
        self._buckets: list[SharedBuckets] = []

    def write(self, weights: Weights) -> Iterator[dict[str, object]]:
        """A description of each bucket, see SharedBuckets."""
        return map(self.place, count(), bucketed(weights, self._bucket_bytes))

    def place(self, index: int, some: Sequence[Named]) -> dict[str, Any]:
        """Write bucket `index` of an update over the same bucket of the last update, and describe it."""
        if index == len(self._buckets):
            self._buckets.append(SharedBuckets(self._bucket_bytes, num_segments=1))
        return self._buckets[index].write(some)


def _in_turns(bucket_bytes: int) -> Callable[[int, Sequence[Named]], dict[str, object]]:
    buckets = SharedBuckets(bucket_bytes)
    return lambda index, some: buckets.write(some)


def load_replica(spec: RolloutSpec, device: torch.device, group: dist.ProcessGroup | None) -> Replica:
    """A copy of the policy in the compute dtype, only for generation; divided over `group`, if there is one. Weights
    are rounded as in a policy that trains, and adapters are merged in."""
    place = device if group is None else torch.device("cpu")  # all of a divided model may not fit the device
    dtype, rounding = compute_dtype(spec.dtype, device), Rounding(spec.rounding)
    module = build_module(spec.model, "lm", place, dtype, rounding, trains=False)
    if group is not None:
        require_packed(module, "rollout.tensor_model_parallel_size")
        if is_vision_model(module):
            raise ConfigError(
                "A vision-language model generates whole on each device. Set "
                f"{full_key('rollout.tensor_model_parallel_size')}=1."
            )
    replica = Replica(module, group)
    module.to(device)
    return replica


def skeleton(model: ModelConfig, dtype: torch.dtype) -> HFModule:
    """The policy on the meta device: configurations and shapes, no values."""
    load_external(model.external_lib)
    return meta_model(model, dtype)


log = logging.getLogger(__name__)

_BUCKET_BYTES = 64 << 20  # weights that travel to another process at a time


class RankWeightSync:
    """The WeightSync of one rank; all ranks of a run call `sync` together. `engine` trains the policy on this rank, None if
    another rank does. `comm` is None in a run of one process."""

    def __init__(self, context: RankContext, comm: Collectives | None, engine: TrainEngine | None):
        self.context = context
        self.comm = comm
        self.engine = engine
        self.switch = ModeSwitch(engine, context.rollout.section, context.device, gives_back=context.has_own_weights)
        self.rollout: RolloutWorker | None = None
        self.memory: SwitchMemory | None = None  # None: nothing is copied
        self.update: PlannedUpdate | None = None  # None: there is one set of weights, or all of them are gathered

    def connect(self, rollout: RolloutWorker | None) -> None:
        """The rollout of this rank, None without one. Plans the transfer, with all ranks."""
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
        """See WeightSync. A rank in no process group gets all `weights`, by name."""
        with nullcontext() if self.comm is None else self.comm.doing("weights.sync"):
            self.switch.to_generation()
            if self.context.has_own_weights:  # the transfer needs memory for them
                self._free_training_memory()
            with nullcontext() if self.memory is None else self.memory.measuring():
                self._transfer(version, weights)
            self._free_training_memory()

    def _free_training_memory(self) -> None:
        """On all ranks, before one continues: an engine process allocates memory on devices of other ranks, too."""
        self.switch.free_training_memory()
        if self.comm is not None and self.context.has_own_weights:
            self.comm.any(False)

    def end_generation(self) -> dict[str, float]:
        """Generation has ended and the KV cache is freed; returns the memory of the last switch. Raises ModelError when weights
        have changed since `sync`."""
        if self.update is not None:
            self.update.check_held()  # before a sample trains that other weights have made
        self.switch.to_training()
        return {} if self.memory is None else self.memory.metrics()

    def _weight_bytes(self) -> int:
        """Bytes of the weights that this rank generates with, or of the full model if another process generates, or none."""
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
        """The full weights, tensor by tensor, on the ranks of the policy and of the rollout alike."""
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


def layouts(context: RankContext) -> tuple[TrainingLayout, RolloutLayout]:
    """Layouts of the policy in training, and in the rollout replicas. The ranks of a replica divide the experts."""
    copies = context.rollout_mesh()
    engines = consecutive_engines(copies.ranks, dict(copies.axes)["tp"])
    return context.training_layout(POLICY), RolloutLayout(engines, expert_groups=engines)
