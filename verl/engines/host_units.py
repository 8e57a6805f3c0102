"""Sharded weights in memory that the ranks of a host share, so that nothing is gathered.

    weight in memory of the host   | rows of rank 0 | rows of rank 1 | ...     each rank writes its rows, and reads all of them
    gradients of each rank         | rows of rank 0 | rows of rank 1 | ...     each rank adds up its rows of all ranks

FSDP2 copies each unit into memory of each rank, and without a GPU through sockets. Here FSDP2's gathered parameter is the
memory of the host, and the shard is a part of it. Ranks meet before and after each call of an engine. Within a call only the
optimizer writes weights, after the sum of the gradients' norm, by which all ranks have read them.

Gradients are added up in the order of the ranks, so sums do not depend on timing.
"""

import time
from collections.abc import Iterable, Sequence
from typing import Any

import torch
import torch.distributed as dist
from torch.distributed.fsdp import FSDPModule
from torch.distributed.fsdp._fully_shard._fsdp_collectives import DefaultReduceScatter
from torch.distributed.fsdp._fully_shard._fsdp_param import FSDPParam
from torch.distributed.fsdp._fully_shard._fsdp_param_group import FSDPParamGroup
from torch.distributed.tensor import DTensor

from verl.engines.fsdp_units import fsdp_params
from verl.engines.rounded import RoundedParam
from verl.errors import ModelError
from verl.parallel.segments import SegmentCard, as_values, try_segment
from verl.parallel.serialize import from_bytes, to_bytes
from verl.parallel.traffic import TRAFFIC

_CARD_BYTES = 1024  # of a message with a SegmentCard
_ALIGNMENT = 64  # bytes


class HostGroup:
    """The ranks of `group`, on one host."""

    def __init__(self, group: dist.ProcessGroup):
        self.group, self.rank, self.size = group, group.rank(), group.size()

    def meet(self) -> None:
        """Wait for all ranks, at most as long as the group waits."""
        dist.all_reduce(torch.zeros(1), group=self.group)

    def allocate(self, num_bytes: int) -> list[torch.Tensor] | None:
        """New memory of `num_bytes` from each rank, which all can read and write: uint8, by rank. None on all ranks unless each
        reaches the memory of all. Called by all ranks together."""
        segment = try_segment(num_bytes)
        card = torch.zeros(_CARD_BYTES, dtype=torch.uint8)
        if segment is not None:
            packed = to_bytes(tuple(SegmentCard.of(segment)))
            card[: len(packed)] = torch.frombuffer(bytearray(packed), dtype=torch.uint8)
        cards = torch.empty(self.size, _CARD_BYTES, dtype=torch.uint8)
        dist.all_gather(list(cards.unbind()), card, group=self.group)
        memory: list[torch.Tensor | None] = []
        for rank, row in enumerate(cards):
            if rank == self.rank:
                memory.append(None if segment is None else segment.values)
            else:
                memory.append(SegmentCard(*from_bytes(row.numpy().data)).open(rank) if row.any() else None)
        reached = [part for part in memory if part is not None]
        reaches = torch.tensor([int(len(reached) == self.size)])
        dist.all_reduce(reaches, dist.ReduceOp.MIN, group=self.group)
        if segment is not None:
            segment.close()  # all ranks have it open, or none will
        return reached if int(reaches) else None


def share_units(units: Iterable[FSDPModule]) -> list[HostGroup]:
    """Move the weights of sharded `units` on a CPU into memory of the host, if the ranks of a shard group reach each other's
    memory. All ranks call it together, before an optimizer is built. Returns the groups that now share weights."""
    units_of: dict[dist.ProcessGroup, list[FSDPModule]] = {}
    for unit in units:
        if parameters := fsdp_params(unit):
            mesh: Any = parameters[0].sharded_param
            group = mesh.device_mesh.get_group(mesh.device_mesh.ndim - 1)
            units_of.setdefault(group, []).append(unit)
    hosts = []
    for group, members in units_of.items():
        host = HostGroup(group)
        if group.size() > 1 and _move(members, host):
            hosts.append(host)
    return hosts


@torch.no_grad()
def _move(units: Sequence[FSDPModule], host: HostGroup) -> bool:
    """Whether all ranks of `host` share the weights of `units` from now on, in memory of the first one."""
    parameters = [parameter for unit in units for parameter in fsdp_params(unit)]
    shards = [p.rounded.flat if isinstance(p, RoundedParam) else p._sharded_param_data for p in parameters]
    num_bytes = [shard.nbytes * host.size for shard in shards]
    room = [-(-size // _ALIGNMENT) * _ALIGNMENT for size in num_bytes]
    memory = host.allocate(sum(room) if host.rank == 0 else 0)
    if memory is None:
        return False
    first = 0
    for parameter, shard, size, step in zip(parameters, shards, num_bytes, room, strict=True):
        _put(parameter, as_values(memory[0], first, size, shard.dtype), host)
        first += step
    scatter = HostScatter(host)
    for unit in units:
        unit._get_fsdp_state()._fsdp_param_group.__class__ = _WholeUnit
        unit.set_custom_reduce_scatter(scatter)
    return True


def _put(parameter: FSDPParam, weights: torch.Tensor, host: HostGroup) -> None:
    """Make `weights`, flat and padded, the weights of `parameter`, and the rows of this rank its shard."""
    rows = weights.view(host.size, -1)[host.rank]
    if isinstance(parameter, RoundedParam):
        parameter.rounded.flat = rows.copy_(parameter.rounded.flat)
        parameter.__class__ = _RoundedWhole
    else:
        shard: Any = parameter.sharded_param
        shape = shard._local_tensor.shape
        parameter._sharded_param_data = rows.copy_(parameter._sharded_param_data)
        shard._local_tensor = rows[: shape.numel()].view(shape)
        parameter.__class__ = _Whole
    # FSDP2's parameter begins at the first byte of a storage. One storage for all lets projections of an input be one tensor.
    parameter.all_gather_outputs = [torch.from_numpy(weights.view(torch.uint8).numpy()).view(weights.dtype)]
    parameter.init_unsharded_param()
    gathered = parameter._unsharded_param
    if not isinstance(gathered, DTensor):
        gathered.data = weights.as_strided(gathered.shape, gathered.stride())


class _Whole(FSDPParam):
    """A parameter that is always whole."""

    def free_unsharded_param(self) -> None:
        """The memory is of all ranks."""


class _RoundedWhole(_Whole, RoundedParam):
    """The same, with a master of its own as shard."""


class _WholeUnit(FSDPParamGroup):
    """The parameters of a unit, which are always whole."""

    def unshard(self, async_op: bool = False) -> None:
        """Nothing is gathered."""
        self._to_unsharded()


class HostScatter(DefaultReduceScatter):
    """Sums of gradients. FSDP2 writes a unit's gradients, in the order of the ranks that own them, into memory from `allocate`.

    Two blocks of a size take turns: when all ranks have met with the second, they have read the first."""

    def __init__(self, host: HostGroup):
        self._host = host
        self._blocks: dict[tuple[int, int], list[torch.Tensor]] = {}  # by size and turn
        self._last = (0, 0)  # key of the block that was added up before
        self._key = (0, 0)  # of the block that waits for its sum
        self._input = torch.empty(0)

    def allocate(self, size: Sequence[int | torch.SymInt], *, dtype: torch.dtype, device: torch.device) -> torch.Tensor:
        """FSDP2 allocates a unit's gradients, and then their sum."""
        (numel,) = map(int, size)
        if numel * self._host.size == self._input.numel():
            return torch.empty(numel, dtype=dtype, device=device)
        num_bytes = numel * dtype.itemsize
        self._key = (num_bytes, int(self._last == (num_bytes, 0)))
        block = self._blocks.get(self._key)
        if block is None:
            block = self._host.allocate(num_bytes)
            if block is None:
                raise ModelError(
                    f"{num_bytes} bytes for gradients cannot be shared between the ranks of this host any more: look whether "
                    "it is out of memory or of open files."
                )
            self._blocks[self._key] = block
        self._input = as_values(block[self._host.rank], 0, num_bytes, dtype)
        return self._input

    def __call__(
        self,
        output_tensor: torch.Tensor,
        input_tensor: torch.Tensor,
        group: dist.ProcessGroup,
        op: object,
        async_op: bool = False,
    ) -> Any:
        began, host, num_bytes = time.perf_counter(), self._host, input_tensor.nbytes
        assert input_tensor.data_ptr() == self._input.data_ptr()
        host.meet()
        block = (as_values(memory, 0, num_bytes, input_tensor.dtype) for memory in self._blocks[self._key])
        first, second, *further = (part.view(host.size, -1)[host.rank] for part in block)
        torch.add(first, second, out=output_tensor)
        for part in further:
            output_tensor.add_(part)
        self._last, self._input = self._key, torch.empty(0)
        TRAFFIC.add(time.perf_counter() - began, output_tensor.nbytes * (host.size - 1))
