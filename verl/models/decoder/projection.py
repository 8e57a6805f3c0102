"""Projections that read the same input, as one matrix.

The module keeps its parameters and names. Their storage is arranged: the parts of a projection (q, k, v; gate, up) lie back to
back in one tensor, of which the parameters are views. An optimizer that writes in place, or a load that copies, keeps the
arrangement. What replaces storage (`module.to(...)`) breaks it.
"""

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import cast

import torch
import torch.distributed as dist
from torch import nn

from verl.models.parallel.tensor import Cut, cut_of


@dataclass(frozen=True)
class Projection:
    """One or several nn.Linear that read the same input: `weight` [outputs, inputs] and `bias` [outputs] hold them back
    to back; `parts` are the modules, in order, whose parameters are views of them. A `cut` weight is this rank's part."""

    weight: torch.Tensor
    bias: torch.Tensor | None
    parts: tuple[nn.Linear, ...]
    cut: Cut | None = None

    @property
    def inputs_group(self) -> dist.ProcessGroup | None:
        """The ranks whose gradients of the inputs are added up, since each has some of the outputs."""
        return self.cut.group if self.cut is not None and self.cut.dim == 0 else None

    @property
    def outputs_group(self) -> dist.ProcessGroup | None:
        """The ranks whose products are added up before the bias, since each has some of the inputs."""
        return self.cut.group if self.cut is not None and self.cut.dim == 1 else None

    @property
    def local_bias(self) -> torch.Tensor | None:
        """The bias, unless it is added to a sum of products."""
        return self.bias if self.outputs_group is None else None

    @property
    def is_joined(self) -> bool:
        """Whether the parameters still are the views that they were made."""
        start = self.weight.data_ptr()
        for part in self.parts:
            if part.weight.data_ptr() != start or part.weight.dtype != self.weight.dtype:
                return False
            start += part.weight.numel() * part.weight.element_size()
        return True


NO_PROJECTION = Projection(torch.empty(0), None, ())


def in_place(parts: Sequence[nn.Linear]) -> Projection:
    """Lay the parts' weights (and biases) back to back, and make the parameters views of that."""
    return _projection(parts, _moved)


def in_a_copy(parts: Sequence[nn.Linear]) -> Projection:
    """The parts' weights (and biases) back to back, in a copy unless the owner of their storage has arranged them so."""
    return _projection(parts, _whole)


def _projection(parts: Sequence[nn.Linear], join: Callable[[list[nn.Parameter]], torch.Tensor]) -> Projection:
    biases = [part.bias for part in parts if part.bias is not None]
    assert len(biases) in (0, len(parts)), "either all projections of an input have a bias or none has"
    weight = join([cast(nn.Parameter, part.weight) for part in parts])
    return Projection(weight, join(biases) if biases else None, tuple(parts), cut_of(parts[0]))


def _moved(parameters: Sequence[nn.Parameter]) -> torch.Tensor:
    joined, start = _whole(parameters), 0
    for parameter in parameters if joined.data_ptr() != parameters[0].data_ptr() else ():
        parameter.data = joined[start : start + len(parameter)]
        start += len(parameter)
    return joined


def _whole(parameters: Sequence[nn.Parameter]) -> torch.Tensor:
    """The parameters as one tensor: a view if they lie so already, else a copy."""
    parts = [parameter.data for parameter in parameters]
    adjacent = _adjacent(parts)
    return torch.cat(parts) if adjacent is None else adjacent


def _adjacent(parts: Sequence[torch.Tensor]) -> torch.Tensor | None:
    """`parts` as one tensor where they lie back to back already, as weights do that were moved together."""
    first, start = parts[0], parts[0].data_ptr()
    for part in parts:
        is_same = part.untyped_storage().data_ptr() == first.untyped_storage().data_ptr() and part.dtype == first.dtype
        if not is_same or part.data_ptr() != start or not part.is_contiguous():
            return None
        start += part.numel() * part.itemsize
    return first.as_strided((sum(map(len, parts)), *first.shape[1:]), first.stride())
