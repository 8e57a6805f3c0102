"""Products of projections whose parts have LoRA adapters: y = W x + up (down x), with the adapters of the parts joined as the
samplers join them (verl.models.adapter_weights)."""

from typing import cast

import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import nn

from verl.models.adapter_weights import LowRank, join
from verl.models.decoder.projection import Projection
from verl.models.grad_buffers import GradientBuffers
from verl.models.lora import LoRALinear
from verl.models.ops.linear import Matmul


def adapters_of(projection: Projection) -> list[LoRALinear | None]:
    """For each part, the layer if its adapter is active, else None. Empty if no adapter is active."""
    parts = [part if isinstance(part, LoRALinear) and part.active else None for part in projection.parts]
    return parts if any(part is not None for part in parts) else []


def adapter_parameters(projection: Projection) -> list[nn.Parameter]:
    """A and B of all adapters."""
    return [p for part in adapters_of(projection) if part is not None for p in (part.lora_A, part.lora_B)]


def linear(
    x: torch.Tensor, projection: Projection, matmul: Matmul, residual: torch.Tensor | None = None
) -> torch.Tensor:
    """x [tokens, inputs] -> [tokens, outputs], with `residual` added."""
    pair, group = _joined(projection), projection.outputs_group
    if pair is None and group is None:
        return matmul.linear(x, projection.weight, projection.bias, residual)
    y = matmul.linear(x, projection.weight, projection.bias if group is None else None)
    if pair is not None:
        y.add_(matmul.linear(matmul.linear(x, pair.down), pair.up))
    if group is not None:
        dist.all_reduce(y, group=group)
        y = y if projection.bias is None else y.add_(projection.bias)
    return y if residual is None else y.add_(residual)


def input_gradient(d_y: torch.Tensor, projection: Projection, matmul: Matmul) -> torch.Tensor:
    """The gradient of `x` in `linear`, from the gradient of its result."""
    d_x, pair = matmul.input_gradient(d_y, projection.weight), _joined(projection)
    if pair is not None:
        d_x.add_(matmul.input_gradient(matmul.input_gradient(d_y, pair.up), pair.down))
    if projection.inputs_group is not None:
        dist.all_reduce(d_x, group=projection.inputs_group)
    return d_x


def add_adapter_gradients(
    projection: Projection, d_y: torch.Tensor, x: torch.Tensor, matmul: Matmul, gradients: GradientBuffers
) -> None:
    """Adds the gradients of A and B in `linear`, from the gradient of its result."""
    pair = _joined(projection)
    if pair is None or not gradients.wants(adapter_parameters(projection)):
        return
    wide = torch.promote_types(pair.up.dtype, torch.float32)
    d_up, d_down = torch.empty_like(pair.up, dtype=wide), torch.empty_like(pair.down, dtype=wide)
    matmul.add_outer(d_up, d_y, matmul.linear(x, pair.down), overwrite=True)
    matmul.add_outer(d_down, matmul.input_gradient(d_y, pair.up), x, overwrite=True)
    row = column = 0
    for part, adapter in zip(projection.parts, adapters_of(projection), strict=True):
        if adapter is not None:
            rows, ranks = slice(row, row + part.out_features), slice(column, column + len(adapter.lora_A))
            gradients.add((adapter.lora_A,), d_down[ranks])
            gradients.add((adapter.lora_B,), d_up[rows, ranks] * adapter.scale)
            column = ranks.stop
        row += part.out_features


def add_weight_gradient(
    projection: Projection, d_y: torch.Tensor, x: torch.Tensor, matmul: Matmul, gradients: GradientBuffers
) -> None:
    """Adds the gradients of all parameters in `linear`, from the gradient of its result."""
    gradients.add_matmul(weights_of(projection), d_y, x, matmul)
    add_adapter_gradients(projection, d_y, x, matmul, gradients)
    biases = biases_of(projection)
    if biases and gradients.wants(biases):
        gradients.add(biases, d_y.sum(0, dtype=torch.promote_types(d_y.dtype, torch.float32)))


def parameters_of(projection: Projection) -> list[nn.Parameter]:
    """Weights, biases and adapters."""
    return [*weights_of(projection), *biases_of(projection), *adapter_parameters(projection)]


def weights_of(projection: Projection) -> tuple[nn.Parameter, ...]:
    """The weights of the parts."""
    return tuple(cast(nn.Parameter, part.weight) for part in projection.parts)


def biases_of(projection: Projection) -> tuple[nn.Parameter, ...]:
    """The biases of the parts, if they have some."""
    return tuple(part.bias for part in projection.parts if part.bias is not None)


def adapted(y: torch.Tensor, x: torch.Tensor, projection: Projection) -> torch.Tensor:
    """`y`, the product of a projection without its adapters, with their products; by autograd."""
    adapters = adapters_of(projection)
    if not adapters:
        return y
    present = [adapter for adapter in adapters if adapter is not None]
    down = F.linear(x, torch.cat([adapter.lora_A for adapter in present]).to(x.dtype))
    ranks = iter(down.split([len(adapter.lora_A) for adapter in present], dim=1))
    sums = [
        part if adapter is None else part + F.linear(next(ranks), (adapter.lora_B * adapter.scale).to(x.dtype))
        for part, adapter in zip(y.split([p.out_features for p in projection.parts], dim=1), adapters, strict=True)
    ]
    return sums[0] if len(sums) == 1 else torch.cat(sums, dim=1)


def _joined(projection: Projection) -> LowRank | None:
    adapters = adapters_of(projection)
    if not adapters:
        return None
    pairs = [None if adapter is None else (adapter.lora_A, adapter.lora_B) for adapter in adapters]
    scales = [0.0 if adapter is None else adapter.scale for adapter in adapters]
    return join(pairs, [part.out_features for part in projection.parts], scales, projection.weight.dtype)
