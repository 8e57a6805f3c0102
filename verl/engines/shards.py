"""Sharded parameters: from a rank's part to the full tensor and back."""

from collections.abc import Collection, Mapping
from dataclasses import dataclass

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.tensor import DTensor

from verl.engines.groups import ProcessGroups, all_reduce_, shared_group
from verl.engines.rounded import RoundedShard
from verl.engines.state import Parameters
from verl.models.parallel.collectives import even_sizes, gather_rows, local, own_range
from verl.models.rounding import Region
from verl.parallel.slices import chunk_span


@dataclass(frozen=True)
class Shard:
    """One parameter. The full tensor of `shape` was cut along `tensor_dim` over tensor parallel ranks or along 0 over expert
    parallel ranks. Each part was then cut along 0 over the FSDP ranks.

    `partial` says that all tensor parallel ranks hold the parameter, each with a part of its gradient. `rounded` are the
    compute weights, if the parameter is their master.
    """

    name: str
    parameter: nn.Parameter  # holds a DTensor
    shape: torch.Size
    tensor_dim: int | None = None
    is_expert: bool = False
    partial: bool = False
    rounded: RoundedShard | None = None

    @property
    def fsdp_group(self) -> dist.ProcessGroup:
        assert isinstance(self.parameter, DTensor)
        mesh = self.parameter.device_mesh
        return mesh.get_group(mesh.ndim - 1)

    @property
    def computing(self) -> torch.Tensor:
        """This rank's part of the weights that compute."""
        return local(self.parameter.detach()) if self.rounded is None else self.rounded.weights

    def region(self, groups: ProcessGroups) -> Region:
        """This rank's part of the full tensor."""
        first = [0] * len(self.shape)
        rows = self.parameter.shape[0]  # before FSDP
        if self.tensor_dim is not None:
            first[self.tensor_dim] += own_range(self.shape[self.tensor_dim], groups.tensor)[0]
        if self.is_expert and groups.expert is not None:
            first[0] += own_range(self.shape[0], groups.expert)[0]
        first[0] += chunk_span(rows, self.fsdp_group.size(), self.fsdp_group.rank())[0]
        return Region(tuple(self.shape), tuple(first))

    def whole(
        self, groups: ProcessGroups, value: torch.Tensor, device: torch.device, dtype: torch.dtype
    ) -> torch.Tensor:
        """The full tensor of the part `value` (this parameter, or a tensor of its layout), in `dtype`. Collective; every rank
        gets it."""
        rows, size = self.parameter.shape[0], self.fsdp_group.size()
        chunks = [stop - first for first, stop in (chunk_span(rows, size, rank) for rank in range(size))]
        out = gather_rows(local(value).to(device, dtype), chunks, self.fsdp_group)
        if self.is_expert and groups.expert is not None:
            out = _gather(out, 0, self.shape[0], groups.expert)
        if self.tensor_dim is not None:
            out = _gather(out, self.tensor_dim, self.shape[self.tensor_dim], groups.tensor)
        return out

    def own_part(self, groups: ProcessGroups, full: torch.Tensor) -> torch.Tensor:
        """This rank's part of a full tensor, before FSDP (a view)."""
        if self.tensor_dim is not None:
            full = full.narrow(self.tensor_dim, *own_range(full.shape[self.tensor_dim], groups.tensor))
        if self.is_expert and groups.expert is not None:
            full = full.narrow(0, *own_range(full.shape[0], groups.expert))
        return full

    def put(self, groups: ProcessGroups, target: torch.Tensor, full: torch.Tensor) -> None:
        """Write this rank's part of `full` into `target`."""
        part = self.own_part(groups, full)
        first, stop = chunk_span(part.shape[0], self.fsdp_group.size(), self.fsdp_group.rank())
        local(target).copy_(part[first:stop])


class ShardedParameters(Parameters):
    """The parameters of a sharded module."""

    are_parts = True

    def __init__(self, shards: Mapping[str, Shard], groups: ProcessGroups, device: torch.device):
        self.shards, self.groups, self.device = shards, groups, device
        self.group = shared_group(groups.mesh.ranks)

    def named(self) -> dict[str, torch.Tensor]:
        return {name: shard.parameter.detach() for name, shard in self.shards.items()}

    def computing(self, name: str) -> torch.Tensor:
        return self.shards[name].computing

    def cut_matrices(self, matrices: Collection[str]) -> list[str]:
        """See verl.models.optimizers.Divided; stacks of experts are divided between matrices."""
        return [name for name, shard in self.shards.items() if name in matrices and len(shard.shape) == 2]

    def shape(self, name: str) -> tuple[int, ...]:
        return tuple(self.shards[name].shape)

    def whole(self, name: str, value: torch.Tensor, dtype: torch.dtype) -> torch.Tensor:
        return self.shards[name].whole(self.groups, value, self.device, dtype)

    def part(self, name: str, full: torch.Tensor) -> torch.Tensor:
        target = torch.empty_like(self.shards[name].parameter.detach())
        self.shards[name].put(self.groups, target, full)
        return target


class GradientNorm:
    """The L2 norm over all ranks of gradients that are spread over them in different ways."""

    def __init__(self, shards: Mapping[str, Shard], groups: ProcessGroups, device: torch.device):
        self.shards, self.groups, self.device = shards, groups, device

    def __call__(self, parameters: Mapping[str, nn.Parameter]) -> torch.Tensor:
        squares = {}
        for name, parameter in parameters.items():
            if parameter.grad is None:
                continue
            grad = local(parameter.grad)
            wide = torch.promote_types(grad.dtype, torch.float32)
            squares[name] = torch.linalg.vector_norm(grad, dtype=wide).square().to(self.device)
        return sum_over_shards(squares, self.shards, self.groups).sqrt()


def sum_over_shards(
    values: Mapping[str, torch.Tensor], shards: Mapping[str, Shard], groups: ProcessGroups
) -> torch.Tensor:
    """The sum over all parameters. `values` has the value of this rank's part of each parameter; each part counts once."""
    sums: dict[tuple[bool, bool], torch.Tensor] = {}
    for name, value in values.items():
        kind = (shards[name].is_expert, shards[name].tensor_dim is not None)
        sums[kind] = sums[kind] + value if kind in sums else value
    total = torch.zeros_like(next(iter(sums.values())))
    for (is_expert, and_tensor), value in sorted(sums.items()):
        total = total + groups.over_shards_(value, is_expert=is_expert, and_tensor=and_tensor)
    return total


def add_up_partial_gradients(shards: Mapping[str, Shard], groups: ProcessGroups, device: torch.device) -> None:
    """Sum the gradients that tensor parallel ranks hold in parts."""
    if groups.tensor.size() == 1:
        return
    grads = [local(s.parameter.grad) for s in shards.values() if s.partial and s.parameter.grad is not None]
    if grads:
        flat = all_reduce_(torch.cat([g.flatten() for g in grads]).to(device), [groups.tensor])
        for grad, total in zip(grads, flat.split([g.numel() for g in grads]), strict=True):
            grad.copy_(total.view_as(grad))


def _gather(tensor: torch.Tensor, dim: int, total: int, group: dist.ProcessGroup) -> torch.Tensor:
    rows = gather_rows(tensor.movedim(dim, 0), even_sizes(total, group.size()), group)
    return rows.movedim(0, dim).contiguous()
