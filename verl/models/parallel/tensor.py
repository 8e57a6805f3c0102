"""Tensor parallelism of decoders (Shoeybi et al. 2019, arXiv:1909.08053): the divided dimension of each weight, and
the sums of activations.

Attention heads and MLP columns are divided by output rows ("column"), the projections after them by input columns
("row"), embedding and output projection by vocabulary. A divided module is the plain module with a part of its weight; two
sums per layer in each direction, at the entrance and the exit of attention and MLP, make the result exact.
"""

from dataclasses import dataclass
from typing import Any
from weakref import WeakKeyDictionary

import torch
import torch.distributed as dist
from torch import nn
from transformers import PreTrainedConfig

from verl.errors import ConfigError
from verl.model_families import families_with
from verl.models.hf_module import HFModule
from verl.models.lora import LoRALinear
from verl.models.parallel.collectives import enter_group, leave_group, own_range
from verl.parallel.slices import COLUMN, ROW

_HEAD_NORMS = ("q_norm", "k_norm")


@dataclass(frozen=True)
class Cut:
    """The weight of a module is divided along `dim`, of length `total`, over the ranks of `group`."""

    dim: int
    total: int
    group: dist.ProcessGroup

    def here(self, index: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        """Indices of this rank's part, for indices along `dim`, and which of them are elsewhere; those are 0."""
        first, count = own_range(self.total, self.group)
        elsewhere = (index < first) | (index >= first + count)
        return (index - first).masked_fill(elsewhere, 0), elsewhere


_cuts: WeakKeyDictionary[nn.Module, Cut] = WeakKeyDictionary()


def cut_of(part: nn.Module) -> Cut | None:
    """The division of a module's weight; None if it is whole."""
    return _cuts.get(part)


class Division:
    """The division of a module's parameters: `dims[name]` is the dimension that is split over the group;
    parameters in `partial` are complete on each rank, but their gradients are parts of a sum."""

    def __init__(self) -> None:
        self.dims: dict[str, int] = {}
        self.partial: set[str] = set()


def check_divisible(config: PreTrainedConfig, size: int) -> None:
    """Raises ConfigError when a model cannot be divided over `size` ranks; costs no weights."""
    config = config.get_text_config()
    if size == 1:
        return
    if config.model_type not in (families := families_with("tensor")):
        raise ConfigError(
            f"Tensor parallelism knows {', '.join(families)}, not {config.model_type}. Set tensor_parallel_size=1 and "
            "shard only with FSDP."
        )
    heads = config.num_attention_heads
    kv_heads = getattr(config, "num_key_value_heads", None) or heads
    sizes = {"attention heads": heads, "key-value heads": kv_heads, "MLP columns": config.intermediate_size}
    for what, number in sizes.items():
        if number % size:
            raise ConfigError(
                f"tensor_parallel_size={size} does not divide the model's {number} {what}; choose a divisor of it."
            )


def divide(module: nn.Module, group: dist.ProcessGroup) -> Division:
    """Cut `module` (on the meta device or with weights) down to this rank's part, in place, and put the sums in.

    Tied weights stay tied. The module's forward is then to be called with equal inputs by all ranks of `group`.
    """
    division = Division()
    if group.size() == 1:
        return division
    names = {part: name for name, part in module.named_modules()}
    for part, name in names.items():
        leaf = name.rpartition(".")[2]
        if isinstance(part, nn.Linear) and leaf in COLUMN + ROW:
            _divide_linear(part, name, 0 if leaf in COLUMN else 1, group, division)
        elif leaf in _HEAD_NORMS:
            division.partial.update(f"{name}.{p}" for p, _ in part.named_parameters())
        if any(isinstance(getattr(part, child, None), nn.Linear) for child in ("q_proj", "gate_proj")):
            part.register_forward_pre_hook(_Entrance(group), with_kwargs=True)
    _divide_vocabulary(module, names, group, division)
    return division


def _divide_linear(part: nn.Linear, name: str, dim: int, group: dist.ProcessGroup, division: Division) -> None:
    _cut(part, "weight", name, dim, group, division)
    if part.bias is not None and dim == 0:
        _cut(part, "bias", name, 0, group, division)
    part.out_features, part.in_features = part.weight.shape
    if isinstance(part, LoRALinear):
        _cut(part, "lora_B" if dim == 0 else "lora_A", name, dim, group, division)
        division.partial.add(f"{name}.lora_A" if dim == 0 else f"{name}.lora_B")
    if dim == 1:
        part.register_forward_hook(_Exit(group))


def _divide_vocabulary(module: Any, names: dict[nn.Module, str], group: dist.ProcessGroup, division: Division) -> None:
    embedding = module.get_decoder().get_input_embeddings()
    head = module.get_output_embeddings() if hasattr(module, "get_output_embeddings") else None
    is_tied = head is not None and head.weight is embedding.weight
    _cut(embedding, "weight", names[embedding], 0, group, division)
    lookup = _Lookup(_cuts[embedding])
    if embedding.padding_idx is not None:
        padding, is_elsewhere = lookup.cut.here(torch.tensor(embedding.padding_idx))
        embedding.padding_idx = None if is_elsewhere else int(padding)
    embedding.register_forward_pre_hook(lookup.before)
    embedding.register_forward_hook(lookup.after)
    if head is None:
        return
    if is_tied:
        head.weight = embedding.weight
    else:
        _cut(head, "weight", names[head], 0, group, division)
    if head.bias is not None:
        _cut(head, "bias", names[head], 0, group, division)


def _cut(part: nn.Module, leaf: str, name: str, dim: int, group: dist.ProcessGroup, division: Division) -> None:
    parameter = getattr(part, leaf)
    division.dims[f"{name}.{leaf}"] = dim
    _cuts[part] = Cut(dim, parameter.shape[dim], group)
    first, count = own_range(parameter.shape[dim], group)
    shard = parameter.detach().narrow(dim, first, count).contiguous()
    setattr(part, leaf, nn.Parameter(shard, requires_grad=parameter.requires_grad))


class Exchange:
    """A hook that adds up what modules compute in parts; verl.models.decoder does so by itself."""

    def __init__(self, group: dist.ProcessGroup):
        self.group = group


class _Entrance(Exchange):
    """Before attention and MLP: the gradients of their shared input are summed once for all projections."""

    def __call__(self, module: HFModule, args: tuple[Any, ...], kwargs: dict[str, Any]) -> tuple[Any, dict[str, Any]]:
        if args:
            return (enter_group(args[0], self.group), *args[1:]), kwargs
        return args, {**kwargs, "hidden_states": enter_group(kwargs["hidden_states"], self.group)}


class _Exit(Exchange):
    """After a projection that was divided by input columns: the parts are summed. A bias is complete, and counts once."""

    def __call__(self, module: nn.Linear, args: tuple[object, ...], out: torch.Tensor) -> torch.Tensor:
        if module.bias is None:
            return leave_group(out, self.group)
        return leave_group(out - module.bias, self.group) + module.bias


class _Lookup(Exchange):
    """Hooks of the embedding: tokens of other ranks look up row 0. The sum over the ranks replaces it."""

    def __init__(self, cut: Cut):
        super().__init__(cut.group)
        self.cut, self.elsewhere = cut, torch.empty(0)

    def before(self, module: nn.Embedding, args: tuple[torch.Tensor, ...]) -> tuple[torch.Tensor]:
        ids, self.elsewhere = self.cut.here(args[0])
        return (ids,)

    def after(self, module: nn.Embedding, args: tuple[torch.Tensor, ...], out: torch.Tensor) -> torch.Tensor:
        return leave_group(out.masked_fill(self.elsewhere.unsqueeze(-1), 0.0), self.group)
