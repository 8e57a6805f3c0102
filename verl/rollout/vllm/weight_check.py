"""Checksums of the weights that vLLM's model holds against the sent weights, before they are packed for a processor.

    sent      q_proj  k_proj  v_proj       sums of integers do not depend on order: a fused parameter has the sum of its
    held      ─────── qkv_proj ──────      parts, and all ranks of tensor parallelism together have the undivided sum

vLLM fuses, divides and packs weights. A packed weight cannot be read any more, so each layer is read just before packing.
"""

from collections import Counter
from collections.abc import Callable, Mapping

import torch
import torch.distributed as dist
from torch import nn

from verl.errors import ModelError
from verl.models.hf_module import HFModule

_WORDS = {1: torch.int8, 2: torch.int16, 4: torch.int32, 8: torch.int64}  # by bytes of an element
_WRAP = (1 << 64) - 1
_HOOK = "process_weights_after_loading"  # processes the weights of a layer once they are loaded


class HeldWeights:
    """One update of `model` (vLLM's) from its beginning (this) to `check`. `group` are the ranks of tensor parallelism.
    `fused`: part -> the module that has it, and its number there; None: as the model says."""

    def __init__(
        self, model: HFModule, group: dist.ProcessGroup | None, fused: Mapping[str, tuple[str, int]] | None = None
    ):
        self._model, self._group = model, group
        self._fused = fused or {
            part: (fused, at)
            for fused, parts in (getattr(model, "packed_modules_mapping", None) or {}).items()
            for at, part in enumerate(parts)
        }
        self._formats = {name: p.dtype for name, p in model.named_parameters()}
        self._came: dict[str, set[int]] = {}  # parts of each parameter
        self._sent: dict[str, dict[int, int]] = {}  # sum of each part of a parameter
        self._seen: dict[str, int] = {}
        self._hooked: list[object] = []
        for prefix, layer in model.named_modules():
            method = getattr(layer, "quant_method", None)
            if hasattr(method, _HOOK):
                self._watch(prefix, layer, method)

    def sent(self, name: str, tensor: torch.Tensor) -> None:
        """A weight under its name in the model's files."""
        held_name, number = self.place(name)
        self._came.setdefault(held_name, set()).add(number)
        if self._formats.get(held_name) == tensor.dtype:
            self._sent.setdefault(held_name, {})[number] = word_sum(tensor)

    def format_of(self, name: str) -> torch.dtype | None:
        """The dtype of the parameter that holds a weight; None if no parameter has its name."""
        return self._formats.get(self.place(name)[0])

    def missing(self) -> str:
        """A parameter that was not sent, or not with all its parts; "" also if names were sent that the model does not have, as
        of packed experts."""
        if self._came.keys() - self._formats.keys():
            return ""
        num_parts = Counter(module for module, _ in self._fused.values())
        sizes = {name: max([1, *(num_parts[part] for part in name.split("."))]) for name in self._formats}
        return next((name for name, size in sizes.items() if len(self._came.get(name, ())) < size), "")

    def check(self) -> None:
        """Raise ModelError when a parameter differs from its sent weights. All ranks of the group call this, after `end`."""
        parameters = dict(self._model.named_parameters())
        names = sorted(self._sent.keys() & parameters.keys())
        held = [self._seen[n] if n in self._seen else word_sum(parameters[n]) for n in names]
        totals, size = torch.tensor(held, dtype=torch.int64), 1
        if self._group is not None:
            size = dist.get_world_size(self._group)
            dist.all_reduce(totals, group=self._group)
        for name, held_sum, total in zip(names, held, totals.tolist(), strict=True):
            if not _explained([self._sent[name][at] for at in sorted(self._sent[name])], held_sum, total, size):
                raise ModelError(
                    f"The rollout engine holds other values in {name} than it was sent. They must not be used: update again, "
                    "or use another version of vLLM."
                )

    def end(self) -> None:
        """Stop watching. May be called again."""
        for method in self._hooked:
            vars(method).pop(_HOOK, None)
        self._hooked = []

    def place(self, name: str) -> tuple[str, int]:
        """The parameter that holds a weight, and its number among the parts of it."""
        path, number = name.split("."), 0
        for at, part in enumerate(path):
            if part in self._fused and name not in self._formats:
                path[at], number = self._fused[part]
        return ".".join(path), number

    def _watch(self, prefix: str, layer: nn.Module, method: object) -> None:
        process: Callable[[object], None] = getattr(method, _HOOK)

        def look_and_process(this: object) -> None:
            if this is not layer:
                return process(this)
            for name, p in layer.named_parameters(recurse=False):
                self._seen[f"{prefix}.{name}"] = word_sum(p)
            _process_and_pack(method, process, layer)

        setattr(method, _HOOK, look_and_process)
        self._hooked.append(method)


def any_worker(flag: bool, group: dist.ProcessGroup | None) -> bool:
    """Whether `flag` is set on one of the ranks of `group`; all of them call this."""
    flags = torch.tensor([int(flag)])
    if group is not None:
        dist.all_reduce(flags, group=group)
    return bool(flags.item())


def _process_and_pack(method: object, process: Callable[[object], None], layer: nn.Module) -> None:
    """As vLLM does when it starts: in an update it leaves experts unpacked, and a processor reads them as packed (0.32)."""
    experts = getattr(getattr(method, "moe_kernel", None), "fused_experts", None)
    if experts is None or next(layer.parameters()).device.type != "cpu":
        return process(layer)
    pack = getattr(experts, _HOOK)
    setattr(experts, _HOOK, lambda layer: None)  # another version packs here, too
    try:
        process(layer)
    finally:
        vars(experts).pop(_HOOK)
    pack(layer)


def word_sum(tensor: torch.Tensor) -> int:
    """The sum modulo 2^64 of a tensor's elements, read as signed integers of their size."""
    words = tensor.detach().contiguous().view(-1).view(_WORDS[tensor.element_size()])
    return int(words.sum(dtype=torch.int64))


def _explained(parts: list[int], sum_of_rank: int, total: int, size: int) -> bool:
    """Whether a rank has all of it, or all ranks together; several ranks may hold the same heads of keys and values."""
    full, first = sum(parts), parts[0]
    possible = [sum_of_rank - full, *(total - first - times * (full - first) for times in range(1, size + 1))]
    return any(gap & _WRAP == 0 for gap in possible)
