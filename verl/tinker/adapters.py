"""Many LoRA adapters on one base model in one process: an engine whose module has one adapter at a time.

An `Adapter` is an adapter with its optimizer and its gradients, outside of any module. `AdapterEngine.using` puts one into the
module by exchanging pointers, so a change of adapters copies nothing where the module computes in float32. Only adapters
train. Their results do not depend on the other adapters.
"""

from __future__ import annotations

import math
from collections.abc import Collection, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, field, replace
from typing import Any

import torch
from torch import nn

from verl.config import ModelConfig
from verl.engines.base import TrainedEngine
from verl.engines.local import LocalEngine
from verl.engines.step_check import PendingGradients
from verl.errors import ConfigError
from verl.models.adapter_weights import ALPHA, AdapterWeights
from verl.models.lora import LoRALinear, lora_layers

PARTS = ("attention", "mlp", "head")


@dataclass
class Adapter:
    """An adapter that trains. `slots` is the optimizer's state by parameter name and slot, `gradients` what forward_backward
    has gathered since the last optimizer step."""

    weights: AdapterWeights
    num_steps: int = 0
    slots: dict[str, dict[str, torch.Tensor]] = field(default_factory=dict)
    gradients: dict[str, torch.Tensor] = field(default_factory=dict)
    pending: PendingGradients | None = None

    def discard(self) -> None:
        """Forget the gradients."""
        self.gradients, self.pending = {}, None

    def to(self, device: torch.device) -> Adapter:
        """This adapter on a device."""
        slots = {n: {s: value.to(device) for s, value in states.items()} for n, states in self.slots.items()}
        gradients = {name: gradient.to(device) for name, gradient in self.gradients.items()}
        return Adapter(self.weights.to(device), self.num_steps, slots, gradients, self.pending)

    def snapshot(self) -> AdapterWeights:
        """A copy of the weights, which training leaves as they are."""
        tensors = {name: tensor.detach().clone() for name, tensor in self.weights.tensors.items()}
        return replace(self.weights, tensors=tensors)

    def optimizer_tensors(self) -> dict[str, torch.Tensor]:
        """The optimizer's state as "{parameter name}/{slot}", not copied."""
        return {f"{name}/{slot}": value for name, slots in self.slots.items() for slot, value in slots.items()}


class AdapterEngine(LocalEngine):
    """LocalEngine for adapters of rank `model.lora_rank` at most, on all linear layers and the output projection. Calls that
    train or compute are made inside `using`."""

    adapts_head = True

    def __init__(self, *, model: ModelConfig, **settings: Any):
        super().__init__(model=with_all_layers(model), **settings)
        require_turns(self)
        self._layers = lora_layers(self.module)

    def new_adapter(self, rank: int, seed: int, parts: Collection[str] = PARTS) -> Adapter:
        """See new_adapter."""
        return new_adapter(self, self._layers, rank, seed, parts)

    def held(self, adapter: Adapter) -> Adapter:
        """An adapter as this engine trains it."""
        return adapter.to(self.device)

    def whole(self, held: Adapter) -> Adapter:
        """The inverse of `held`, not copied."""
        return held

    @contextmanager
    def using(self, adapter: Adapter) -> Iterator[None]:
        """Inside, the module has `adapter`; what a call changes is the adapter's afterwards."""
        assert self.optimizer is not None
        masters, copied, slots = self.optimizer.masters, self.optimizer.copied, self.optimizer.optimizer.state
        present = {name: masters[name] for name in masters if name in adapter.weights.tensors}  # in one order
        self.show(adapter.weights)
        # other parameters show tensors of other adapters, which a step would decay
        self.optimizer.masters, self.optimizer.copied = present, [name for name in copied if name in present]
        for name, master in present.items():
            master.grad = adapter.gradients.get(name)
            if name in adapter.slots:
                slots[master] = adapter.slots[name]
        self.optimizer.num_steps, self._pending = adapter.num_steps, adapter.pending
        try:
            yield
        finally:
            self.optimizer.masters, self.optimizer.copied = masters, copied
            adapter.num_steps, adapter.pending, self._pending = self.optimizer.num_steps, self._pending, None
            adapter.gradients = {name: p.grad for name, p in present.items() if p.grad is not None}
            adapter.slots = {name: slots.pop(p) for name, p in present.items() if p in slots}
            for master in present.values():
                master.grad = None
            self.optimizer.gradients.release()  # the adapter has their memory: its gradients are views of them

    def show(self, weights: AdapterWeights | None) -> None:
        """Let the module compute with `weights` (None: as the base model) until something else is shown or used."""
        layers = set() if weights is None else set(weights.layers)
        for name, layer in self._layers.items():
            layer.active = name in layers
        if weights is not None:
            for name in layers:
                self._layers[name].scale = weights.scale
            for name, tensor in weights.tensors.items():
                self._place(name, tensor)

    def _place(self, name: str, tensor: torch.Tensor) -> None:
        """Let the parameter `name` be `tensor`, and where it computes in a narrower dtype its rounded values."""
        assert self.optimizer is not None
        master, parameter = self.optimizer.masters[name], self.optimizer.parameters[name]
        master.data = tensor
        if parameter is not master:
            parameter.data = self.rounding.rounded(name, tensor, parameter.dtype)


def with_all_layers(model: ModelConfig) -> ModelConfig:
    """A model section with adapters on all linear layers."""
    return replace(model, target_modules="all-linear", lora_alpha=ALPHA)


def require_turns(engine: TrainedEngine) -> None:
    """Raise ConfigError for a dtype in which models cannot take turns."""
    if engine.compute_dtype == torch.float16:
        raise ConfigError(
            "Adapters that take turns have no loss scales, so they do not train in float16. Use bfloat16."
        )


def new_adapter(
    engine: TrainedEngine, layers: Mapping[str, LoRALinear], rank: int, seed: int, parts: Collection[str]
) -> Adapter:
    """An adapter on the `parts` of each of the `layers`; equal seeds give equal weights. Raises ConfigError for a rank beyond
    the engine's, and without any layer."""
    assert engine.spec is not None
    if not 1 <= rank <= engine.spec.rank:
        raise ConfigError(f"An adapter of rank {rank} is not between 1 and the largest rank here, {engine.spec.rank}.")
    generator, tensors, head = torch.Generator().manual_seed(seed), {}, engine.module.get_output_embeddings()
    device, dtype = engine.device, torch.promote_types(engine.compute_dtype, torch.float32)
    for name, layer in layers.items():
        if part_of_adapter(name, is_head=layer is head) in parts:
            down = torch.empty(rank, layer.in_features)
            nn.init.kaiming_uniform_(down, a=math.sqrt(5), generator=generator)
            tensors[f"{name}.lora_A"] = down.to(device, dtype)
            tensors[f"{name}.lora_B"] = torch.zeros(layer.out_features, rank, device=device, dtype=dtype)
    if not tensors:
        raise ConfigError("An adapter without layers trains nothing. Choose attention, MLP or the output projection.")
    return Adapter(AdapterWeights(rank, tensors))


def part_of_adapter(layer: str, *, is_head: bool) -> str:
    """The one of PARTS that a layer belongs to."""
    if is_head:
        return "head"
    return "attention" if "attn" in layer or "attention" in layer else "mlp"
