"""Models as engines hold them: loaded by a model section, with adapters if it asks for them."""

from collections.abc import Callable
from typing import Any

import torch
from torch import nn

from verl.config import ModelConfig
from verl.models.adapter_dropout import add_dropout
from verl.models.four_bits import quantize_base
from verl.models.frozen import load_frozen
from verl.models.load import adopt_model, empty_model, load_external, load_model
from verl.models.lora import LoRASpec, add_adapters, load_adapter, merge_adapters, read_adapter
from verl.models.padded import ForwardKind
from verl.models.rounding import Rounding


def build_module(
    model: ModelConfig,
    head: str,
    device: torch.device,
    compute_dtype: torch.dtype,
    rounding: Rounding,
    *,
    trains: bool,
    build: Callable[[], Any] | None = None,
    adapts_head: bool = False,
) -> Any:
    """The module of a role, from the model's folder or `build`. Trained weights are held in at least float32. Frozen weights
    are rounded to the compute dtype as masters are: a reference policy has the weights that training starts with. Adapters
    at `model.lora_adapter_path` are merged into a frozen model."""
    load_external(model.external_lib)
    spec = LoRASpec.of(model, adapts_head) if trains else None
    wide = torch.promote_types(compute_dtype, torch.float32)
    dtype = wide if trains and spec is None else compute_dtype
    options: dict[str, Any] = {"trust_remote_code": model.trust_remote_code, "override_config": model.override_config}
    checkpoints = model.recompute != "none"
    if not trains:
        module = load_frozen(model.path, head, device=device, dtype=dtype, rounding=rounding, build=build, **options)
    elif build is not None:
        module = adopt_model(build(), head, device=device, dtype=dtype, gradient_checkpointing=checkpoints)
    else:
        module = load_model(model.path, head, device=device, dtype=dtype, gradient_checkpointing=checkpoints, **options)
    _make_uniform(module, dtype)
    _set_choices(module, model)
    _adapt(module, model, spec, wide)
    for parameter in module.parameters():  # MKL's sums depend on alignment, which weights in a mapped file lack
        if parameter.requires_grad and parameter.data_ptr() % 64:
            parameter.data = parameter.data.clone()
    if spec is not None and model.lora_adapter_path:
        load_adapter(module, read_adapter(model.lora_adapter_path, spec, model.path))
    elif not trains and model.lora_adapter_path and (frozen := LoRASpec.of(model)):
        add_adapters(module, frozen, wide)
        load_adapter(module, read_adapter(model.lora_adapter_path, frozen, model.path))
        merge_adapters(module, lambda name, weight: rounding.rounded(name, weight, compute_dtype))
        _make_uniform(module, compute_dtype)
    return module


def build_skeleton(
    model: ModelConfig,
    head: str,
    compute_dtype: torch.dtype,
    forward: ForwardKind = "packed",
    *,
    trains: bool,
    adapts_head: bool = False,
) -> object:
    """The same module on the meta device, with the `forward` that was chosen for it."""
    load_external(model.external_lib)
    spec = LoRASpec.of(model, adapts_head) if trains else None
    wide = torch.promote_types(compute_dtype, torch.float32)
    dtype = wide if trains and spec is None else compute_dtype
    module = empty_model(model, head, dtype, trains and model.recompute != "none", forward)
    _make_uniform(module, dtype)
    _set_choices(module, model)
    _adapt(module, model, spec, wide)
    return module


def _set_choices(module: Any, model: ModelConfig) -> None:
    """Keys that verl.models.forward reads on the module."""
    module.fused_log_probs, module.recompute = model.use_fused_kernels, model.recompute
    module.offloads_inputs = model.enable_activation_offload


@torch.no_grad()
def _make_uniform(module: nn.Module, dtype: torch.dtype) -> None:
    """Give `dtype` to parameters that a family makes in another one, such as the routers of DeepSeek V3 in float32: masters are
    rounded for every family, and FSDP gathers parameters of one dtype together. A scalar head stays wide."""
    for name, parameter in module.named_parameters():
        if parameter.is_floating_point() and not name.startswith("score."):
            parameter.data = parameter.data.to(dtype)


def _adapt(module: nn.Module, model: ModelConfig, spec: LoRASpec | None, wide: torch.dtype) -> None:
    if spec is not None:
        adapted = add_adapters(module, spec, wide)
        if spec.dropout:
            add_dropout(module, adapted, spec.dropout)
        if model.quantization:
            quantize_base(module)
