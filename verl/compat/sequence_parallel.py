"""Sequence parallelism for models that a script wraps itself: `verl.utils.ulysses`.

The engines here split packed batches in verl/models/parallel/sequence.py.
"""

import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import Tensor

from verl.models.hf_module import AutogradContext

_group: dist.ProcessGroup | None = None


def set_ulysses_sequence_parallel_group(group: dist.ProcessGroup | None) -> None:
    """Set the default group of the functions below; None: no sequence parallelism."""
    global _group
    _group = group


def get_ulysses_sequence_parallel_group() -> dist.ProcessGroup | None:
    return _group


def get_ulysses_sequence_parallel_world_size(group: dist.ProcessGroup | None = None) -> int:
    """Number of ranks of `group` or of the default group; 1 without one."""
    group = group or _group
    return dist.get_world_size(group) if group is not None else 1


def get_ulysses_sequence_parallel_rank(group: dist.ProcessGroup | None = None) -> int:
    """Rank of this process in `group` or in the default group; 0 without one."""
    group = group or _group
    return dist.get_rank(group) if group is not None else 0


def ulysses_pad(
    input_ids_rmpad: Tensor, position_ids_rmpad: Tensor | None = None, sp_size: int = 1, pad_value: int = 0
) -> tuple[Tensor, Tensor | None, int]:
    """Packed ids [1, tokens] padded at the end to a multiple of `sp_size`: (ids, positions, number of pad tokens). The pad
    tokens have positions 0, 1, ...; positions are [..., 1, tokens]."""
    missing = -input_ids_rmpad.shape[-1] % sp_size
    if not missing:
        return input_ids_rmpad, position_ids_rmpad, 0
    if position_ids_rmpad is not None:
        added = torch.arange(missing, device=position_ids_rmpad.device, dtype=position_ids_rmpad.dtype)
        added = added.expand(*position_ids_rmpad.shape[:-1], missing)
        position_ids_rmpad = torch.cat((position_ids_rmpad, added), dim=-1)
    return F.pad(input_ids_rmpad, (0, missing), value=pad_value), position_ids_rmpad, missing


def ulysses_pad_and_slice_inputs(
    input_ids_rmpad: Tensor,
    position_ids_rmpad: Tensor | None = None,
    sp_size: int = 1,
    skip_position_ids_rmpad: bool = False,
    pad_value: int = 0,
) -> tuple[Tensor, Tensor | None, int]:
    """`ulysses_pad`, then this rank's equal share of the tokens. `skip_position_ids_rmpad` keeps all positions."""
    ids, positions, missing = ulysses_pad(input_ids_rmpad, position_ids_rmpad, sp_size, pad_value)
    ids = slice_input_tensor(ids, dim=1)
    if positions is not None and not skip_position_ids_rmpad:
        positions = slice_input_tensor(positions, dim=-1)
    return ids, positions, missing


def slice_input_tensor(x: Tensor, dim: int, padding: bool = False, group: dist.ProcessGroup | None = None) -> Tensor:
    """This rank's equal share of `x` along `dim`; `padding` pads the last share with zeros."""
    size, rank = get_ulysses_sequence_parallel_world_size(group), get_ulysses_sequence_parallel_rank(group)
    if padding and x.shape[dim] % size:
        shape = list(x.shape)
        shape[dim] = -x.shape[dim] % size
        x = torch.cat((x, x.new_zeros(shape)), dim=dim)
    return x.chunk(size, dim=dim)[rank].contiguous()


class _Gather(torch.autograd.Function):
    """All-gather of equal shares; a rank's gradient is its share, times the number of ranks with `scale`."""

    @staticmethod
    def forward(ctx: AutogradContext, share: Tensor, dim: int, scale: bool, group: dist.ProcessGroup) -> Tensor:
        ctx.dim, ctx.group = dim, group
        ctx.factor = dist.get_world_size(group) if scale else 1
        parts = [torch.empty_like(share) for _ in range(dist.get_world_size(group))]
        dist.all_gather(parts, share.contiguous(), group=group)
        return torch.cat(parts, dim=dim)

    @staticmethod
    def backward(ctx: AutogradContext, *grads: Tensor) -> tuple[Tensor, None, None, None]:
        (gathered,) = grads
        size, rank = dist.get_world_size(ctx.group), dist.get_rank(ctx.group)
        return ctx.factor * gathered.chunk(size, dim=ctx.dim)[rank].contiguous(), None, None, None


def gather_outputs_and_unpad(
    x: Tensor,
    gather_dim: int,
    unpad_dim: int | None = None,
    padding_size: int = 0,
    grad_scaler: bool = True,
    group: dist.ProcessGroup | None = None,
) -> Tensor:
    """The shares of all ranks joined along `gather_dim`, without the last `padding_size` entries of `unpad_dim`; `x` itself
    without a group. `grad_scaler` multiplies gradients by the number of ranks: this cancels the mean that data
    parallelism takes over them."""
    group = group or _group
    if group is None:
        return x
    gathered: Tensor = _Gather.apply(x, gather_dim, grad_scaler, group)
    if unpad_dim is None or not padding_size:
        return gathered
    return gathered.narrow(unpad_dim, 0, gathered.shape[unpad_dim] - padding_size)
