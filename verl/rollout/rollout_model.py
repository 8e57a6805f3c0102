"""A rollout replica: a copy of the policy that only generates, on one rank or divided over the ranks of a group.

    ranks of the rollout   0   1   2   3      rollout.tensor_model_parallel_size=2
    copies                 [ 0 ]   [ 1 ]      each has its own prompts

Each rank of a group holds a part of every layer and of the vocabulary, and some of the experts of a mixture. The ranks run the
same generation side by side, and communicate in every layer (verl.models.parallel.tensor). The logits are gathered before a
token is sampled, so all ranks see the same logits. With counter-based randomness they sample the same tokens. Nothing else is
sent.
"""

from collections.abc import Iterable
from datetime import timedelta

import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import nn

from verl.models.hf_module import HFModule
from verl.models.parallel.collectives import even_sizes, gather_into, own_range
from verl.models.parallel.experts import SummedExperts, divide_experts
from verl.models.parallel.tensor import divide
from verl.models.rounding import Region
from verl.parallel.mesh import Mesh
from verl.rollout.weight_version import complete, missing

Weights = Iterable[tuple[str, torch.Tensor]]


def copy_group(mesh: Mesh, timeout_s: float | None) -> dist.ProcessGroup | None:
    """The ranks that share a copy of the policy with this one; None if each rank has its own, and outside `mesh`.

    Made collectively: every rank of the default group calls this at the same point. Waits in the group end after
    `timeout_s` seconds with an error (default: the default group's timeout).
    """
    size = dict(mesh.axes)["tp"]
    if size == 1:
        return None
    copies = [list(mesh.ranks[first : first + size]) for first in range(0, mesh.size, size)]  # tp is the innermost axis
    timeout = None if timeout_s is None else timedelta(seconds=timeout_s)
    group: dist.ProcessGroup | None = dist.new_subgroups_by_enumeration(copies, timeout=timeout)[0]
    return group


class Replica:
    """`module`, or with a `group` of several ranks this rank's part of it. In a group the module is cut in place. All ranks
    call it with equal inputs, and each gets the logits of the complete vocabulary."""

    def __init__(self, module: HFModule, group: dist.ProcessGroup | None = None):
        self.module = module
        self._group = group
        self._shapes = {name: p.shape for name, p in module.named_parameters(remove_duplicate=False)}
        self._dims: dict[str, int] = {}  # of the parameters that are cut
        if group is not None and group.size() > 1:
            self._cut(module, group)

    def parts(self) -> dict[str, torch.Tensor]:
        """Name -> this rank's part of each parameter, a view to write into. A tied parameter is under each of its names."""
        return {name: p.detach() for name, p in self.module.named_parameters(remove_duplicate=False)}

    def region(self, name: str) -> Region:
        """The slice of the undivided parameter that this rank holds."""
        shape = tuple(self._shapes[name])
        first = [0] * len(shape)
        if self._group is not None and name in self._dims:
            dim = self._dims[name]
            first[dim] = own_range(shape[dim], self._group)[0]
        return Region(shape, tuple(first))

    def check_covered(self, names: Iterable[str]) -> None:
        """Raise ModelError if `names` lack a parameter. One name of tied parameters is enough."""
        parameters = dict(self.module.named_parameters(remove_duplicate=False))
        covered = {id(parameters[name]) for name in names if name in parameters}
        uncovered = next((name for name, p in parameters.items() if id(p) not in covered), None)
        if uncovered is not None:
            raise missing(uncovered)

    def load(self, weights: Weights) -> None:
        """Copy `weights`, (name, undivided tensor) pairs, into the module. Raises ModelError for an unknown name, a wrong shape
        or a missing parameter. One name of tied parameters is enough."""
        parameters = dict(self.module.named_parameters(remove_duplicate=False))
        storages = {name: p.data_ptr() for name, p in parameters.items()}
        with torch.no_grad():
            for name, tensor in complete(weights, self._shapes, storages):
                if self._group is not None and (dim := self._dims.get(name)) is not None:
                    tensor = tensor.narrow(dim, *own_range(tensor.shape[dim], self._group))
                parameters[name].copy_(tensor)

    def _cut(self, module: HFModule, group: dist.ProcessGroup) -> None:
        head = module.get_output_embeddings()
        num_tokens = len(head.weight)
        dims = {id(module.get_parameter(name)): dim for name, dim in divide(module, group).dims.items()}
        for name in divide_experts(module, group, SummedExperts):  # along their own dimension
            dims |= dict.fromkeys(map(id, module.get_submodule(name).parameters()), 0)
        for parameter in module.parameters():
            parameter.data = parameter.data.clone()  # a part that is a view would keep the undivided tensor in memory
        named = module.named_parameters(remove_duplicate=False)
        self._dims = {name: dims[id(p)] for name, p in named if id(p) in dims}
        head.register_forward_hook(WholeVocabulary(even_sizes(num_tokens, group.size()), group))


class WholeVocabulary:
    """A forward hook of the output projection that gathers the logits of all ranks. Rank i has `sizes[i]` tokens."""

    def __init__(self, sizes: list[int], group: dist.ProcessGroup):
        self.sizes, self.group = sizes, group

    def __call__(self, module: nn.Module, args: tuple[object, ...], out: torch.Tensor) -> torch.Tensor:
        """[..., own tokens] -> [..., vocabulary]"""
        if out.numel() == 0:
            return out.new_empty(*out.shape[:-1], sum(self.sizes))
        spare = max(self.sizes) - out.shape[-1]
        padded = F.pad(out, (0, spare)) if spare else out.contiguous()
        everything = padded.new_empty(len(self.sizes) * padded.numel())
        gather_into(everything, padded.flatten(), group=self.group)
        parts = everything.view(len(self.sizes), *padded.shape)
        return torch.cat([part[..., :size] for part, size in zip(parts, self.sizes, strict=True)], dim=-1)
