"""State of an engine, and its weights for rollout, for any holder of its parameters."""

from collections.abc import Iterator, Mapping
from dataclasses import asdict
from functools import partial
from pathlib import Path
from typing import Any, cast

import torch
from torch import nn

from verl.engines.api import AdapterState, Deferred, EngineState, Tensors, whole
from verl.errors import CheckpointError, ModelError
from verl.models.folder import fetch, opened, read_headers
from verl.models.heads import is_further_head
from verl.models.hf_module import HFModule
from verl.models.lora import LoRASpec, is_adapter, lora_layers, merged, own_names, peft_names
from verl.models.loss_scale import LossScale
from verl.models.optim import MasterOptimizer
from verl.models.rounding import Rounding

_DTYPES = {"F64": torch.float64, "F32": torch.float32, "BF16": torch.bfloat16, "F16": torch.float16, "I64": torch.int64}


class Parameters:
    """The parameters of a module, with masters, if any: here on one device; a subclass has them over ranks."""

    are_parts = False  # whether a rank has parts of the tensors

    def __init__(self, module: HFModule, optimizer: MasterOptimizer | None):
        self.module, self.masters = module, optimizer.masters if optimizer else {}

    def named(self) -> dict[str, torch.Tensor]:
        """This rank's part of the (master) weights, by name; tied ones once."""
        return {name: self.masters.get(name, p).detach() for name, p in self.module.named_parameters()}

    def computing(self, name: str) -> torch.Tensor:
        """This rank's part of the weights that compute: the rounded master, if there is one."""
        return self.module.get_parameter(name).detach()

    def shape(self, name: str) -> tuple[int, ...]:
        """The shape of the full parameter."""
        return tuple(self.module.get_parameter(name).shape)

    def whole(self, name: str, value: torch.Tensor, dtype: torch.dtype) -> torch.Tensor:
        """The full tensor of `value`, laid out as parameter `name`. May be collective."""
        return value.to(dtype)

    def deferred(self, name: str, value: torch.Tensor) -> torch.Tensor | Deferred:
        """`value` for a state: built when it is written, if it is in parts."""
        gather = partial(self.whole, name, value, value.dtype)
        return Deferred(self.shape(name), value.dtype, gather) if self.are_parts else value

    def part(self, name: str, full: torch.Tensor) -> torch.Tensor:
        """The inverse of `whole`: this rank's part."""
        return full


class ReadBuffer:
    """Memory for one tensor of a file at a time. To give a process new pages takes eight times as long as to read them."""

    def __init__(self) -> None:
        self._bytes = torch.empty(0, dtype=torch.uint8)

    def whole(self, tensor: torch.Tensor | Deferred, target: torch.Tensor | None = None) -> torch.Tensor:
        """The tensor itself, until the next call. A file is read into a `target` of the same layout."""
        if not isinstance(tensor, Deferred) or tensor.read is None:
            return whole(tensor)
        if type(target) is torch.Tensor and target.device.type == "cpu" and target.is_contiguous():
            if (target.dtype, tuple(target.shape)) == (tensor.dtype, tensor.shape):
                tensor.read(target)
                return target
        size = tensor.numel() * tensor.element_size()
        if size > len(self._bytes):
            self._bytes = torch.empty(size, dtype=torch.uint8)
        buffer = self._bytes[:size].view(tensor.dtype).view(tensor.shape)
        tensor.read(buffer)
        return buffer


class TrainedState:
    """Reads and writes the EngineState of `module` through `parameters`."""

    def __init__(
        self,
        module: HFModule,
        parameters: Parameters,
        optimizer: MasterOptimizer | None,
        spec: LoRASpec | None,
        base: str,
        rounding: Rounding,
    ):
        self.parameters, self.optimizer, self.spec, self.base = parameters, optimizer, spec, base
        self.rounding = rounding
        self.scales = {name: layer.scale for name, layer in lora_layers(module).items()}
        self.task = getattr(module, "peft_task", "CAUSAL_LM")
        self.trains = {name for name, p in module.named_parameters() if p.requires_grad}
        self.untrained = UntrainedTensors(module, base)

    @torch.no_grad()
    def weights(self, dtype: torch.dtype) -> Iterator[tuple[str, torch.Tensor]]:
        """Full tensors, one at a time, as they compute in `dtype`: rounded masters, or what adapters are merged into."""
        held = self.parameters.named()
        for name in held:
            if is_adapter(name):
                continue
            if name.removesuffix(".weight") in self.scales:
                yield name, self.rounding.rounded(name, self._merged(held, name), dtype)
            else:
                yield name, self.parameters.whole(name, self.parameters.computing(name), dtype)

    def save(self, extra: dict[str, object]) -> EngineState:
        """The state, without copying."""
        held = self.parameters.named()
        model = {name: self._model_tensor(held, name) for name in held if not is_adapter(name)}
        model |= self.untrained.deferred
        optimizer: dict[str, Any] = {}
        for key, value in (self.optimizer.state() if self.optimizer else {}).items():
            optimizer[key] = self.parameters.deferred(key.rpartition("/")[0], value) if value.dim() else value
        extra = {**extra, "num_optimizer_steps": self.optimizer.num_steps if self.optimizer else 0}
        if self.untrained.deferred:
            extra["untrained"] = list(self.untrained.deferred)  # an export does not round them
        if self.optimizer is not None and self.optimizer.loss_scale is not None:
            extra["loss_scale"] = asdict(self.optimizer.loss_scale)
        return EngineState(model, optimizer, extra, self._adapter(held))

    @torch.no_grad()
    def load(self, state: EngineState) -> None:
        """Load weights (with adapters: the trained ones) and optimizer; empty parts stay as they are. Raises
        CheckpointError when names, shapes or dtypes are not this model's."""
        buffer = ReadBuffer()
        tensors: Mapping[str, Any] = {n: t for n, t in state.model.items() if n not in self.untrained}
        held = self.parameters.named()
        if self.spec is not None:
            tensors = own_names(state.adapter.tensors) if state.adapter else tensors
            held = {name: value for name, value in held.items() if name in self.trains}
        elif state.adapter is not None:
            tensors = state.adapter.tensors
        if tensors:
            self._check_names(held, tensors)
            for name, target in held.items():
                target.copy_(self.parameters.part(name, buffer.whole(tensors[name], target)))
            if self.optimizer is not None:
                self.optimizer.round_masters()
        # an optimizer that had taken no step has nothing to save, and shall be as it was then
        took_no_step = state.extra.get("num_optimizer_steps") == 0
        if self.optimizer is not None and (state.optimizer or took_no_step):
            parts = ((key, self._optimizer_part(key, buffer.whole(value))) for key, value in state.optimizer.items())
            self.optimizer.load_state(parts, state.extra.get("num_optimizer_steps", 0))
            if self.optimizer.loss_scale is not None:
                self.optimizer.loss_scale = LossScale(**state.extra.get("loss_scale", {}))

    def _merged(self, held: Mapping[str, torch.Tensor], name: str) -> torch.Tensor:
        def part(key: str) -> torch.Tensor:
            value = held[key]
            return self.parameters.whole(key, value, value.dtype)

        return merged(name, part, self.scales, self.spec is not None and self.spec.dora)

    def _model_tensor(self, held: Mapping[str, torch.Tensor], name: str) -> torch.Tensor | Deferred:
        value = held[name]
        if not self.scales:
            return self.parameters.deferred(name, value)
        dtype = torch.promote_types(value.dtype, torch.float32)
        return Deferred(self.parameters.shape(name), dtype, partial(self._build, name, dtype))

    @torch.no_grad()
    def _build(self, name: str, dtype: torch.dtype) -> torch.Tensor:
        return self._merged(self.parameters.named(), name).to(dtype)

    def _adapter(self, held: Mapping[str, torch.Tensor]) -> AdapterState | None:
        if self.spec is None:
            return None
        trained: Tensors = {n: self.parameters.deferred(n, value) for n, value in held.items() if n in self.trains}
        full_modules = sorted({name.rpartition(".")[0] for name in trained if not is_adapter(name)})
        adapted = [name for name in self.scales if f"{name}.lora_A" in trained]  # not of a frozen vision tower
        return AdapterState(peft_names(trained), self.spec.to_json(self.base, adapted, full_modules, self.task))

    def _check_names(self, held: Mapping[str, torch.Tensor], tensors: Mapping[str, Any]) -> None:
        different = sorted(set(held) ^ set(tensors))
        different = different or [n for n in held if self.parameters.shape(n) != tuple(tensors[n].shape)]
        if different:
            raise CheckpointError(
                f"The checkpoint does not fit this model: {different[0]} and {len(different) - 1} other tensors are "
                "missing, superfluous or of another shape. Resume with the model that the run was started with."
            )
        other = [n for n, value in held.items() if tensors[n].dtype != value.dtype]
        if other:
            raise CheckpointError(
                f"The checkpoint holds {other[0]} and {len(other) - 1} other tensors as {tensors[other[0]].dtype}, "
                f"and this run as {held[other[0]].dtype}. Resume with the dtype that the run was started with."
            )

    def _optimizer_part(self, key: str, value: torch.Tensor) -> torch.Tensor:
        name = key.rpartition("/")[0]
        if not value.dim() or name not in self.trains:
            return value  # the optimizer reports a wrong name
        if tuple(value.shape) != self.parameters.shape(name):
            raise CheckpointError(
                f"The checkpoint's {key} has shape {list(value.shape)}, the model's "
                f"{list(self.parameters.shape(name))}; it belongs to another model."
            )
        return self.parameters.part(name, value)


class UntrainedTensors:
    """The tensors of the folder or hub name `source` that training `module` leaves as they are, and that every checkpoint has
    again: heads that predict further tokens (transformers' models leave them out), and buffers, such as the biases of routers.
    `deferred` has them by name; it is empty on a rank without weight files: that rank writes no checkpoint."""

    def __init__(self, module: HFModule, source: str):
        self._config = getattr(module, "config", None)  # a module of a user may have none
        states = module.state_dict(keep_vars=True)
        self._buffers = {name for name, tensor in states.items() if not isinstance(tensor, nn.Parameter)}
        self.deferred: dict[str, Deferred] = {}
        try:
            folder = fetch(source, weights=False)
            headers = read_headers(folder)
        except ModelError:
            return
        for name, header in headers.items():
            if name in self and header.dtype in _DTYPES:
                build = partial(_read, folder / header.file, name)
                self.deferred[name] = Deferred(header.shape, _DTYPES[header.dtype], build, is_collective=False)

    def __contains__(self, name: str) -> bool:
        return name in self._buffers or (self._config is not None and is_further_head(name, self._config))


def _read(file: Path, name: str) -> torch.Tensor:
    with opened(file) as tensors:
        return cast("torch.Tensor", tensors.get_tensor(name))
