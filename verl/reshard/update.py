"""Weight sync to rollout replicas by a transfer plan: made once, run and verified at every update.

    update = plan_update(comm, training, rollout, engine=engine, replica=replica, device=device)    # on every rank
    update()                                                                                        # on every rank

`engine` is the training engine of this rank and `replica` its rollout model; None if the rank has none. A rank keeps the
slices that it holds, and nothing is gathered. With LoRA only the adapters travel.
"""

from __future__ import annotations

import hashlib
import logging
import math
import socket
from collections.abc import Callable, Iterable, Mapping, Sequence

import torch
import torch.distributed as dist

from verl.config import full_key
from verl.engines.api import TrainEngine
from verl.errors import ModelError
from verl.models.decoder.weights import DenseDecoder
from verl.models.lora import merged
from verl.models.rounding import Rounding
from verl.parallel.collectives import Collectives
from verl.parallel.serialize import from_bytes, to_bytes
from verl.reshard.hf_sharding import decoder_tensors
from verl.reshard.host_memory import HostMemory
from verl.reshard.layout import Layout, OnRanks, RolloutLayout, Tensor, TrainingLayout
from verl.reshard.plan import make_plan
from verl.reshard.transport import PeerToPeer
from verl.rollout.rollout_model import Replica

log = logging.getLogger(__name__)

_MIN_STAGING_BYTES = 1 << 16
_MAX_STAGING_BYTES = 64 << 20  # and no more than a sixth of the model
_MOVED = "moved"  # sent by a rank with weights that have left the shared memory
Held = Mapping[str, torch.Tensor]


class PlannedUpdate:
    """Transfers the weights of the training ranks to the ranks that generate. Every rank calls it at the same time.

    `plan` and `transport` are for `target`: the ranks of `rollout` that own their memory. On the CPU, ranks of one host with
    the same rollout weights share one memory (verl.reshard.host_memory).

    Raises ModelError, on all ranks with the same message, when tensors do not fit the plan or a replica does not hold the sent
    values afterwards.
    """

    def __init__(
        self,
        comm: Collectives,
        training: TrainingLayout,
        rollout: RolloutLayout,
        tensors: Sequence[Tensor],
        *,
        hosts: Mapping[int, int],
        dtype: torch.dtype,
        device: torch.device,
        staging_bytes: int,
        engine: TrainEngine | None,
        replica: Replica | None,
        adapters: Adapters | None = None,
    ):
        self.training, self.rollout, self.tensors = training, rollout, tensors
        self._comm, self._engine, self._replica, self._adapters = comm, engine, replica, adapters
        self._hosts, self._dtype, self._device, self._staging_bytes = hosts, dtype, device, staging_bytes
        self._arrange()

    def _arrange(self) -> None:
        self._memory = self._share_memory() if self._device.type == "cpu" else None
        owners = self._memory.owners if self._memory is not None else {}
        self.target = OnRanks(self.rollout, tuple(r for r in self.rollout.ranks if owners.get(r, r) == r))
        self.plan = make_plan(self.tensors, self.training, self.target, self._hosts)
        self.transport = PeerToPeer(
            self.tensors,
            self.training,
            self.target,
            self.plan,
            dtype=self._dtype,
            device=self._device,
            staging_bytes=self._staging_bytes,
            memory=self._memory,
        )

    def __call__(self) -> None:
        held, target = _local_weights(self._engine), self._target_weights()
        # agreed before the first transfer: its peers would wait for a rank that has raised
        error = _error_of(self.transport.check, held, target)
        has_moved = self._memory is not None and self._memory.has_moved(target)
        if raise_together(self._comm, error or (_MOVED if has_moved else ""), but=_MOVED):
            self._arrange()
            target = self._target_weights()
        raise_together(self._comm, _error_of(self.transport, held, target))
        if self._adapters is not None:
            self._adapters.merge()

    @torch.no_grad()
    def check_held(self) -> None:
        """Raise ModelError, on this rank, unless it still holds the weights of the last update. Ranks that share one memory
        verify a part of it each."""
        target = self._target_weights()
        self.transport.check_held(target)
        if self._memory is not None and (name := self._memory.differing(target)):
            raise ModelError(
                f"Rank {self._comm.rank} generates with another {name} than the ranks that share its weights. These weights "
                "must not be used: update again, or rebuild the rollout engine."
            )

    def _share_memory(self) -> HostMemory:
        module = self._replica.module if self._replica is not None and self._adapters is None else None
        if module is None:
            return HostMemory(self._comm, self._target_weights(), self._fingerprint())
        # the decoder packs weights that it multiplies as one matrix; done first, it does not move them later
        DenseDecoder.of(module)
        memory = HostMemory(self._comm, dict(module.named_parameters(remove_duplicate=False)), self._fingerprint())
        DenseDecoder.of(module)  # drops its old addresses
        return memory

    def _fingerprint(self) -> str:
        """Key that is equal for ranks with identical rollout shards, dtypes included."""
        parts = [(tensor.name, self.rollout.part(tensor, self._comm.rank)) for tensor in self.tensors]
        weights = sorted((name, str(w.dtype), tuple(w.shape)) for name, w in self._target_weights().items())
        return hashlib.sha256(repr((parts, weights)).encode()).hexdigest()

    def _target_weights(self) -> Held:
        if self._adapters is not None:
            return self._adapters.parts
        return self._replica.parts() if self._replica is not None else {}


def plan_update(
    comm: Collectives,
    training: TrainingLayout,
    rollout: RolloutLayout,
    *,
    engine: TrainEngine | None,
    replica: Replica | None,
    device: torch.device,
) -> PlannedUpdate | None:
    """Plan the weight sync, on all ranks of `comm` together. None, on all of them, if slices are not enough: for engines
    and models that the layouts do not describe, and if other parameters train in addition to adapters.

    Raises ModelError, on all ranks, when a replica has a parameter that no training rank has, or lacks a parameter that trains.
    """
    is_first = comm.rank == training.ranks[0]
    rows = comm.all_gather(to_bytes((socket.gethostname(), _layout_to_send(engine) if is_first else None)))
    hosts, models = zip(*map(from_bytes, rows), strict=True)
    model = models[training.ranks[0]]
    if model is None:
        return None
    dtype, scales = getattr(torch, model.pop("dtype")), model.pop("adapter_scales")
    rounding = Rounding(model.pop("rounding"))
    num_layers_at_a_time = model.pop("layers_at_a_time")
    tensors = decoder_tensors(**model, itemsize=dtype.itemsize)
    raise_together(comm, _uncovered(replica, tensors, scales))
    adapters = None
    if replica is not None and scales:
        adapters = Adapters(replica, tensors, rollout, comm.rank, scales, dtype, rounding)
    misfit = _misfit(_local_weights(engine), tensors, training, comm.rank)
    if replica is not None and not scales:
        misfit = misfit or _misfit(replica.parts(), tensors, rollout, comm.rank)
    misfits = list(filter(None, comm.all_gather(misfit.encode())))
    if misfits:
        if is_first:
            name = misfits[0].decode()
            log.warning(
                "Weight sync gathers whole weights on each rank: the layouts do not match the shards of %s.", name
            )
        return None
    if device.type == "cuda":  # NCCL connects all ranks at the first collective; point-to-point calls do not
        dist.all_reduce(torch.zeros(1, device=device))
    return PlannedUpdate(
        comm,
        training,
        rollout,
        tensors,
        hosts=dict(enumerate(hosts)),
        dtype=dtype,
        device=device,
        staging_bytes=_staging_bytes(tensors, dtype, model["num_layers"], num_layers_at_a_time),
        engine=engine,
        replica=replica,
        adapters=adapters,
    )


def _staging_bytes(tensors: Sequence[Tensor], dtype: torch.dtype, num_layers: int, layers_at_a_time: int | None) -> int:
    """Bytes of staging buffers on a rank: a sixth of the model, or `layers_at_a_time` of its layers, within bounds."""
    sizes = {tensor.name: math.prod(tensor.shape) * dtype.itemsize for tensor in tensors}
    num_bytes = min(_MAX_STAGING_BYTES, sum(sizes.values()) // 6)
    if layers_at_a_time is not None and num_layers:
        in_layers = sum(size for name, size in sizes.items() if ".layers." in name)
        num_bytes = min(max(_MIN_STAGING_BYTES, num_bytes), layers_at_a_time * in_layers // num_layers)
    return max(_MIN_STAGING_BYTES, num_bytes)


def raise_together(comm: Collectives, error: str, but: str = "") -> bool:
    """Raise the first rank's `error` as ModelError on every rank; do nothing if all are empty or equal `but`. Returns
    whether one equals `but`."""
    errors = [row.decode() for row in comm.all_gather(error.encode())]
    first_error = next((row for row in errors if row not in ("", but)), "")
    if first_error:
        raise ModelError(first_error)
    return any(errors)


def _error_of(what: Callable[[Held, Held], None], held: Held, target: Held) -> str:
    try:
        what(held, target)
    except ModelError as error:
        return str(error)
    return ""


def _local_weights(engine: TrainEngine | None) -> Held:
    return {} if engine is None else engine.local_weights()


def _layout_to_send(engine: TrainEngine | None) -> dict[str, object] | None:
    """The WeightLayout of `engine` in types that `to_bytes` takes."""
    layout = None if engine is None else engine.weight_layout()
    if layout is None:
        return None
    shapes = {name: list(shape) for name, shape in layout.shapes.items()}
    return {**vars(layout), "shapes": shapes, "dtype": str(layout.dtype).removeprefix("torch.")}


def _uncovered(replica: Replica | None, tensors: tuple[Tensor, ...], scales: Mapping[str, float]) -> str:
    """Error message if the names of trained and rollout parameters differ; "" for none."""
    if replica is None:
        return ""
    travels = [f"{layer}.weight" for layer in scales] or [tensor.name for tensor in tensors]
    names = replica.parts().keys()
    unreached = next((name for name in travels if name not in names), None)
    if unreached is not None:
        return (
            f"{unreached} trains and is no parameter of the rollout model, which would keep an old value. Both must be built "
            f"from the same {full_key('model')}."
        )
    try:
        if not scales:
            replica.check_covered(travels)
    except ModelError as error:
        return str(error)
    return ""


def _misfit(held: Held, tensors: tuple[Tensor, ...], layout: Layout, rank: int) -> str:
    """Name of the first tensor with another shape on this rank than in `layout`; "" for none."""
    for tensor in tensors:
        part = layout.part(tensor, rank)
        weight = held.get(tensor.name)
        if part is None:
            if weight is not None and weight.numel():
                return tensor.name
        elif weight is None or tuple(weight.shape) != part.shape:
            return tensor.name
    return ""


class Adapters:
    """This rank's parts of `tensors`, low-rank adapters of the layers in `scales` (alpha / rank), in `dtype`. They are merged
    into the weights that `replica` was loaded with:

        W = W_0 + (alpha / rank) B A

    W_0 does not train and is kept in addition to the weights that generate. The sums are rounded by `rounding`. The caller
    has checked that the replica has these layers.
    """

    def __init__(
        self,
        replica: Replica,
        tensors: Iterable[Tensor],
        layout: Layout,
        rank: int,
        scales: Mapping[str, float],
        dtype: torch.dtype,
        rounding: Rounding,
    ):
        self.scales, self.rounding = scales, rounding
        self.replica = replica
        weights = replica.parts()
        self.base = {f"{layer}.weight": weights[f"{layer}.weight"].clone() for layer in scales}
        device = next(iter(self.base.values())).device
        parts = {tensor.name: layout.part(tensor, rank) for tensor in tensors}
        self.parts = {
            name: torch.zeros(part.shape, dtype=dtype, device=device)
            for name, part in parts.items()
            if part is not None
        }

    @torch.no_grad()
    def merge(self) -> None:
        """Write the merged weights into the replica."""
        tensors = {**self.base, **self.parts}
        weights = self.replica.parts()  # read again: an engine may have moved its weights since the last update
        for name in self.base:
            value = merged(name, tensors.__getitem__, self.scales)
            self.rounding.write(weights[name], name, value, self.replica.region(name))
