"""Masters and optimizer over Megatron's buffers, by Hugging Face name: on each rank the elements that its share of the
distributed optimizer holds, or all of its part without it."""

from __future__ import annotations

import copy
import math
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping
from typing import Any, NamedTuple, cast

import torch
import torch.distributed as dist
from torch import nn

from verl.config import OptimConfig
from verl.engines.megatron.groups import all_ranks
from verl.engines.megatron.placement import Placed
from verl.engines.state import Parameters
from verl.models.optim import MasterOptimizer, Rounded
from verl.models.optimizers import Divided, Muon
from verl.models.rounding import Rounding
from verl.models.visible import VisibleUpdate

_COPY = "@end"  # of the second tensor of a tied embedding, at the end of the pipeline


class Share(NamedTuple):
    """Elements `start` to `stop` of the flattened local part of a tensor: those that this rank's optimizer steps. `counts`: of
    the ranks that hold the same elements, this one is asked."""

    placed: Placed
    start: int
    stop: int
    counts: bool

    def of(self, tensor: torch.Tensor) -> torch.Tensor:
        """The elements in `tensor`, if it lies as the parameter does."""
        offset = self.placed.offset
        return tensor.view(-1)[offset + self.start : offset + self.stop]


def shares_of(placed: list[Placed], ddp: Any, ranks: Mapping[str, int]) -> list[Share]:
    """The elements that this rank steps, and all of its part of tensors that are frozen. `ranks`: its coordinates `tensor`,
    `data` and `expert_data`."""
    if ddp is None or not ddp[0].ddp_config.use_distributed_optimizer:
        return [Share(p, 0, _size(p), _counts(p, ranks, divided=False)) for p in placed]
    owned: dict[nn.Parameter, tuple[int, int]] = {}
    for chunk in ddp:
        for buffer in (*chunk.buffers, *chunk.expert_parallel_buffers):
            for parameter, (begin, end, bucket_id) in buffer.param_index_map.items():
                first, stop = buffer.bucket_indices[bucket_id]
                size = (stop - first) // buffer.data_parallel_world_size
                low = first + size * buffer.data_parallel_group.rank()
                owned[parameter] = (max(low, begin) - begin, min(low + size, end) - begin)
    shares = []
    for p in placed:
        low, high = owned.get(p.parameter, (0, p.parameter.numel()))
        start, stop = max(0, low - p.offset), min(_size(p), high - p.offset)
        shares.append(Share(p, start, max(start, stop), _counts(p, ranks, divided=p.parameter in owned)))
    return shares


def _size(placed: Placed) -> int:
    return placed.view().numel()


def _counts(placed: Placed, ranks: Mapping[str, int], *, divided: bool) -> bool:
    """Whether this rank speaks for its elements; `divided`: data-parallel ranks hold different ones."""
    replica = ranks["expert_data"] if placed.is_expert else ranks["data"]
    alone = placed.is_expert or placed.is_divided or ranks["tensor"] == 0
    return alone and not placed.is_copy and (divided or replica == 0)


class MegatronOptimizer(MasterOptimizer):
    """Steps the masters of `shares`; gradients come from Megatron's buffers. `names` are all tensors that train, in an order
    that is equal on all ranks."""

    def __init__(
        self,
        shares: list[Share],
        names: list[str],
        config: OptimConfig,
        rounding: Rounding,
        ddp: list[Any],
        module: nn.Module,
        divided: Divided,
    ):
        """`module` has the names of the complete model."""
        self.ddp, self.names, self.device = ddp, dict.fromkeys(names), divided.device
        # an empty one if other ranks hold all elements: every rank takes part in the norm
        steps = [s for s in shares if s.stop > s.start] or shares[:1]
        self.by_key = {_key(s.placed): s for s in steps}
        masters = {}
        for key, share in self.by_key.items():
            held = share.of(share.placed.parameter.detach())
            wide = torch.promote_types(held.dtype, torch.float32)
            masters[key] = nn.Parameter(held if held.dtype == wide else held.to(wide))
        holder: Any = copy.copy(module)
        holder.named_parameters = masters.items
        super().__init__(holder, config, next(iter(masters.values())).dtype, self._norm, rounding, divided=divided)

    def restart_measure(self) -> None:
        """Take the current weights as the weights at the start of the run."""
        self._visible = VisibleUpdate(self.rounded())

    def take_gradients(self) -> None:
        """Give the masters this rank's gradients, as Megatron has summed them over ranks."""
        for key, share in self.by_key.items():
            self.masters[key].grad = share.of(cast(Any, share.placed.parameter).main_grad).to(self.masters[key].dtype)

    @torch.no_grad()
    def round_masters(self) -> None:
        """See MasterOptimizer; afterwards every data-parallel rank has the weights of all."""
        for key, share in self.by_key.items():
            master, weights = self.masters[key].detach(), share.of(share.placed.parameter.detach())
            if weights.dtype != master.dtype:
                self._round(share, master, weights)
        for chunk in self.ddp:
            if chunk.ddp_config.use_distributed_optimizer:
                chunk.start_param_sync(force_sync=True)

    def _round(self, share: Share, master: torch.Tensor, weights: torch.Tensor) -> None:
        done = 0
        for region, shape in share.placed.blocks(share.start, share.stop):
            block = slice(done, done + math.prod(shape))
            self.rounding.write(weights[block].view(shape), share.placed.name, master[block].view(shape), region)
            done = block.stop

    def rounded(self) -> Iterator[Rounded]:
        """See MasterOptimizer, for the elements that this rank reports."""
        for key, share in self.by_key.items():
            weights = share.of(share.placed.parameter.detach())
            if share.counts and weights.numel() and weights.dtype != self.masters[key].dtype:
                yield Rounded(key, weights, self.masters[key].detach(), None)

    def state(self) -> dict[str, torch.Tensor]:
        """See MasterOptimizer, of all tensors: tensors that lie elsewhere are empty."""
        held, tensors = super().state(), {}
        for name in self.names if held else ():
            for slot, empty in self._slots(name, held).items():
                tensors[f"{name}/{slot}"] = held.get(f"{name}/{slot}", empty)
        return tensors

    def _slots(self, name: str, held: Mapping[str, torch.Tensor]) -> dict[str, torch.Tensor]:
        """A number, or an empty tensor, for each slot of tensor `name` in the optimizer's state, on every rank."""
        slots = {
            key.rpartition("/")[2]: value if not value.dim() else value.new_empty(0) for key, value in held.items()
        }
        if held and isinstance(self.optimizer, Muon):  # this rank may have tensors of one kind
            numbers, empty = torch.tensor(float(self.num_steps)), next(iter(self.masters.values())).new_empty(0)
            moments = {"step": numbers, "exp_avg": empty, "exp_avg_sq": empty}
            slots = {"momentum_buffer": empty} if name in self.optimizer.matrices else moments
        return slots

    def load_state(self, tensors: Iterable[tuple[str, torch.Tensor]], num_steps: int) -> None:
        """See MasterOptimizer; of tensors that lie elsewhere nothing is taken."""
        owners = ((key.rpartition("/")[0], key, value) for key, value in tensors)
        trained = ((key, value) for name, key, value in owners if name in self.masters or name not in self.names)
        super().load_state(trained, num_steps)

    def copy_from(self, name: str, gather: Callable[[str, torch.Tensor], torch.Tensor]) -> None:
        """Set master and state of this rank's copy of tensor `name`, if it has one, to the tensor's. `gather` returns the
        tensor, on all ranks together."""
        share, held = self.by_key.get(f"{name}{_COPY}"), super().state()
        empty = torch.empty(0, dtype=next(iter(self.masters.values())).dtype)
        values = {"": gather(name, self.masters[name].detach() if name in self.masters else empty)}
        for slot, like in self._slots(name, held).items():
            values[slot] = like if not like.dim() else gather(name, held.get(f"{name}/{slot}", empty))
        if share is None:
            return
        master = self.masters[f"{name}{_COPY}"]
        for slot, value in values.items():
            part = value if not value.dim() else share.placed.take(value).reshape(-1)[share.start : share.stop]
            if slot:
                self.optimizer.state[master][slot] = part.to(self.device, copy=True)
            else:
                master.detach().copy_(part)

    def _norm(self, masters: Mapping[str, nn.Parameter]) -> torch.Tensor:
        total = torch.zeros((), dtype=torch.float64)
        for key, master in masters.items():
            if self.by_key[key].counts and master.grad is not None:
                wide = torch.promote_types(master.grad.dtype, torch.float32)
                total = total.to(master.device) + master.grad.to(wide).square().sum().double()
        total = total.to(self.device)
        dist.all_reduce(total, group=all_ranks())
        return total.sqrt().to(next(iter(masters.values())).dtype)


def _key(placed: Placed) -> str:
    return f"{placed.name}{_COPY}" if placed.is_copy else placed.name


class MegatronParameters(Parameters):
    """The tensors of a model by Hugging Face name, in an order that is equal on all ranks; empty if this one has none."""

    are_parts = True

    def __init__(
        self, shares: list[Share], shapes: Mapping[str, tuple[int, ...]], device: torch.device, dtype: torch.dtype
    ):
        self.shares = {s.placed.name: s for s in shares if not s.placed.is_copy}
        self.shapes, self.device, self.dtype = dict(shapes), device, dtype
        self.optimizer: MegatronOptimizer | None = None  # set once there is one
        self.group = all_ranks()

    def cut_matrices(self, matrices: Collection[str]) -> list[str]:
        """See verl.models.optimizers.Divided; Megatron's buffers are cut anywhere."""
        return [name for name in self.shapes if name in matrices]

    def named(self) -> dict[str, torch.Tensor]:
        return {name: self._held(name) for name in self.shapes}

    def _held(self, name: str) -> torch.Tensor:
        if self.optimizer is not None and name in self.optimizer.masters:
            return self.optimizer.masters[name].detach()
        trains = self.optimizer is not None and name in self.optimizer.names
        if name in self.shares and not trains:
            return self.computing(name)
        is_wide = trains or name.startswith("score.")
        dtype = torch.promote_types(self.dtype, torch.float32) if is_wide else self.dtype
        return torch.empty(0, dtype=dtype, device=self.device)

    def computing(self, name: str) -> torch.Tensor:
        share = self.shares.get(name)
        if share is None:
            return torch.empty(0, dtype=self.dtype, device=self.device)
        return share.of(share.placed.parameter.detach())

    def shape(self, name: str) -> tuple[int, ...]:
        return self.shapes[name]

    def whole(self, name: str, value: torch.Tensor, dtype: torch.dtype) -> torch.Tensor:
        """Collective over all ranks. Bits are summed, so that negative zeros keep their sign."""
        wide = torch.promote_types(value.dtype, torch.float32)
        bits = torch.int64 if wide == torch.float64 else torch.int32
        out = torch.zeros(self.shapes[name], dtype=wide, device=self.device)
        share = self.shares.get(name)
        if share is not None and share.counts and value.numel():
            share.placed.put(out, value.to(self.device, wide), share.start)
        dist.all_reduce(out.view(bits), group=all_ranks())
        return out.to(dtype)

    def part(self, name: str, full: torch.Tensor) -> torch.Tensor:
        share = self.shares.get(name)
        if share is None:
            return full.new_empty(0)
        return share.placed.take(full).reshape(-1)[share.start : share.stop]
