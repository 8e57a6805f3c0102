"""Ulysses sequence parallelism (Jacobs et al. 2023, arXiv:2309.14509) over packed batches with shared prompts.

The tokens of a packed batch lie in equal slices on the ranks of a group. Around attention, and only there, an all-to-all
turns "all heads of my tokens" into "all tokens of my heads" and back. So the layout inside attends as on one rank.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch
import torch.distributed as dist
import torch.nn.functional as F
from transformers import PreTrainedConfig

from verl.errors import ConfigError
from verl.models.attention import Scoring
from verl.models.packed import PackedLayout
from verl.models.packing import PackedBatch
from verl.models.parallel.collectives import exchange_rows, gather_rows_with_grad


def check_heads(config: PreTrainedConfig, size: int, tensor_size: int = 1) -> None:
    """Raises ConfigError when the heads that tensor parallelism leaves to a rank do not divide over `size` ranks."""
    config = config.get_text_config()
    if size == 1:
        return
    heads = config.num_attention_heads // tensor_size
    kv_heads = (getattr(config, "num_key_value_heads", None) or config.num_attention_heads) // tensor_size
    if heads % size or (kv_heads % size and size % kv_heads):
        raise ConfigError(
            f"ulysses_sequence_parallel_size={size} does not divide the {heads} attention heads "
            f"({kv_heads} key-value heads) of a rank; choose a divisor of both, or a multiple of the latter."
        )


class SequenceLayout:
    """An AttentionLayout for a rank's slice of the tokens. `whole` knows all of them."""

    def __init__(self, whole: PackedLayout, num_tokens: int, num_local: int, group: dist.ProcessGroup):
        self.whole, self.num_tokens, self.num_local, self.group = whole, num_tokens, num_local, group
        self.routing = None if whole.routing is None else whole.routing.part(num_local, group)

    def attend(self, layer: int, q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, scoring: Scoring) -> torch.Tensor:
        """As AttentionLayout.attend, with `num_local` tokens in and out."""
        ranks = self.group.size()
        if k.shape[1] % ranks:  # fewer key-value heads than ranks: each rank gets a copy of the one it needs
            k, v = (x.repeat_interleave(ranks // x.shape[1], dim=1) for x in (k, v))
        q, k, v = (self._all_tokens(x) for x in (q, k, v))
        out = self.whole.attend(layer, q, k, v, scoring)
        return self._all_heads(out)

    def _all_tokens(self, x: torch.Tensor) -> torch.Tensor:
        """[1, heads, local, dim] -> [1, heads / ranks, num_tokens, dim]."""
        ranks = self.group.size()
        heads_first = x[0].reshape(ranks, -1, *x.shape[2:])  # [ranks, heads / ranks, local, dim]
        mine = self._exchange(heads_first)
        return mine.transpose(0, 1).flatten(1, 2)[:, : self.num_tokens].unsqueeze(0)

    def _all_heads(self, out: torch.Tensor) -> torch.Tensor:
        """[1, num_tokens, heads / ranks, dim] -> [1, local, heads, dim]."""
        ranks = self.group.size()
        padded = F.pad(out[0], (0, 0, 0, 0, 0, ranks * self.num_local - self.num_tokens))
        slices = self._exchange(padded.unflatten(0, (ranks, self.num_local)))  # [ranks, local, heads / ranks, dim]
        return slices.transpose(0, 1).flatten(1, 2).unsqueeze(0)

    def _exchange(self, x: torch.Tensor) -> torch.Tensor:
        """x[r] goes to rank r; in its place comes what rank r had for this one."""
        ones = [1] * self.group.size()
        return exchange_rows(x, ones, ones, self.group)


@dataclass(frozen=True)
class TokenSlice:
    """One rank's tokens of a packed batch. `hidden_index` and `targets` are of the predictions made here,
    `counts[r]` is how many rank r makes; predictions are in the order of their tokens, `order` leads back."""

    input_ids: torch.Tensor  # [1, local]
    position_ids: torch.Tensor  # [1, local]
    layout: Any
    hidden_index: torch.Tensor
    targets: torch.Tensor
    counts: tuple[int, ...]
    order: torch.Tensor | None
    group: dist.ProcessGroup | None
    noise: torch.Tensor | None  # [local, hidden_size]
    columns: dict[str, torch.Tensor]  # [predictions here, ...]

    def whole(self, values: torch.Tensor) -> torch.Tensor:
        """[predictions here] -> [all predictions], in the packed batch's order."""
        if self.order is None or self.group is None:
            return values
        return gather_rows_with_grad(values, self.counts, self.group)[self.order]


def take_slice(packed: PackedBatch, group: dist.ProcessGroup | None) -> TokenSlice:
    """This rank's part of `packed`; all of it in a group of one (None: this rank)."""
    if group is None or group.size() == 1:
        return TokenSlice(
            packed.input_ids, packed.position_ids, packed.layout, packed.hidden_index, packed.targets,
            (len(packed.targets),), None, group, packed.noise, packed.columns,
        )  # fmt: skip
    ranks, rank = group.size(), group.rank()
    size = -(-packed.num_tokens // ranks)

    def mine(tokens: torch.Tensor) -> torch.Tensor:
        return F.pad(tokens, (0, size * ranks - packed.num_tokens))[:, size * rank : size * (rank + 1)]

    owner = packed.hidden_index // size
    by_owner = owner.sort(stable=True).indices
    here = by_owner[owner[by_owner] == rank]
    order = torch.empty_like(by_owner).scatter_(0, by_owner, torch.arange(len(by_owner), device=by_owner.device))
    return TokenSlice(
        input_ids=mine(packed.input_ids),
        position_ids=mine(packed.position_ids),
        layout=SequenceLayout(packed.layout, packed.num_tokens, size, group),
        hidden_index=packed.hidden_index[here] - size * rank,
        targets=packed.targets[here],
        counts=tuple(torch.bincount(owner, minlength=ranks).tolist()),
        order=order,
        group=group,
        noise=None if packed.noise is None else mine(packed.noise.t()).t(),
        columns={name: values[here] for name, values in packed.columns.items()},
    )
