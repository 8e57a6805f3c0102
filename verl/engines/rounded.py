"""Sharded parameters that are gathered as rounded: float32 masters in the shards, and next to each the bfloat16 weights.

FSDP2 casts a float32 shard to nearest in every gather. Here the shard's compute weights are kept and gathered as they are. So
all ranks compute with the result of `Rounding`. A shard is rounded once per optimizer step, not twice per micro-batch.
FSDP2 treats gradients as usual: it reduces them in the reduce dtype, and gives them to the float32 parameter.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import replace
from typing import TYPE_CHECKING, cast

import torch
from torch.distributed.fsdp import FSDPModule, MixedPrecisionPolicy
from torch.distributed.fsdp._fully_shard._fsdp_param import FSDPParam, ShardedState

from verl.engines.fsdp_units import fsdp_params
from verl.models.rounding import Region, Rounding
from verl.parallel.device import moved

if TYPE_CHECKING:
    from verl.engines.groups import ProcessGroups
    from verl.engines.shards import Shard


class RoundedShard:
    """The compute weights of one shard: `flat` is what FSDP gathers, padded as the shard is. Moves with `to`."""

    def __init__(self, padded: torch.Tensor, shape: torch.Size, dtype: torch.dtype, region: Region):
        self.flat = torch.zeros(padded.numel(), dtype=dtype, device=padded.device)
        self.shape, self.region = shape, region

    @property
    def weights(self) -> torch.Tensor:
        """The weights in the shape of the local shard."""
        return self.flat[: self.shape.numel()].view(self.shape)

    def to(self, device: torch.device | str) -> None:
        """Keep them on `device`."""
        self.flat = moved(self.flat, device)


class RoundedParam(FSDPParam):
    """An FSDP2 parameter that gathers `rounded` and not a cast of its shard."""

    rounded: RoundedShard

    def init_dtype_attrs(self, mp_policy: MixedPrecisionPolicy) -> None:
        super().init_dtype_attrs(mp_policy)
        self.param_dtype = None  # nothing is left to be cast
        self.reduce_dtype = mp_policy.reduce_dtype  # of gradients in a wider dtype than the parameter's too

    @property
    def all_gather_inputs(self) -> list[torch.Tensor]:
        if self.sharded_state == ShardedState.SHARDED:
            return [self.rounded.flat.to(self.device, non_blocking=True)]
        return super().all_gather_inputs


def gather_rounded(
    shards: Mapping[str, Shard], units: Iterable[FSDPModule], groups: ProcessGroups, rounding: Rounding
) -> dict[str, Shard]:
    """`shards`, with compute weights for each shard that FSDP would cast. `units` gather these weights from now on."""
    placed = dict(shards)
    names = {id(shard.parameter): name for name, shard in shards.items()}
    for unit in units:
        for parameter in fsdp_params(unit):
            parameter.init_dtype_attrs(parameter.mp_policy)
            if parameter.param_dtype is None:  # computes in the dtype of its shard
                continue
            name = names[id(parameter.sharded_param)]
            shard, local = shards[name], parameter._sharded_local_tensor
            rounded = RoundedShard(
                parameter._sharded_param_data, local.shape, parameter.param_dtype, shard.region(groups)
            )
            rounding.write(rounded.weights, name, local, rounded.region)
            parameter.__class__ = RoundedParam
            cast(RoundedParam, parameter).rounded = rounded
            placed[name] = replace(shard, rounded=rounded)
    return placed
