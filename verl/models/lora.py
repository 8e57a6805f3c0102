"""Low-rank adapters (Hu et al. 2021, arXiv:2106.09685): y = W x + s B A x, W frozen, s = alpha / rank.

rsLoRA (Kalajdzievski 2023, arXiv:2312.03732) has s = alpha / sqrt(rank). DoRA (Liu et al. 2024, arXiv:2402.09353, equation 5)
also trains the length m of each row: y = m / |W + s B A| (W + s B A) x, with the norm as a constant for gradients.

Names and files follow the peft library: peft reads files that are saved here, and files of peft are read here.
"""

from __future__ import annotations

import logging
import math
import re
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any, cast

import torch
import torch.nn.functional as F
from torch import nn

from verl.config import ModelConfig, RowsModelConfig
from verl.errors import ConfigError, ModelError
from verl.foreign_text import clean, quoted
from verl.models.folder import opened, read_json_object
from verl.models.foreign_entries import ADAPTER, uncomputed_entry
from verl.models.hf_module import HFModule
from verl.models.intact import require_intact
from verl.registry import match_all

WEIGHTS_FILE, CONFIG_FILE = "adapter_model.safetensors", "adapter_config.json"
_PREFIX = "base_model.model."
_MEGATRON = {  # names of layers in Megatron, in targets of scripts for it -> endings of names in checkpoints
    "linear_qkv": ("q_proj", "k_proj", "v_proj"), "linear_proj": ("o_proj",),
    "linear_fc1": ("gate_proj", "up_proj"), "linear_fc2": ("down_proj",),
    "linear_q": ("q_proj",), "linear_k": ("k_proj",), "linear_v": ("v_proj",),
    "linear_fc1_gate": ("gate_proj",), "linear_fc1_up": ("up_proj",), "linear_q_proj": ("q_proj",),
    "linear_q_down_proj": ("q_a_proj",), "linear_q_up_proj": ("q_b_proj",),
    "linear_kv_down_proj": ("kv_a_proj_with_mqa",), "linear_kv_up_proj": ("kv_b_proj",),
}  # fmt: skip
log = logging.getLogger(__name__)


def dense(weight: torch.Tensor) -> torch.Tensor:
    """A weight as it computes; it may be held in four bits (verl/models/four_bits.py)."""
    return weight.get_original_weight() if hasattr(weight, "get_original_weight") else weight


class LoRALinear(nn.Linear):
    """A linear layer that keeps its own names, with `lora_A` [rank, in] and `lora_B` [out, rank]. B starts at zero."""

    def __init__(self, base: nn.Linear, rank: int, scale: float, generator: torch.Generator, dtype: torch.dtype):
        nn.Module.__init__(self)
        self.in_features, self.out_features = base.in_features, base.out_features
        self.weight, self.bias = base.weight, base.bias
        self.scale = scale
        self.active = True
        self.lora_A = nn.Parameter(torch.empty(rank, self.in_features, dtype=dtype))
        self.lora_B = nn.Parameter(torch.zeros(self.out_features, rank, dtype=dtype))
        nn.init.kaiming_uniform_(self.lora_A, a=math.sqrt(5), generator=generator)
        self.to(base.weight.device)

    def forward(self, input: torch.Tensor) -> torch.Tensor:
        """[..., in] -> [..., out]."""
        out = F.linear(input, self.weight, self.bias)
        if not self.active:
            return out
        return out + F.linear(F.linear(input, self.lora_A), self.lora_B) * self.scale

    def merged_weight(self) -> torch.Tensor:
        """W + s B A, with a graph; W while the adapter is off."""
        if not self.active:
            return self.weight
        return torch.addmm(dense(self.weight), self.lora_B, self.lora_A, alpha=self.scale)


class DoRALinear(LoRALinear):
    """A LoRALinear with the lengths of its rows as `lora_magnitude_vector` [out]; that starts at the lengths of W's rows."""

    def __init__(self, base: nn.Linear, rank: int, scale: float, generator: torch.Generator, dtype: torch.dtype):
        super().__init__(base, rank, scale, generator, dtype)
        self.lora_magnitude_vector = nn.Parameter(self._norms().to(dtype))

    @torch.no_grad()
    def _norms(self) -> torch.Tensor:
        wide = torch.promote_types(self.weight.dtype, torch.float32)
        adapted = torch.addmm(self.weight.to(wide), self.lora_B.to(wide), self.lora_A.to(wide), alpha=self.scale)
        return cast("torch.Tensor", torch.linalg.vector_norm(adapted, dim=1))

    def forward(self, input: torch.Tensor) -> torch.Tensor:
        """[..., in] -> [..., out]."""
        if not self.active:
            return F.linear(input, self.weight, self.bias)
        adapted = F.linear(input, self.weight) + F.linear(F.linear(input, self.lora_A), self.lora_B) * self.scale
        out = (adapted * (self.lora_magnitude_vector / self._norms())).to(input.dtype)
        return out if self.bias is None else out + self.bias

    def merged_weight(self) -> torch.Tensor:
        """m / |W + s B A| (W + s B A), with a graph; W while the adapter is off."""
        if not self.active:
            return self.weight
        return super().merged_weight() * (self.lora_magnitude_vector / self._norms()).unsqueeze(1)


@dataclass(frozen=True)
class LoRASpec:
    """The shape and targets of adapters, without their weights."""

    rank: int
    alpha: float
    targets: str | tuple[str, ...]  # "all-linear", a regular expression, or name endings
    exclude: str | tuple[str, ...] = ()
    head: bool = False  # whether the output projection is among the linear layers
    rslora: bool = False
    dora: bool = False
    full_modules: tuple[str, ...] = ()  # names or endings of modules that train in full
    dropout: float = 0.0  # on the inputs of adapters in training

    @property
    def scale(self) -> float:
        """The factor of B A."""
        return self.alpha / (math.sqrt(self.rank) if self.rslora else self.rank)

    @classmethod
    def of(cls, model: ModelConfig, head: bool = False) -> LoRASpec | None:
        """The spec of a model section; None if everything trains. Raises ConfigError for unusable settings."""
        if model.lora_rank <= 0:
            return None
        targets, exclude = (_names(v) for v in (model.target_modules, model.exclude_modules))
        if not targets:
            raise ConfigError("model.target_modules is empty; give names of linear layers, or all-linear.")
        saved = tuple(name for name in model.modules_to_save if name != "score")  # a scalar head trains anyway
        dropout = model.lora_dropout if isinstance(model, RowsModelConfig) else 0.0
        rank, alpha, rslora, dora = model.lora_rank, float(model.lora_alpha), model.use_rslora, model.use_dora
        return cls(rank, alpha, targets, exclude, head, rslora, dora, saved, dropout)

    def to_json(
        self, base: str, modules: Sequence[str], in_full: Sequence[str] = (), task: str = "CAUSAL_LM"
    ) -> dict[str, object]:
        """The adapter_config.json that peft reads. Modules are named in full, so that a reader adapts the same ones;
        `in_full` are modules that train in full, `task` is one of peft's TaskType."""
        return {
            "peft_type": "LORA",
            "task_type": task,
            "base_model_name_or_path": base,
            "r": self.rank,
            "lora_alpha": self.alpha,
            "use_rslora": self.rslora,
            "use_dora": self.dora,
            "lora_dropout": self.dropout,
            "bias": "none",
            "fan_in_fan_out": False,
            "inference_mode": True,
            "target_modules": list(modules),
            "modules_to_save": list(in_full) or None,
        }


def add_adapters(module: Any, spec: LoRASpec, dtype: torch.dtype) -> list[str]:
    """Freeze `module` and put adapters of `dtype` on its linear layers; returns the names of the adapted ones.

    A value head and the modules of `spec.full_modules` stay trainable, the latter in `dtype`. Raises ConfigError as
    `adapted_layers` does.
    """
    module.requires_grad_(False)
    chosen, in_full = adapted_layers(module, spec), whole_modules(module, spec)
    generator = torch.Generator().manual_seed(0)
    kind = DoRALinear if spec.dora else LoRALinear
    for name in chosen:
        module.set_submodule(name, kind(module.get_submodule(name), spec.rank, spec.scale, generator, dtype))
    for name in in_full:
        module.get_submodule(name).to(dtype).requires_grad_(True)
    if hasattr(module, "score"):
        module.score.requires_grad_(True)
    return chosen


def adapted_layers(module: HFModule, spec: LoRASpec) -> list[str]:
    """The names of the linear layers of `module` that get adapters; the output projection only with `spec.head`.

    Raises ConfigError for an entry of model.target_modules, model.exclude_modules or model.modules_to_save that matches
    nothing, when no layer is left, and for a rank beyond the sizes of the layers.
    """
    modules = dict(module.named_modules())
    in_full = tuple(f"{name}." for name in whole_modules(module, spec))
    head = module.get_output_embeddings() if hasattr(module, "get_output_embeddings") else None
    linear = [
        n
        for n, m in modules.items()
        if type(m) is nn.Linear and (spec.head or m is not head) and n != "score" and not f"{n}.".startswith(in_full)
    ]
    what = "linear layer that takes an adapter (embeddings and the output head take none)"
    chosen = _chosen("model.target_modules", spec.targets, linear, what)
    excluded = set(_chosen("model.exclude_modules", spec.exclude, [n for n in modules if n], "module"))
    chosen = [name for name in chosen if name not in excluded]
    if not chosen:
        raise ConfigError("model.exclude_modules takes out every layer of model.target_modules; change one of the two.")
    largest = max(min(modules[name].in_features, modules[name].out_features) for name in chosen)
    if spec.rank > largest:
        raise ConfigError(
            f"model.lora_rank={spec.rank} is larger than the adapted layers, whose weights have rank {largest} at most. "
            "Choose a smaller one."
        )
    return chosen


def whole_modules(module: nn.Module, spec: LoRASpec) -> list[str]:
    """The names of the modules that train in full in addition to adapters. Raises ConfigError for a module that shares a
    parameter with another one, as tied embeddings do."""
    names = [name for name, _ in module.named_modules() if name]
    chosen = _chosen("model.modules_to_save", spec.full_modules, names, "module")
    parameters = list(module.named_parameters(remove_duplicate=False))
    for name in chosen:
        members = {id(parameter) for other, parameter in parameters if other.startswith(f"{name}.")}
        shared = [other for other, p in parameters if id(p) in members and not other.startswith(f"{name}.")]
        if shared:
            raise ConfigError(
                f"model.modules_to_save: {name} shares its weight with {shared[0]}, so it cannot train separately. "
                "Leave it out."
            )
    return chosen


def _chosen(key: str, entries: str | tuple[str, ...], names: list[str], what: str) -> list[str]:
    """The `names` that a key chooses by peft's rule: text is a regular expression for the full name, a list holds names or
    their last parts, also as Megatron has them."""
    if entries == "all-linear":
        return names
    if isinstance(entries, str):
        try:
            pattern = re.compile(entries)
        except re.error as error:
            raise ConfigError(f"{key}={entries} is neither all-linear nor a regular expression: {error}.") from error
        return match_all(key, [entries], names, what, lambda name, _: pattern.fullmatch(name) is not None)
    return match_all(key, entries, names, what, _ends)


def _ends(name: str, entry: str) -> bool:
    return any(f".{name}".endswith(f".{end}") for end in _MEGATRON.get(entry, (entry,)))


def lora_layers(module: nn.Module) -> dict[str, LoRALinear]:
    """Adapted layers by name."""
    return {name: part for name, part in module.named_modules() if isinstance(part, LoRALinear)}


@contextmanager
def adapters_off(module: nn.Module) -> Iterator[None]:
    """Inside, the module computes as it did before it was adapted."""
    layers = lora_layers(module).values()
    for layer in layers:
        layer.active = False
    try:
        yield
    finally:
        for layer in layers:
            layer.active = True


def is_adapter(name: str) -> bool:
    """Whether a parameter of that name belongs to an adapter."""
    return name.rpartition(".")[2] in ("lora_A", "lora_B", "lora_magnitude_vector")


def merged(
    name: str, part: Callable[[str], torch.Tensor], scales: Mapping[str, float], dora: bool = False
) -> torch.Tensor:
    """The weight `name` with its adapter added, in the adapter's dtype. `part` gives complete tensors by name, `scales`
    the scale of each adapted layer; with `dora` they have lengths of rows."""
    layer = name.removesuffix(".weight")
    weight = dense(part(name))
    if layer == name or layer not in scales:
        return weight
    down, up = part(f"{layer}.lora_A"), part(f"{layer}.lora_B")
    wide = torch.promote_types(weight.dtype, down.dtype)
    adapted = torch.addmm(weight.to(wide), up.to(wide), down.to(wide), alpha=scales[layer])
    if not dora:
        return adapted
    lengths: torch.Tensor = part(f"{layer}.lora_magnitude_vector") / torch.linalg.vector_norm(adapted, dim=1)
    return adapted * lengths.unsqueeze(1)


def peft_names(tensors: Mapping[str, object]) -> dict[str, Any]:
    """`tensors`, adapters and the parameters that train with them, under the names of peft."""
    return {f"{_PREFIX}{name}{'.weight' if _is_matrix(name) else ''}": value for name, value in tensors.items()}


def own_names(tensors: Mapping[str, object]) -> dict[str, Any]:
    """The inverse of `peft_names`."""
    bare = {name.removeprefix(_PREFIX): value for name, value in tensors.items()}
    return {n.removesuffix(".weight") if _is_matrix(n.removesuffix(".weight")) else n: v for n, v in bare.items()}


def _is_matrix(name: str) -> bool:
    return name.endswith((".lora_A", ".lora_B"))


def read_adapter(folder: str | Path, spec: LoRASpec, base: str) -> dict[str, torch.Tensor]:
    """Adapters saved by peft or here, under our names, for the model at `base`; logs a warning if they were trained on another.
    Raises ModelError when there are none, when they are of another kind than `spec`, and for values that are not finite
    fractions."""
    path = Path(folder).expanduser()
    if not (path / CONFIG_FILE).is_file() or not (path / WEIGHTS_FILE).is_file():
        raise ModelError(f"model.lora_adapter_path={folder} holds no adapters ({CONFIG_FILE} and {WEIGHTS_FILE}).")
    require_intact(path, weights=True)
    config = read_json_object(path / CONFIG_FILE)
    if config.get("r") != spec.rank or config.get("lora_alpha") != spec.alpha:
        raise ModelError(
            f"The adapters in {path} have rank {quoted(config.get('r'), 40)} and alpha "
            f"{quoted(config.get('lora_alpha'), 40)}; set model.lora_rank and model.lora_alpha to that."
        )
    for field, value in (("use_rslora", spec.rslora), ("use_dora", spec.dora)):
        if bool(config.get(field)) != value:
            raise ModelError(
                f"The adapters in {path} were trained with {field}={not value}; set model.{field} to that."
            )
    if other := uncomputed_entry(config, ADAPTER):
        fix = "They are not computed as LoRA, rsLoRA or DoRA"
        if other == "init_lora_weights":
            fix = (
                "They belong to other weights than the model's: convert them (path_initial_model_for_weight_conversion)"
            )
        raise ModelError(
            f"The adapters in {path} are of a kind that verl has not: {other}={quoted(config[other], 80)} in {CONFIG_FILE}. "
            f"{fix}, or merge them into the model with peft."
        )
    with opened(path / WEIGHTS_FILE) as tensors:
        tensors_by_name = {name: tensors.get_tensor(name) for name in tensors.keys()}
    for name, value in tensors_by_name.items():
        if not value.is_floating_point() or not value.isfinite().all():
            kind = "NaN or infinite values" if value.is_floating_point() else f"values of type {value.dtype}"
            raise ModelError(f"The adapters in {path} are damaged: {clean(name, 80)} has {kind}. Use an earlier copy.")
    tensors_by_name = own_names(tensors_by_name)
    _check_origin(path, config, tensors_by_name, base)
    if config.get("lora_dropout") and not spec.dropout:
        log.info("lora_dropout=%s of %s is not applied: dropout is off.", quoted(config["lora_dropout"], 40), path)
    return tensors_by_name


def _check_origin(path: Path, config: Mapping[str, object], tensors: Mapping[str, object], base: str) -> None:
    """Compare the training that adapter_config.json in `path` describes with the use of the adapters here. Raises ModelError
    for adapters of layers that the config leaves out."""
    trained_on = config.get("base_model_name_or_path")
    if isinstance(trained_on, str) and trained_on and Path(trained_on).name != Path(base).name:
        log.warning(
            "The adapters in %s were trained on %s and are used on %s. Check that both have the same weights.",
            path, clean(trained_on, 120), base,
        )  # fmt: skip
    listed = config.get("layers_to_transform")
    if listed is None:
        return
    layers = {int(number) for name in tensors for number in re.findall(r"\.(\d+)\.", name)[:1]}
    left_out = sorted(layers - set(listed if isinstance(listed, list) else [listed]))
    if left_out:
        raise ModelError(
            f"The adapters in {path} have layer {left_out[0]}, which layers_to_transform={quoted(listed, 80)} in {CONFIG_FILE} "
            "leaves out. Remove that entry, or the tensors of the other layers."
        )


@torch.no_grad()
def load_adapter(module: nn.Module, tensors: Mapping[str, torch.Tensor]) -> None:
    """Put adapters read by `read_adapter` into place; raises ModelError unless exactly these are there."""
    trained = {name: p for name, p in module.named_parameters() if p.requires_grad}
    different = sorted(set(trained) ^ set(tensors)) or [n for n in trained if trained[n].shape != tensors[n].shape]
    if different:
        raise ModelError(
            f"The adapters at model.lora_adapter_path do not fit: {different[0]} is missing, superfluous or of another "
            "shape. Set model.target_modules to the modules that they were trained on."
        )
    for name, value in tensors.items():
        trained[name].copy_(value)


@torch.no_grad()
def merge_adapters(module: nn.Module, rounded: Callable[[str, torch.Tensor], torch.Tensor]) -> None:
    """Replace the adapted layers of `module` by plain ones with frozen merged weights; `rounded` (name, wide weight) gives the
    weight that is kept."""
    for name, layer in lora_layers(module).items():
        plain = nn.Linear(layer.in_features, layer.out_features, bias=layer.bias is not None, device="meta")
        weight = merged(f"{name}.weight", module.get_parameter, {name: layer.scale}, isinstance(layer, DoRALinear))
        plain.weight, plain.bias = nn.Parameter(rounded(f"{name}.weight", weight)), layer.bias
        module.set_submodule(name, plain)
    module.requires_grad_(False)


def _names(value: Any) -> str | tuple[str, ...]:
    """A list as a tuple; text stays text."""
    if value is None:
        return ()
    return value if isinstance(value, str) else tuple(value)
