"""The process groups of one model: replicas, shards, sequence, tensor and expert parallel ranks."""

from collections.abc import Iterable, Sequence
from datetime import timedelta
from typing import Any

import torch
import torch.distributed as dist
from torch.distributed.device_mesh import DeviceMesh

from verl.config import FSDPConfig
from verl.errors import ConfigError
from verl.parallel.mesh import Mesh


def mesh_of(config: FSDPConfig, num_ranks: int) -> Mesh:
    """The arrangement of ranks 0 ... that a `fsdp_config` section asks for. Raises ConfigError when sizes do not divide."""
    return Mesh.of(num_ranks, **mesh_sizes(config, num_ranks))


def mesh_sizes(config: FSDPConfig, num_ranks: int) -> dict[str, int]:
    """Arguments of Mesh.of for an engine on `num_ranks` devices."""
    sequence, fsdp_size, tensor = config.ulysses_sequence_parallel_size, config.fsdp_size, config.tensor_parallel_size
    if config.use_3d_hybrid and config.model_dimension == "head":
        shared = num_ranks if fsdp_size < 1 else fsdp_size
        fsdp_size, tensor = 1, max(1, shared // sequence)
    return {"fsdp_size": fsdp_size, "sequence_parallel": sequence, "tensor_parallel": tensor}


def shared_group(ranks: Sequence[int], timeout_s: float | None = None, *, among_them: bool = False) -> Any:
    """The process group of `ranks`, made at the first call with these ranks; the default group, if these are all. With
    `among_them` these ranks call it together, else all ranks of the default group. Waits in it end after `timeout_s` seconds.

    Each group has threads and connections of its own. Engines compute in turn, on all ranks in one order, so one is enough.
    """
    everyone = dist.group.WORLD
    assert everyone is not None
    if everyone not in _shared:
        _shared.clear()  # of a default group that has ended
    groups = _shared.setdefault(everyone, {})
    key = tuple(sorted(ranks))
    if len(ranks) == everyone.size():
        groups[key, False] = everyone
    is_local = among_them and (key, False) not in groups  # these ranks have a group that all ranks have made
    if (key, is_local) not in groups:
        groups[key, is_local] = dist.new_group(list(ranks), use_local_synchronization=among_them)
    group = groups[key, is_local]
    if timeout_s is not None and dist.get_rank() in ranks:
        dist.distributed_c10d._set_pg_timeout(timedelta(seconds=timeout_s), group)
    return group


# by default group, then by ranks, and whether only these have made it
_shared: dict[dist.ProcessGroup, dict[tuple[tuple[int, ...], bool], Any]] = {}


class ProcessGroups:
    """Made collectively: every rank of the default group calls this at the same point, those outside `mesh` too. Groups of
    equal ranks are one.

    Parameters are sharded over shard x sp ranks; experts are divided over `expert_parallel` of these and sharded over the
    remaining ones. Waits end after `timeout_s` seconds with an error (default: the default group's timeout).
    """

    def __init__(self, mesh: Mesh, device_type: str, expert_parallel: int = 1, timeout_s: float | None = None):
        replicate, shard, sequence, tensor = (dict(mesh.axes).get(a, 1) for a in ("replicate", "shard", "sp", "tp"))
        if expert_parallel < 1 or (shard * sequence) % expert_parallel:
            raise ConfigError(
                f"fsdp_config.expert_parallel_size={expert_parallel} does not divide the {shard * sequence} ranks that "
                "share one copy of the model."
            )
        self.mesh = mesh
        self.is_first = dist.get_rank() == mesh.ranks[0]

        def arrange(**sizes: int) -> DeviceMesh | None:
            ranks, joined = torch.tensor(mesh.ranks).view(tuple(sizes.values())), []
            for axis, size in enumerate(sizes.values()):
                for row in ranks.movedim(axis, -1).reshape(-1, size).tolist():
                    group = shared_group(row, timeout_s)
                    joined += [group] if dist.get_rank() in row else []
            return DeviceMesh.from_group(joined, device_type, ranks, mesh_dim_names=tuple(sizes)) if joined else None

        data = arrange(replicate=replicate, shard=shard, sequence=sequence, tensor=tensor)
        params = arrange(replicate=replicate, fsdp=shard * sequence, tensor=tensor)
        rest = shard * sequence // expert_parallel
        experts = None
        if expert_parallel > 1:
            experts = arrange(replicate=replicate, expert_fsdp=rest, expert=expert_parallel, tensor=tensor)
        if data is None or params is None:
            return  # all ranks take part in making groups; this one is in none of them
        self.params_mesh = params["replicate", "fsdp"] if replicate > 1 else params["fsdp"]
        self.experts_mesh = self.params_mesh
        self._axes = [data.get_group(name) for name in ("replicate", "shard", "sequence", "tensor")]
        self.sequence, self.tensor = self._axes[2:]
        self.expert: dist.ProcessGroup | None = None
        self._shards = self._expert_shards = params.get_group("fsdp")
        if experts is not None:
            self.expert, self._expert_shards = experts.get_group("expert"), experts.get_group("expert_fsdp")
            self.experts_mesh = experts["replicate", "expert_fsdp"] if replicate > 1 else experts["expert_fsdp"]

    def over_data_(self, numbers: torch.Tensor, op: dist.ReduceOp.RedOpType = dist.ReduceOp.SUM) -> torch.Tensor:
        """Reduce `numbers` in place over the ranks that have their own rows."""
        return all_reduce_(numbers, self._axes[:2], op)

    def over_shards_(self, numbers: torch.Tensor, *, is_expert: bool, and_tensor: bool) -> torch.Tensor:
        """Sum `numbers` in place over the ranks that hold the other parts of the same parameters."""
        groups = [self._expert_shards if is_expert else self._shards]
        if is_expert and self.expert is not None:
            groups.append(self.expert)
        return all_reduce_(numbers, [*groups, self.tensor] if and_tensor else groups)

    def broadcast_(self, tensor: torch.Tensor) -> torch.Tensor:
        """Broadcast `tensor` of the first rank to all, along one axis of the mesh after the other."""
        ranks = [group.rank() for group in self._axes]
        for axis, group in enumerate(self._axes):
            if group.size() > 1 and not any(ranks[axis + 1 :]):
                dist.broadcast(tensor, group_src=0, group=group)
        return tensor


def all_reduce_(
    tensor: torch.Tensor, groups: Iterable[dist.ProcessGroup], op: dist.ReduceOp.RedOpType = dist.ReduceOp.SUM
) -> torch.Tensor:
    """Reduce in place over one group after the other."""
    for group in groups:
        if group.size() > 1:
            dist.all_reduce(tensor, op, group=group)
    return tensor
