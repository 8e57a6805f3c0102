"""The optimizers of ZeRO 1 to 3 as a MasterOptimizer: masters and state by name of parameter, a step that can be refused, and
our rounding of the masters."""

from __future__ import annotations

import logging
import math
from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import contextmanager
from typing import Any, NamedTuple, cast

import torch
import torch.distributed as dist
from torch import nn

from verl.config import OptimConfig
from verl.engines.deepspeed.library import combined_norm
from verl.errors import CheckpointError, ConfigError
from verl.models.grad_buffers import GradientBuffers
from verl.models.optim import AdamStep, MasterOptimizer, OptimizerStep, Rounded
from verl.models.parallel.collectives import gather_rows
from verl.models.rounding import Region, Rounding
from verl.models.visible import VisibleUpdate

log = logging.getLogger(__name__)


class FlatSlice(NamedTuple):
    """`size` elements from `start` on of a flattened tensor; they lie at `offset` of the flat buffer number `buffer`."""

    start: int
    size: int
    buffer: int = 0
    offset: int = 0


class FlatShards:
    """Slices of flattened parameters, wherever the cuts fall: `slices` of this rank, and sizes of all. They lie in rank
    order and cover the tensor."""

    def __init__(self, shapes: Mapping[str, tuple[int, ...]], slices: Mapping[str, FlatSlice], device: torch.device):
        """Collective, on `device`. All ranks name the same tensors in `slices`."""
        self.shapes, self.slices = dict(shapes), dict(slices)
        world: Any = dist.group.WORLD
        self.group = world
        own_sizes = torch.tensor([part.size for part in slices.values()], device=device)
        sizes = [torch.empty_like(own_sizes) for _ in range(self.group.size())]
        dist.all_gather(sizes, own_sizes, group=self.group)
        self.sizes = dict(zip(slices, torch.stack(sizes, 1).tolist(), strict=True))
        assert all(sum(rank_sizes) == math.prod(self.shapes[name]) for name, rank_sizes in self.sizes.items())

    def region(self, name: str) -> Region:
        """The place of this rank's slice in the flattened tensor."""
        return Region((math.prod(self.shapes[name]),), (self.slices[name].start,))

    def whole(self, name: str, value: torch.Tensor, device: torch.device, dtype: torch.dtype) -> torch.Tensor:
        """The tensor that has `value` [size] as this rank's slice. Collective; every rank gets it."""
        return gather_rows(value.to(device, dtype), self.sizes[name], self.group).view(self.shapes[name])

    def part(self, name: str, full: torch.Tensor) -> torch.Tensor:
        """This rank's slice of `full`."""
        piece = self.slices[name]
        return full.reshape(-1)[piece.start : piece.start + piece.size]


class ZeroOptimizer(MasterOptimizer):
    """The optimizer of `engine`, DeepSpeed's, over `parameters` by name. `initial` are their float32 values; DeepSpeed has
    rounded its own before it took masters from them. `masters` are this rank's slices, views of DeepSpeed's buffers."""

    def __init__(
        self,
        engine: Any,
        parameters: Mapping[str, nn.Parameter],
        initial: Mapping[str, torch.Tensor],
        config: OptimConfig,
        rounding: Rounding,
    ):
        self.config, self.rounding, self.num_steps = config, rounding, 0
        self.engine, self.zero = engine, engine.optimizer
        self.partitions_parameters = engine.zero_optimization_partition_weights()
        self.parameters = dict(parameters)
        self.gradients = GradientBuffers({})
        self.skips_step = False  # nothing has trained
        shapes = {name: whole_shape(p) for name, p in self.parameters.items()}
        device = next(iter(self.parameters.values())).device
        self.shards, self.flat = {}, FlatShards(shapes, dict(self._slices()), device)
        self._accept: Callable[[float], bool] | None = None
        self._grad_norm: float | None = None
        self._exact: list[tuple[torch.Tensor, torch.Tensor]] = []
        self._intercept()
        for name, value in initial.items():
            self.masters[name].copy_(self.flat.part(name, value))
        self.round_masters()
        self._visible = VisibleUpdate(self.rounded())

    @property
    def masters(self) -> dict[str, torch.Tensor]:  # type: ignore[override]
        """This rank's slices of the masters, by name; empty tensors for parameters without a slice here."""
        buffers = self._buffers()
        parts = self.flat.slices.items()
        return {n: buffers[part.buffer].detach().narrow(0, part.offset, part.size) for n, part in parts}

    def backward(self, loss: torch.Tensor) -> None:
        """See MasterOptimizer."""
        self.engine.backward(loss * dist.get_world_size(), scale_wrt_gas=False)  # DeepSpeed divides by the ranks

    def step(self, lr: float | AdamStep, accept: Callable[[float], bool] | None = None) -> OptimizerStep:
        """See MasterOptimizer. DeepSpeed reports every norm that is not finite as infinite. Raises ConfigError for an AdamStep,
        since DeepSpeed's clipping is fixed when it starts."""
        if isinstance(lr, AdamStep):
            raise ConfigError("DeepSpeed takes a learning rate for a step and no other value. Set strategy=fsdp.")
        for group in self.zero.param_groups:
            group["lr"] = lr
        self._accept, self._grad_norm = accept, None
        with self._exact_afterwards():
            self.engine.step()
        grad_norm = math.inf if self._grad_norm is None else self._grad_norm
        taken = not self.zero.overflow
        self.num_steps += int(taken)
        if not taken and not math.isfinite(grad_norm):
            log.warning("The gradient norm is %s; this optimizer step is skipped and no weight changes.", grad_norm)
        self.skips_step = False
        self.gradients.release()
        return OptimizerStep(grad_norm, taken)

    def forget_gradients(self) -> None:
        self.zero.zero_grad()
        self.gradients.release()

    @torch.no_grad()
    def round_masters(self) -> None:
        """Write the masters into the module, on all ranks together."""
        with self._exact_afterwards():
            for number in range(len(self._buffers())):
                self._round(number)
            if not self.partitions_parameters:
                self.zero.update_lp_params()
                return
            self.zero._partition_all_parameters()
            for number in range(len(self._buffers())):
                self.zero._reassign_or_swap_out_partitioned_parameters(number)
            if self.zero.persistent_parameters:
                self.zero.persistent_parameters[0].all_gather(self.zero.persistent_parameters)

    def rounded(self) -> Iterator[Rounded]:
        """See MasterOptimizer: this rank's slices."""
        for name, master in self.masters.items():
            weights = self.computing(name)
            if weights.dtype != master.dtype:
                yield Rounded(name, weights, master, self.flat.region(name))

    def computing(self, name: str) -> torch.Tensor:
        """This rank's slice of the weights that compute."""
        parameter, piece = self.parameters[name], self.flat.slices[name]
        if self.partitions_parameters:
            return partition(parameter)
        return parameter.detach().view(-1).narrow(0, piece.start, piece.size)

    def move_state(self, device: torch.device) -> None:
        """DeepSpeed's offload decides on the place of its state."""

    def state(self) -> dict[str, torch.Tensor]:
        """See MasterOptimizer; slots of slices are this rank's."""
        buffers, tensors = self._buffers(), {}
        for name, part in self.flat.slices.items():
            for slot, value in self.zero.optimizer.state.get(buffers[part.buffer], {}).items():
                if isinstance(value, torch.Tensor) and value.dim():
                    value = value.detach().narrow(0, part.offset, part.size)
                tensors[f"{name}/{slot}"] = torch.as_tensor(value)
        return tensors

    def load_state(self, tensors: Iterable[tuple[str, torch.Tensor]], num_steps: int) -> None:
        """The inverse of `state`. Raises CheckpointError."""
        state, buffers = self.zero.optimizer.state, self._buffers()
        state.clear()
        self.num_steps = num_steps
        slices = self.flat.slices
        for key, value in tensors:
            name, _, slot = key.rpartition("/")
            if name not in slices:
                raise CheckpointError(
                    f"The checkpoint has optimizer state for {name!r}, which this model does not train; it "
                    "belongs to another model."
                )
            buffer = buffers[slices[name].buffer]
            slots = state[buffer]
            if not value.dim():
                slots[slot] = value.to(buffer.device, copy=True) if slot == "step" else value.clone()
                continue
            if slot not in slots:
                slots[slot] = torch.zeros_like(buffer.detach(), dtype=value.dtype)
            slots[slot].narrow(0, slices[name].offset, slices[name].size).copy_(value)

    def _buffers(self) -> list[torch.Tensor]:
        """DeepSpeed's flat masters, in float32."""
        name = "fp32_partitioned_groups_flat" if self.partitions_parameters else "single_partition_of_fp32_groups"
        return list(getattr(self.zero, name))

    def _slices(self) -> Iterator[tuple[str, FlatSlice]]:
        for name, p in self.parameters.items():
            if self.partitions_parameters:
                buffer, offset, _ = self.zero.grad_position[self.zero.get_param_id(p)]
                yield name, partition_slice(p)._replace(buffer=buffer, offset=offset)
                continue
            buffer = next(i for i, group in enumerate(self.zero.bit16_groups) if any(q is p for q in group))
            mapping = cast(Any, p)._hp_mapping
            if mapping is None:
                yield name, FlatSlice(0, 0, buffer, 0)
            else:
                computed, master = mapping.lp_fragment_address, mapping.get_hp_fragment_address()
                yield name, FlatSlice(computed.start, computed.numel, buffer, master.start)

    def _intercept(self) -> None:
        """DeepSpeed leaves a step out if the norm is not finite: it is made so if the step is refused."""
        step = self.zero._optimizer_step

        def rounding_step(number: int) -> None:
            step(number)
            self._round(number)

        self.zero._optimizer_step = rounding_step
        if self.partitions_parameters:
            norms = self.zero._get_norm_groups
            self.zero._get_norm_groups = lambda: [self._checked(combined_norm(norms()))]
            return
        norm = self.zero.scaled_global_norm
        self.zero.check_overflow = lambda partition_gradients=True: None  # the norm shows it
        self.zero.scaled_global_norm = lambda norm_type=2: self._checked(norm())

    def _checked(self, norm: torch.Tensor) -> torch.Tensor:
        self._grad_norm = norm.item()
        accepted = self._accept is None or self._accept(self._grad_norm)  # asked on every rank
        if accepted and math.isfinite(self._grad_norm) and not self.skips_step:
            return norm
        return torch.full_like(norm, math.inf)

    @torch.no_grad()
    def _round(self, number: int) -> None:
        """Put rounded values into a buffer of masters, for DeepSpeed to take its compute weights from; the masters are kept."""
        buffer = self._buffers()[number].detach()
        in_buffer = [(n, part) for n, part in self.flat.slices.items() if part.buffer == number]
        dtype = next(iter(self.parameters[name].dtype for name, _ in in_buffer))
        if dtype == buffer.dtype:
            return
        self._exact.append((buffer, buffer.clone()))
        for name, part in in_buffer:
            master = buffer.narrow(0, part.offset, part.size)
            master.copy_(self.rounding.rounded(name, master, dtype, self.flat.region(name)))

    @contextmanager
    def _exact_afterwards(self) -> Iterator[None]:
        try:
            yield
        finally:
            for buffer, exact in self._exact:
                buffer.copy_(exact)
            self._exact = []


def whole_shape(parameter: Any) -> tuple[int, ...]:
    """The shape of a parameter that stage 3 has taken apart."""
    return tuple(parameter.ds_shape if hasattr(parameter, "ds_shape") else parameter.shape)


def partition_slice(parameter: Any) -> FlatSlice:
    """This rank's slice of a parameter of stage 3."""
    size, numel = parameter.partition_numel(), int(parameter.ds_numel)
    start = min(dist.get_rank() * size, numel)
    return FlatSlice(start, min(size, numel - start))


def partition(parameter: Any) -> torch.Tensor:
    """This rank's weights of a parameter [size], without padding."""
    held: torch.Tensor = parameter.ds_tensor
    return held.detach().narrow(0, 0, partition_slice(parameter).size)
