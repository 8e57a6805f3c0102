"""Timing of parameter gathers, of their release, and of gradient reductions in a sharded model.

Plain FSDP gathers each unit twice a micro-batch and adds its gradients up once. For a group of micro-batches both happen
once. A unit that is gathered for the first one stays until the last one's backward has passed it. Meanwhile each rank sums full
gradients. That costs memory for all of the model and its gradients, and saves all but one exchange of each.
"""

import itertools
import time
from collections.abc import Collection, Iterable, Sequence
from functools import partial
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.fsdp import FSDPModule
from torch.distributed.fsdp._fully_shard._fsdp_collectives import DefaultAllGather, DefaultReduceScatter
from torch.distributed.fsdp._fully_shard._fsdp_param import FSDPParam
from torch.utils._pytree import tree_flatten, tree_unflatten

from verl.config import FSDPConfig
from verl.models.grad_buffers import GradientBuffers
from verl.models.hf_module import AutogradContext
from verl.parallel.traffic import TRAFFIC


class Gathering:
    """Called before each micro-batch with its place in its group. `model` is the root of the sharded modules."""

    def __init__(self, model: Any, config: FSDPConfig):
        self._root = model
        self._units = [part for part in model.modules() if isinstance(part, FSDPModule) and part is not model]
        self._frees_after_forward = config.reshard_after_forward
        self._sums_late = config.use_no_sync_for_gradient_accumulation
        self._set = (config.reshard_after_forward, True)  # freed after forward, after backward

    def before_forward(self, number: int, count: int, group_size: int) -> None:
        """Before micro-batch `number` of `count` that has no backward."""
        self._keep(self._frees_after_forward and _ends_group(number, count, group_size), True)

    def before_training(self, number: int, count: int, group_size: int) -> None:
        """Before micro-batch `number` of `count` that has one. Replicas are added up once per optimizer step, and with
        `use_no_sync_for_gradient_accumulation` shards too."""
        is_last, ends = number == count - 1, _ends_group(number, count, group_size)
        self._keep(self._frees_after_forward and group_size == 1, ends)
        self._root.set_requires_all_reduce(is_last)
        self._root.set_requires_gradient_sync(is_last if self._sums_late else ends)

    def _keep(self, frees_after_forward: bool, frees_after_backward: bool) -> None:
        before, self._set = self._set, (frees_after_forward, frees_after_backward)
        for unit in self._units if frees_after_forward != before[0] else ():
            unit.set_reshard_after_forward(frees_after_forward, recurse=False)
        for unit in (self._root, *self._units) if frees_after_backward != before[1] else ():
            unit.set_reshard_after_backward(frees_after_backward, recurse=False)


def count_traffic(units: list[FSDPModule]) -> None:
    """Report the bytes that leave this rank in gathers and sums of `units` over shards (not those over replicas) to TRAFFIC,
    and the seconds that the calls take (on a GPU: until they are queued)."""
    gather, scatter = _CountedGather(), _CountedScatter()
    for unit in units:
        unit.set_custom_all_gather(gather)
        unit.set_custom_reduce_scatter(scatter)


class _CountedGather(DefaultAllGather):
    def __call__(
        self, output_tensor: Tensor, input_tensor: Tensor, group: dist.ProcessGroup, async_op: bool = False
    ) -> Any:
        began = time.perf_counter()
        work = super().__call__(output_tensor, input_tensor, group, async_op)
        TRAFFIC.add_gather(time.perf_counter() - began, input_tensor.nbytes * (group.size() - 1))
        return work


class _CountedScatter(DefaultReduceScatter):
    def __call__(
        self, output_tensor: Tensor, input_tensor: Tensor, group: dist.ProcessGroup, op: object, async_op: bool = False
    ) -> Any:
        began = time.perf_counter()
        work = super().__call__(output_tensor, input_tensor, group, op, async_op)
        TRAFFIC.add(time.perf_counter() - began, output_tensor.nbytes * (group.size() - 1))
        return work


_ON_PARAMETERS = hasattr(FSDPParam, "unsharded_accumulated_grad")  # sums wait there since PyTorch 2.15


class _Waiting:
    """The gradient of a gathered parameter among the sums that FSDP2 keeps until the exchange. Their dtype is free."""

    def __init__(self, parameter: FSDPParam, dtype: torch.dtype):
        self.parameter, self.dtype = parameter, dtype

    @property
    def grad(self) -> torch.Tensor | None:
        return self.parameter.unsharded_accumulated_grad

    @grad.setter
    def grad(self, value: torch.Tensor | None) -> None:
        if not _ON_PARAMETERS:
            self.parameter.unsharded_accumulated_grad = value
            return
        gathered = self.parameter._unsharded_param
        if value is not None and gathered.grad_dtype not in (None, value.dtype):
            gathered.grad_dtype = None
        gathered.grad = value

    def widen(self, gathered: nn.Parameter) -> None:
        """Add the gradient that autograd has made, such as the zeros of a parameter without use. FSDP2 exchanges gradients of
        one dtype."""
        gradient, gathered.grad = gathered.grad, None
        if gradient is not None:  # autograd calls this for a parameter whose gradient is in its buffer too
            self.grad = gradient.to(self.dtype) if self.grad is None else self.grad.add_(gradient)


class GatheredGradients(GradientBuffers):
    """Buffers for the gradients of gathered parameters, float32 or wider. FSDP2 exchanges them from there, with no rounding to
    the parameters' dtype before. A buffer is free for other parameters of its shape once they have been exchanged."""

    def __init__(self, units: Sequence[FSDPModule]):
        super().__init__({})
        self._units = units

    def wants(self, parameters: Sequence[nn.Parameter]) -> bool:
        """See GradientBuffers."""
        if not self._holders:  # all units have been gathered before the first backward
            for parameter in itertools.chain.from_iterable(map(fsdp_params, self._units)):
                if parameter.sharded_param.requires_grad:
                    full = parameter._unsharded_param
                    self._holders[full] = _Waiting(parameter, torch.promote_types(full.dtype, torch.float32))
                    full.register_post_accumulate_grad_hook(self._holders[full].widen)
        return super().wants(parameters)

    def _new_buffer(self, shape: tuple[int, ...], dtype: torch.dtype, device: torch.device) -> torch.Tensor:
        for before, buffer in self._buffers.items():
            waits = any(p in self._holders and self._holders[p].grad is not None for p in before)
            if buffer.shape == shape and buffer.dtype == dtype and not waits:
                return self._buffers.pop(before)
        return super()._new_buffer(shape, dtype, device)


def fsdp_params(unit: Any) -> list[FSDPParam]:
    """The parameters that FSDP2 gathers for `unit`."""
    group = unit._get_fsdp_state()._fsdp_param_group
    return group.fsdp_params if group is not None else []


def zero_unused_gradients(units: Iterable[Any], used: Collection[nn.Parameter] = ()) -> None:
    """Give every trained parameter of `units` a gradient in each backward, zero if the loss does not depend on it. Every loss
    depends on those in `used`.

    FSDP reduces the gradients that a rank has. A rank without predictions, or an expert without tokens, has none while another
    rank has one, and the ranks' messages would differ in size."""
    for unit in units:
        inner: list[Any] = [part for part in unit.modules() if isinstance(part, FSDPModule) and part is not unit]
        nested = {part for unit_inside in inner for part in unit_inside.modules()}
        inside = (
            (part, name, p) for part in unit.modules() if part not in nested for name, p in part._parameters.items()
        )
        places = [(part, name) for part, name, p in inside if p not in used]
        if places:  # before FSDP frees the gathered parameters
            unit.register_forward_hook(partial(_anchor, places), prepend=True)


def _anchor(places: list[tuple[nn.Module, str]], unit: nn.Module, inputs: object, output: object) -> object:
    parameters = [p for part, name in places if (p := part._parameters[name]) is not None and p.requires_grad]
    leaves, structure = tree_flatten(output)
    differentiable = [i for i, leaf in enumerate(leaves) if isinstance(leaf, torch.Tensor) and leaf.requires_grad]
    if not parameters or not differentiable:
        return output
    anchored = _Anchor.apply(len(differentiable), *(leaves[i] for i in differentiable), *parameters)
    for i, tensor in zip(differentiable, anchored, strict=True):
        leaves[i] = tensor
    return tree_unflatten(leaves, structure)


class _Anchor(torch.autograd.Function):
    """The first `count` tensors as they are, plus zero times the sum of the further ones."""

    @staticmethod
    def forward(ctx: AutogradContext, count: int, *tensors: torch.Tensor) -> tuple[torch.Tensor, ...]:
        ctx.set_materialize_grads(False)
        ctx.parameters = [(p.new_zeros(()), p.shape) for p in tensors[count:]]
        return tuple(t.view_as(t) for t in tensors[:count])

    @staticmethod
    def backward(ctx: AutogradContext, *grads: torch.Tensor | None) -> tuple[torch.Tensor | None, ...]:
        return None, *grads, *(zero.expand(shape) for zero, shape in ctx.parameters)


def sharded_units(model: nn.Module) -> list[FSDPModule]:
    """Every module that is sharded by itself or heads a group, the root included."""
    return [part for part in model.modules() if isinstance(part, FSDPModule)]


def shard_places(model: nn.Module) -> list[tuple[object, str]]:
    """The attributes (object, name) that hold this rank's part of each parameter: padded, as FSDP gathers it, and as the
    parameter shows it."""
    places: list[tuple[object, str]] = []
    for unit in sharded_units(model):
        for parameter in fsdp_params(unit):
            places += [(parameter, "_sharded_param_data"), (parameter.sharded_param, "_local_tensor")]
    return places


def _ends_group(number: int, count: int, group_size: int) -> bool:
    return number == count - 1 or (number + 1) % group_size == 0
