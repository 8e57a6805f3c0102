"""Engines whose parameters stay where they are: models that take turns are copied into them and out of them.

Parameters of a sharded module, and all weights of a model, cannot be exchanged by pointers: FSDP2 gathers from the memory that
it has made, and the decoder reads projections that lie back to back. So a rank has its part of each model beside them.

Adapters fill the layers of the largest rank up with zeros. Gradients of these are 0, so they stay 0, and no sum changes.
"""

from __future__ import annotations

from collections.abc import Collection, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, replace
from typing import Any

import torch

from verl.config import ModelConfig
from verl.data_proto.proto import DataProto
from verl.engines.base import TrainedEngine
from verl.engines.fsdp import FSDPEngine
from verl.engines.local import LocalEngine
from verl.engines.micro_batches import BatchPlan
from verl.errors import ConfigError
from verl.models.adapter_weights import AdapterWeights
from verl.models.lora import lora_layers
from verl.models.parallel.collectives import local
from verl.tinker.adapters import PARTS, Adapter, new_adapter, require_turns, with_all_layers


class CopiedModels(TrainedEngine):
    """A TrainedEngine for models in turn: adapters up to `model.lora_rank`, or with a rank of 0, models with all weights. Calls
    that train or compute are made inside `using`. All ranks make the same calls."""

    adapts_head = True
    rows: Sequence[int] | None = None  # the ones of a batch that this rank computes; None: all

    def __init__(self, *, model: ModelConfig, **settings: Any):
        super().__init__(model=with_all_layers(model) if model.lora_rank else model, **settings)
        require_turns(self)
        assert self.optimizer is not None
        self._layers = lora_layers(self.module)
        masters = {name: local(master).detach() for name, master in self.optimizer.masters.items()}
        self._base = {name: m.clone() if self.spec is None else torch.zeros(()) for name, m in masters.items()}
        self._shown: AdapterWeights | None = None

    def new_adapter(self, rank: int, seed: int, parts: Collection[str] = PARTS) -> Adapter:
        """A new model. Raises ConfigError as `new_adapter` of adapters does, and for parts of a model with all weights."""
        if self.spec is not None:
            return new_adapter(self, self._layers, rank, seed, parts)
        if set(parts) != set(PARTS):
            raise ConfigError("A model that trains all its weights has all parts. Leave out the choice of parts.")
        parameters, dtype = self._trained.parameters, torch.promote_types(self.compute_dtype, torch.float32)
        return Adapter(AdapterWeights(0, {n: parameters.whole(n, t, dtype).clone() for n, t in self._base.items()}))

    def _plan(
        self, batch: DataProto, requested: Any, micro: Any, units: Any = None, rows: Any = None, noise: Any = None
    ) -> BatchPlan:
        return super()._plan(batch, requested, micro, units, self.rows, noise)

    def held(self, adapter: Adapter) -> HeldModel:
        """This rank's part of a model."""
        weights, slots = adapter.weights.tensors, dict[str, dict[str, torch.Tensor]]()
        if adapter.slots:  # of layers without an adapter they are 0
            first = next(iter(adapter.slots.values()))
            empty = {slot: torch.zeros(()) if value.dim() else value for slot, value in first.items()}
            counts = {slot for slot, value in first.items() if not value.dim()}
            for name in self._base:
                states = adapter.slots.get(name, empty)
                slots[name] = {s: v.clone() if s in counts else self._part(name, v) for s, v in states.items()}
        parts = {name: self._part(name, weights.get(name, torch.zeros(()))) for name in self._base}
        gradients = {name: self._part(name, value) for name, value in adapter.gradients.items()}
        return HeldModel(
            replace(adapter.weights, tensors=parts),
            adapter.num_steps,
            slots,
            gradients,
            adapter.pending,
            tuple(weights),
        )

    def whole(self, held: Adapter) -> Adapter:
        """The inverse of `held`; its tensors may be the engine's. All ranks get it together."""
        assert isinstance(held, HeldModel)
        slots = {
            name: {slot: self._full(held, name, v) if v.dim() else v for slot, v in held.slots[name].items()}
            for name in held.names
            if name in held.slots
        }
        gradients = {
            name: self._full(held, name, held.gradients[name]) for name in held.names if name in held.gradients
        }
        tensors = {name: self._full(held, name, held.weights.tensors[name]) for name in held.names}
        weights = replace(held.weights, tensors=tensors)
        return Adapter(weights, held.num_steps, slots, gradients, held.pending)

    def _part(self, name: str, value: torch.Tensor) -> torch.Tensor:
        """This rank's part of a parameter whose first rows and columns are `value`, and the other ones 0."""
        assert self.optimizer is not None
        parameters = self._trained.parameters
        full = torch.zeros(parameters.shape(name), dtype=self.optimizer.masters[name].dtype, device=self.device)
        if value.dim():
            full[tuple(map(slice, value.shape))] = value.to(full)
        return parameters.part(name, full)

    def _full(self, held: HeldModel, name: str, part: torch.Tensor) -> torch.Tensor:
        full = self._trained.parameters.whole(name, part, part.dtype)
        if self.spec is None:
            return full
        rank = held.weights.rank
        return (full[:rank] if name.endswith(".lora_A") else full[:, :rank]).contiguous()

    @contextmanager
    def using(self, held: Adapter) -> Iterator[None]:
        """Inside, the module has the model; what a call changes is the model's afterwards."""
        assert self.optimizer is not None
        optimizer, slots = self.optimizer, self.optimizer.optimizer.state
        self.show(held.weights)
        for name, master in optimizer.masters.items():
            master.grad = held.gradients.get(name)
            if name in held.slots:
                slots[master] = held.slots[name]
        optimizer.num_steps, self._pending = held.num_steps, held.pending
        try:
            yield
        finally:
            has_stepped, held.num_steps = optimizer.num_steps != held.num_steps, optimizer.num_steps
            held.pending, self._pending = self._pending, None
            held.gradients = {name: m.grad for name, m in optimizer.masters.items() if m.grad is not None}
            held.slots = {name: slots.pop(m) for name, m in optimizer.masters.items() if m in slots}
            for name, master in optimizer.masters.items():
                master.grad = None
                if has_stepped:
                    local(held.weights.tensors[name]).copy_(local(master.detach()))
            optimizer.gradients.release()  # the model has their memory

    @torch.no_grad()
    def show(self, weights: AdapterWeights | None) -> None:
        """Let the module compute with `weights` (None: as the base model) until something else is shown or used."""
        if weights is self._shown:
            return
        assert self.optimizer is not None
        tensors = self._base if weights is None else weights.tensors
        for name, master in self.optimizer.masters.items():
            local(master.detach()).copy_(local(tensors[name]))
        for layer, scale in () if weights is None else [(one, weights.scale) for one in self._layers.values()]:
            layer.scale = scale
        self.optimizer.round_masters()
        self.free_cached_memory()
        self._shown = weights


@dataclass
class HeldModel(Adapter):
    """A rank's part of a model. `names` are the parameters that the model has."""

    names: tuple[str, ...] = ()


class ShardedModels(CopiedModels, FSDPEngine):
    """Models in turn over several ranks."""


class FullModels(CopiedModels, LocalEngine):
    """Models with all weights, in turn on one device."""
