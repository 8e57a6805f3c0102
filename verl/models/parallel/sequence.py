"""Ulysses sequence parallelism (Jacobs et al. 2023, arXiv:2309.14509) over packed batches with shared prompts.

The tokens of a packed batch lie in equal slices on the ranks of a group. Around attention, and only there, an all-to-all
turns "all heads of my tokens" into "all tokens of my heads" and back. So the layout inside attends as on one rank.

If the heads do not divide by the ranks, adjacent ranks exchange heads as far as they divide, and these sets of ranks are a ring
(verl.models.parallel.ring). So 3 heads on 2 ranks are a ring of 2, and 6 heads on 4 ranks are 2 sets of 2.
"""

from dataclasses import dataclass
from typing import Any

import torch
import torch.distributed as dist
import torch.nn.functional as F
from transformers import PreTrainedConfig

from verl.errors import ConfigError
from verl.models.attention import Scoring
from verl.models.delta_net import DeltaInputs
from verl.models.ops.linear import Matmul
from verl.models.packed import Attended, HeadViews, PackedLayout, as_heads
from verl.models.packing import PackedBatch
from verl.models.parallel.collectives import exchange_rows, gather_rows_with_grad
from verl.models.parallel.ring import RingLayout


def check_heads(
    config: PreTrainedConfig, size: int, tensor_size: int = 1, key: str = "ulysses_sequence_parallel_size"
) -> None:
    """Raises ConfigError if the heads that tensor parallelism leaves to a rank do not divide over `size` ranks, and the model
    has linear attention, or a window or a cap, which ring attention lacks."""
    config = config.get_text_config()
    if (keys := getattr(config, "linear_num_key_heads", None) or 0) % size:
        raise ConfigError(f"{key}={size} does not divide the {keys} key heads of linear attention; choose a divisor.")
    heads = config.num_attention_heads // tensor_size
    kv_heads = (getattr(config, "num_key_value_heads", None) or config.num_attention_heads) // tensor_size
    names = ("sliding_window", "attn_logit_softcapping")
    limits = [f"{name}={value}" for name in names if (value := getattr(config, name, None))]
    if limits and getattr(config, "use_sliding_window", True) and num_head_ranks(heads, kv_heads, size) < size:
        raise ConfigError(
            f"{key}={size} does not divide the {heads} attention heads ({kv_heads} key-value heads) of a rank, and ring "
            f"attention has no {limits[0]}; choose a divisor of both numbers, or a multiple of the latter."
        )


def num_head_ranks(heads: int, kv_heads: int, size: int) -> int:
    """The most ranks, a divisor of `size`, over which heads divide. They have copies of key-value heads if these are fewer."""
    fits = (n for n in range(size, 0, -1) if not (size % n or heads % n or (kv_heads % n and n % kv_heads)))
    return next(fits)


class SequenceLayout:
    """An AttentionLayout for a rank's slice of the tokens. `full` knows all of them."""

    def __init__(self, full: PackedLayout, num_tokens: int, num_local: int, group: dist.ProcessGroup):
        self.full, self.num_tokens, self.num_local, self.group = full, num_tokens, num_local, group
        self.chunk_tokens = full.chunk_tokens
        self._insides: dict[int, RingLayout] = {}  # by number of ranks that divide the heads
        self.routing = None if full.routing is None else full.routing.part(num_local, group)

    def attend(self, layer: int, q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, scoring: Scoring) -> torch.Tensor:
        """As AttentionLayout.attend, with `num_local` tokens in and out."""
        ranks, layout = self._inside(q, k)
        q, k, v = self._all_tokens(ranks, q, k, v)
        (out,) = self._all_heads(ranks, layout.attend(layer, q, k, v, scoring).transpose(1, 2))
        return out.transpose(1, 2)

    def attend_kept(self, index: int, heads: HeadViews, scoring: Scoring, by: Matmul, keep: bool) -> Attended:
        """As PackedLayout.attend_kept, with `num_local` tokens in and out."""
        ranks, layout = self._inside(heads.q, heads.k)
        inside = HeadViews(*self._all_tokens(ranks, *heads))
        attended = layout.attend_kept(index, inside, scoring, by, keep)
        (out,) = self._all_heads(ranks, as_heads(attended.out.unflatten(1, (inside.q.shape[1], -1))))
        return Attended(out[0].transpose(0, 1).flatten(1), inside=(inside, attended) if keep else None)

    def attend_backward(
        self, heads: HeadViews, attended: Attended, d_out: torch.Tensor, scale: float, by: Matmul, into: HeadViews
    ) -> None:
        """As PackedLayout.attend_backward."""
        assert attended.inside is not None
        (inside, inner), (ranks, layout) = attended.inside, self._inside(heads.q, heads.k)
        (d_inside,) = self._all_tokens(ranks, as_heads(d_out.unflatten(1, (heads.q.shape[1], -1))))
        gradients = HeadViews(*(torch.empty_like(x) for x in inside))
        layout.attend_backward(inside, inner, d_inside[0].transpose(0, 1).flatten(1), scale, by, gradients)
        for target, gradient in zip(into, self._all_heads(ranks, *gradients), strict=True):
            copies = gradient.shape[1] // target.shape[1]  # of a key-value head, on as many ranks
            target.copy_(gradient.unflatten(1, (-1, copies)).sum(2) if copies > 1 else gradient)

    def recur(self, layer: int, inputs: DeltaInputs) -> torch.Tensor:
        """As PackedLayout.recur, with `num_local` tokens in and out: a rank has some of the heads of all tokens."""
        size, rank = self.group.size(), self.group.rank()

        def all_tokens(*parts: torch.Tensor) -> torch.Tensor:
            by_rank = torch.cat([part.unflatten(1, (size, -1)) for part in parts], dim=2)
            return self._exchange(by_rank.transpose(0, 1)).flatten(0, 1)[: self.num_tokens]

        kernels = [part.unflatten(0, (size, -1))[rank] for part in inputs.kernel.split(inputs.sizes)]
        decay, beta = all_tokens(inputs.decay, inputs.beta).chunk(2, dim=1)
        inside = DeltaInputs(
            all_tokens(*inputs.mixed.split(inputs.sizes, dim=1)), decay, beta, torch.cat(kernels), None,
            inputs.num_keys // size, inputs.key_dim,
        )  # fmt: skip
        out = self.full.recur(layer, inside)
        padded = F.pad(out, (0, 0, 0, 0, 0, size * self.num_local - len(out)))
        return self._exchange(padded.unflatten(0, (size, self.num_local))).transpose(0, 1).flatten(1, 2)

    def _inside(self, q: torch.Tensor, k: torch.Tensor) -> tuple[int, PackedLayout | RingLayout]:
        """Ranks that divide the heads of q and k, and the layout of the tokens that each of them gets."""
        size, rank = self.group.size(), self.group.rank()
        ranks = num_head_ranks(q.shape[1], k.shape[1], size)
        if ranks == size:
            return ranks, self.full
        if ranks not in self._insides:
            block, ring = ranks * self.num_local, range(rank % ranks, size, ranks)
            self._insides[ranks] = RingLayout(self.full, block, ring, rank // ranks, self.group)
        return ranks, self._insides[ranks]

    def _num_inside(self, ranks: int) -> int:
        return self.num_tokens if ranks == self.group.size() else ranks * self.num_local

    def _all_tokens(self, ranks: int, *heads: torch.Tensor) -> list[torch.Tensor]:
        """[1, heads, local, dim] each -> [1, heads / ranks, tokens of the ranks, dim], in one exchange."""
        parts = []
        for x in heads:
            if x.shape[1] % ranks:  # fewer key-value heads than ranks: each rank gets a copy of the one it needs
                x = x.repeat_interleave(ranks // x.shape[1], dim=1)
            parts.append(x[0].transpose(0, 1).unflatten(1, (ranks, -1)).flatten(2))  # [local, ranks, width]
        mine = self._exchange(torch.cat(parts, dim=2).transpose(0, 1)).flatten(0, 1)[: self._num_inside(ranks)]
        columns = mine.split([part.shape[2] for part in parts], dim=1)
        return [as_heads(y.unflatten(1, (-1, x.shape[3]))) for x, y in zip(heads, columns, strict=True)]

    def _all_heads(self, ranks: int, *heads: torch.Tensor) -> list[torch.Tensor]:
        """[1, heads / ranks, tokens of the ranks, dim] each -> [1, heads, local, dim], in one exchange."""
        rows = torch.cat([x[0].transpose(0, 1).flatten(1) for x in heads], dim=1)
        padded = F.pad(rows, (0, 0, 0, ranks * self.num_local - len(rows)))
        slices = self._exchange(padded.unflatten(0, (ranks, self.num_local)))  # [ranks, local, width]
        parts = slices.transpose(0, 1).split([x.shape[1] * x.shape[3] for x in heads], dim=2)
        return [as_heads(y.flatten(1).unflatten(1, (-1, x.shape[3]))) for x, y in zip(heads, parts, strict=True)]

    def _exchange(self, x: torch.Tensor) -> torch.Tensor:
        """x[i] goes to rank i of the adjacent ranks that exchange heads; in its place comes what that rank had for this one."""
        first = self.group.rank() // len(x) * len(x)
        counts = [int(first <= rank < first + len(x)) for rank in range(self.group.size())]
        return exchange_rows(x, counts, counts, self.group)


@dataclass(frozen=True)
class TokenSlice(PackedBatch):
    """One rank's tokens of a packed batch. `hidden_index`, `targets` and `columns` are of the predictions made here,
    `counts[r]` is how many rank r makes; predictions are in the order of their tokens, `order` leads back."""

    layout: Any
    counts: tuple[int, ...] = ()
    order: torch.Tensor | None = None
    group: dist.ProcessGroup | None = None

    def whole(self, values: torch.Tensor) -> torch.Tensor:
        """[predictions here] -> [all predictions], in the packed batch's order."""
        if self.order is None or self.group is None:
            return values
        return gather_rows_with_grad(values, self.counts, self.group)[self.order]


def take_slice(packed: PackedBatch, group: dist.ProcessGroup | None) -> TokenSlice:
    """This rank's part of `packed`; all of it in a group of one (None: this rank)."""
    if group is None or group.size() == 1:
        return TokenSlice(**vars(packed), counts=(len(packed.targets),))
    ranks, rank = group.size(), group.rank()
    size = -(-packed.num_tokens // ranks)

    def mine(tokens: torch.Tensor) -> torch.Tensor:
        return F.pad(tokens, (0, size * ranks - packed.num_tokens))[:, size * rank : size * (rank + 1)]

    owner = packed.hidden_index // size
    by_owner = owner.sort(stable=True).indices
    here = by_owner[owner[by_owner] == rank]
    order = torch.empty_like(by_owner).scatter_(0, by_owner, torch.arange(len(by_owner), device=by_owner.device))
    here_only = {
        "input_ids": mine(packed.input_ids),
        "position_ids": mine(packed.position_ids),
        "layout": SequenceLayout(packed.layout, packed.num_tokens, size, group),
        "hidden_index": packed.hidden_index[here] - size * rank,
        "targets": packed.targets[here],
        "noise": None if packed.noise is None else mine(packed.noise.t()).t(),
        "columns": {name: values[here] for name, values in packed.columns.items()},
    }
    counts = tuple(torch.bincount(owner, minlength=ranks).tolist())
    return TokenSlice(**{**vars(packed), **here_only}, counts=counts, order=order, group=group)
