"""Sharding of a meta-device model over ranks, filled from rank 0."""

import inspect
import itertools
from collections.abc import Callable, Iterator, Sequence
from functools import partial
from typing import Any

import torch
from torch import nn
from torch.distributed.fsdp import CPUOffloadPolicy, FSDPModule, MixedPrecisionPolicy, OffloadPolicy, fully_shard

from verl.config import FSDPConfig
from verl.engines.fsdp_units import count_traffic, sharded_units, zero_unused_gradients
from verl.engines.groups import ProcessGroups
from verl.engines.hybrid_3d import Dimensions
from verl.engines.rounded import gather_rounded
from verl.engines.shards import Shard
from verl.engines.streamed import decoder_layers
from verl.errors import ConfigError, ModelError, VerlError
from verl.models.forward import make_units
from verl.models.heads import ScalarHeadModel
from verl.models.parallel.experts import DispatchedExperts, divide_experts, is_experts
from verl.models.parallel.forward import ParallelModel
from verl.models.parallel.tensor import divide
from verl.models.rounding import Rounding
from verl.models.vision import is_vision_model, language_model_of, vision_towers
from verl.parallel.device import parse_dtype
from verl.registry import load_object, match_all


def shard_model(
    module: nn.Module,
    source: object,
    groups: ProcessGroups,
    config: FSDPConfig,
    compute_dtype: torch.dtype,
    device: torch.device,
    rounding: Rounding,
    *,
    pins: bool = True,
) -> tuple[ParallelModel, dict[str, Shard]]:
    """Divide `module` (on the meta device) over the ranks of `groups` and fill it with the weights of `source`. Only the
    first rank has `source` (None elsewhere). One layer at a time is complete on a rank. With `pins`, shards that
    `offload_policy` keeps on the host of a GPU are in pinned memory. Returns the model to call, and the shard of each parameter
    by its Hugging Face name."""
    shapes = {name: p.shape for name, p in module.named_parameters()}
    experts = set(divide_experts(module, groups.expert, DispatchedExperts)) if groups.expert is not None else set()
    division = divide(module, groups.tensor)
    shards = {
        name: Shard(
            name,
            parameter,
            shapes[name],
            division.dims.get(name),
            name.rpartition(".")[0] in experts,
            name in division.partial,
        )
        for name, parameter in module.named_parameters()
    }
    model = ParallelModel(module, groups.sequence, groups.tensor)
    fill = _Filler(module, source, shards, groups, device)
    fill.buffers()
    groups_of_layers = _groups_of_layers([part for part in _layers(module, config) if not is_experts(part)], config)
    on_host = CPUOffloadPolicy(pin_memory=pins and torch.cuda.is_available())
    shard = partial(_shard, fill=fill, config=config, offload=on_host if config.offload_policy else OffloadPolicy())
    parts = [part for unit in groups_of_layers for part in unit]
    model.in_units = make_units(module, parts, device, compute_dtype)
    for part in [p for p in module.modules() if groups.expert is not None and is_experts(p)]:
        shard([part], groups.experts_mesh, compute_dtype)
    for unit in groups_of_layers:
        shard(unit, groups.params_mesh, compute_dtype)
    if isinstance(module, ScalarHeadModel):  # its head keeps a wider dtype
        shard([module.score], groups.params_mesh, module.score.weight.dtype)
    shard([model], groups.params_mesh, compute_dtype, is_root=True)
    _configure(model, [unit[0] for unit in groups_of_layers], config)
    final = dict(module.named_parameters())
    placed = {n: Shard(n, final[n], s.shape, s.tensor_dim, s.is_expert, s.partial) for n, s in shards.items()}
    return model, gather_rounded(placed, sharded_units(model), groups, rounding)


def from_first(groups: ProcessGroups, device: torch.device, build: Callable[[], object]) -> Any:
    """`build()` on the first rank, None on all further ranks. When it fails, all ranks raise its error."""
    built, error, text = None, None, b""
    if groups.is_first:
        try:
            built = build()
        except VerlError as caught:
            error, text = caught, str(caught).encode()
    size = int(groups.broadcast_(torch.tensor([len(text)], device=device)))
    if size:
        sent = groups.broadcast_(torch.tensor(list(text) or [0] * size, dtype=torch.uint8, device=device))
        raise error or ModelError(bytes(sent.tolist()).decode())
    return built


class _Filler:
    """Replaces parameters on the meta device by this rank's part of the first rank's parameters."""

    def __init__(
        self, module: nn.Module, source: Any, shards: dict[str, Shard], groups: ProcessGroups, device: torch.device
    ):
        self.module, self.groups, self.device = module, groups, device
        self.source = dict(source.named_parameters()) if source is not None else {}
        self.source_buffers = dict(source.named_buffers()) if source is not None else {}
        self.shards = {id(shard.parameter): shard for shard in shards.values()}
        self.sites: dict[int, list[tuple[nn.Module, str]]] = {}
        for part in module.modules():
            for leaf, parameter in part.named_parameters(recurse=False):
                self.sites.setdefault(id(parameter), []).append((part, leaf))

    @torch.no_grad()
    def __call__(self, unit: nn.Module) -> None:
        for parameter in list(unit.parameters()):
            if not parameter.is_meta:
                continue
            shard = self.shards[id(parameter)]
            full = torch.empty(shard.shape, dtype=parameter.dtype, device=self.device)
            if self.groups.is_first:
                full.copy_(self.source.pop(shard.name))
            part = shard.own_part(self.groups, self.groups.broadcast_(full))
            filled = nn.Parameter(part.contiguous(), requires_grad=parameter.requires_grad)
            for owner, leaf in self.sites[id(parameter)]:
                setattr(owner, leaf, filled)

    @torch.no_grad()
    def buffers(self) -> None:
        """Fill all buffers, including buffers that are not saved (rotary frequencies)."""
        for name, buffer in list(self.module.named_buffers()):
            filled = torch.empty(buffer.shape, dtype=buffer.dtype, device=self.device)
            if self.groups.is_first:
                filled.copy_(self.source_buffers[name])
            self.groups.broadcast_(filled)
            owner, _, leaf = name.rpartition(".")
            part = self.module.get_submodule(owner)
            part.register_buffer(leaf, filled, persistent=leaf not in part._non_persistent_buffers_set)


def _shard(
    unit: Sequence[nn.Module],
    mesh: Any,
    compute_dtype: torch.dtype,
    *,
    fill: _Filler,
    config: FSDPConfig,
    offload: OffloadPolicy,
    is_root: bool = False,
) -> None:
    """Modules that run one after the other; their parameters are gathered together."""
    for part in unit:
        fill(part)
    target: Any = list(unit) if len(unit) > 1 else unit[0]
    reduce = parse_dtype(config.mixed_precision.reduce_dtype)
    if compute_dtype == torch.float64:
        reduce = compute_dtype
    fully_shard(
        target,
        mesh=mesh,
        # the root's parameters (embedding, output projection) are needed until its backward pass is over
        reshard_after_forward=config.reshard_after_forward and not is_root,
        mp_policy=MixedPrecisionPolicy(param_dtype=compute_dtype, reduce_dtype=reduce, cast_forward_inputs=False),
        offload_policy=offload,
    )


def _configure(model: ParallelModel, layers: list[nn.Module], config: FSDPConfig) -> None:
    for part in sharded_units(model):
        part.set_gradient_divide_factor(1.0)  # losses are divided by totals over all ranks
        part.set_force_sum_reduction_for_comms(True)
    count_traffic(sharded_units(model))
    zero_unused_gradients(
        sharded_units(model), set(language_model_of(model.model).parameters()) if model.in_units else ()
    )
    if config.forward_prefetch:
        for layer, following in itertools.pairwise(layers):
            assert isinstance(layer, FSDPModule)
            layer.set_modules_to_forward_prefetch([following])  # type: ignore[list-item]


def _groups_of_layers(layers: list[nn.Module], config: FSDPConfig) -> list[list[nn.Module]]:
    """`layer_per_group` neighbours each; the last group may be smaller."""
    size, policy = Dimensions.of(config).layer_per_group, config.wrap_policy
    if size > 1 and (policy.transformer_layer_cls_to_wrap or policy.min_num_params > 0):
        raise ConfigError(
            f"fsdp_config.layer_per_group={size} groups decoder layers, and fsdp_config.wrap_policy chooses other modules. "
            "Remove one of the two."
        )
    return [layers[first : first + size] for first in range(0, len(layers), size)]


def _layers(module: Any, config: FSDPConfig) -> list[nn.Module]:
    """Modules that are sharded by themselves: chosen by a function, else by class name, else by size, else the decoder's
    layers."""
    policy = config.wrap_policy
    parts = list(_children_first(module))
    if config.wrap_policy_fn is not None:
        chosen = _chosen_by(config.wrap_policy_fn, parts[:-1])
    elif policy.transformer_layer_cls_to_wrap:
        names = wrapped_classes(module, policy.transformer_layer_cls_to_wrap)
        chosen = [p for p in parts if type(p).__name__ in names]
    elif policy.min_num_params > 0:
        chosen = _large(module.get_decoder(), policy.min_num_params)
    else:
        chosen = decoder_layers(module)
    towers = vision_towers(module) if is_vision_model(module) else []
    # a rank without images in its rows would not take part in gathering these
    inside = {part for tower in towers for part in tower.modules()}
    return [part for part in chosen if part not in inside]


def wrapped_classes(module: nn.Module, names: Sequence[str]) -> list[str]:
    """`names` of wrap_policy.transformer_layer_cls_to_wrap. Raises ConfigError for a name that no module in `module` has."""
    classes = {type(part).__name__ for part in module.modules()}
    return match_all(
        "wrap_policy.transformer_layer_cls_to_wrap", names, sorted(classes), "class of the model's modules"
    )


def _chosen_by(reference: str, parts: Sequence[nn.Module]) -> list[nn.Module]:
    """Modules in `parts` that the wrap policy `reference` chooses. Raises ConfigError when it fails or there are none."""
    policy = load_object(reference)
    try:
        if not inspect.signature(policy).parameters:
            policy = policy()
        sizes = [sum(p.numel() for p in part.parameters()) for part in parts]
        chosen = [p for p, n in zip(parts, sizes, strict=True) if policy(module=p, recurse=False, nonwrapped_numel=n)]
    except Exception as error:
        raise ConfigError(f"fsdp_config.wrap_policy_fn={reference} failed: {type(error).__name__}: {error}.") from error
    if not chosen:
        raise ConfigError(f"fsdp_config.wrap_policy_fn={reference} chooses no module of this model.")
    return chosen


def _children_first(module: nn.Module) -> Iterator[nn.Module]:
    for child in module.children():
        yield from _children_first(child)
    yield module


def _large(module: nn.Module, least: int) -> list[nn.Module]:
    """The smallest modules that still have `least` parameters, innermost first."""
    modules: list[nn.Module] = []

    def visit(part: nn.Module) -> int:
        num_unwrapped = sum(visit(child) for child in part.children())
        num_unwrapped += sum(p.numel() for p in part.parameters(recurse=False))
        if num_unwrapped < least or part is module or isinstance(part, nn.ModuleList | nn.Embedding):
            return num_unwrapped
        modules.append(part)
        return 0

    visit(module)
    return modules
