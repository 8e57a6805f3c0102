"""Attention to one part of the keys, such that parts can be merged exactly.

To shared prompts: aten's flash attention for CPU, as fast as batched matmuls there and without their scores in memory. A
plain attention replaces it for soft-capped scores and other devices. To a row's own tokens: batched matmuls with keys as
columns, which came nearest to the time of reading keys and values once (64 rows, 64 tokens: 13.6 ms for 30 layers, flash
attention 16 to 19, pages of 16 tokens gathered 39, only reading 10).
"""

from __future__ import annotations

import functools

import torch

from verl.models.attention import Scoring

_FLASH = getattr(torch.ops.aten, "_scaled_dot_product_flash_attention_for_cpu", None)


def additive_mask(visible: torch.Tensor, dtype: torch.dtype) -> torch.Tensor:
    """0 where visible, else a finite number so low that it weighs 0: a part of which nothing is visible then merges with
    weight 0, where minus infinity would give NaN."""
    low = torch.finfo(dtype).min / 2
    return torch.zeros_like(visible, dtype=dtype).masked_fill_(~visible, low)


def attend_part(
    q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, mask: torch.Tensor | None, scoring: Scoring
) -> tuple[torch.Tensor, torch.Tensor]:
    """Attention of q [batch, kv_heads, queries, head_dim] to k, v [batch, kv_heads, tokens, head_dim] with an additive
    mask: the output and the log-sum-exp of its scores, float32 [batch, kv_heads, queries]."""
    if scoring.softcap is None and q.device.type == "cpu" and _FLASH is not None and k.shape[-1] == v.shape[-1]:
        out, lse = _FLASH(q, k, v, 0.0, False, attn_mask=mask, scale=scoring.scale)
        return out, lse
    return attend_plain(q, k, v, mask, scoring)


def attend_plain(
    q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, mask: torch.Tensor | None, scoring: Scoring
) -> tuple[torch.Tensor, torch.Tensor]:
    """`attend_part` by its definition."""
    scores = torch.matmul(q, k.transpose(-1, -2)).float() * scoring.scale
    if scoring.softcap is not None:
        scores = torch.tanh(scores / scoring.softcap) * scoring.softcap
    if mask is not None:
        scores = scores + mask
    lse = scores.logsumexp(-1)
    return torch.matmul((scores - lse.unsqueeze(-1)).exp().to(v.dtype), v), lse


def stack_blocks(parts: list[tuple[torch.Tensor, torch.Tensor]]) -> tuple[torch.Tensor, torch.Tensor]:
    """The (out, lse) of consecutive blocks of the batch as one pair."""
    if len(parts) == 1:
        return parts[0]
    return torch.cat([out for out, _ in parts]), torch.cat([lse for _, lse in parts])


class OwnPart:
    """Attention of a block of decode rows to their own slots, and to their prefix as one more key.

    Holds what all layers of a kind work in: views of `queries` and `out` [rows, kv_heads, groups, head_dim], scores, and the
    mask of the tokens that a row has. `block` is (first row, last row + 1, longest length). With `copies` keys and values are
    copied before they are multiplied, into the layout that a single row has.
    """

    def __init__(
        self,
        block: tuple[int, int, int],
        queries: torch.Tensor,
        out: torch.Tensor,
        window: int | None,
        has_prefix: bool,
        copies: bool = False,
    ):
        self._copies = copies
        self.start, self.end, self.longest = block
        self._window = window if window is not None and self.longest > window else None
        _, kv_heads, groups, _ = queries.shape
        self._by_row = (self.end - self.start, kv_heads)
        self._queries = queries[self.start : self.end].flatten(0, 1)
        self._out_by_row = out[self.start : self.end]
        self._out = self._out_by_row.flatten(0, 1)
        self._mask = queries.new_empty(self._by_row[0], 1, 1, self.longest)
        self._tokens = torch.arange(self.longest, device=queries.device)
        # the library multiplies a batch at once only into a contiguous result, so a longer one comes after it
        self._products = queries.new_empty(len(self._queries), groups, self.longest)
        self._products_by_row = self._products.unflatten(0, self._by_row)
        self._scores = queries.new_empty(*self._products.shape[:2], self.longest + has_prefix)
        self._weights = torch.empty_like(self._scores)
        self._own_weights = self._weights[..., : self.longest]
        by_row = self._scores.unflatten(0, self._by_row)
        self._own_scores, self._prefix_scores = by_row[..., : self.longest], by_row[..., -1]
        self._prefix_weight = self._weights.unflatten(0, self._by_row)[..., -1:]

    def set_lengths(self, newest: torch.Tensor) -> None:
        """`newest` int64 [all rows]: the token of each row's slot that is its newest."""
        newest = newest[self.start : self.end, None]
        visible = self._tokens <= newest
        if self._window is not None:
            visible &= self._tokens > newest - self._window
        self._mask[:, 0, 0] = additive_mask(visible, self._mask.dtype)

    def matrices(self, keys: torch.Tensor, values: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        """Operands of `attend`, of a layer's keys [slots, kv_heads, head_dim, capacity] and values [slots, kv_heads, capacity,
        head_dim]: [rows of the block * kv_heads, head_dim, longest] and [..., longest, head_dim]."""
        block = slice(self.start, self.end)
        return keys[block].flatten(0, 1)[:, :, : self.longest], values[block].flatten(0, 1)[:, : self.longest]

    def attend(
        self,
        keys: torch.Tensor,
        values: torch.Tensor,
        prefix: tuple[torch.Tensor, torch.Tensor] | None,
        softcap: float | None,
    ) -> None:
        """From queries, scaled, to `out`; `prefix` is the output and log-sum-exp of all rows, [rows, kv_heads, groups, ...]."""
        if self._copies:
            keys, values = keys.contiguous(), values.contiguous()
        torch.bmm(self._queries, keys, out=self._products)
        if softcap is not None:
            self._products.div_(softcap).tanh_().mul_(softcap)
        torch.add(self._products_by_row, self._mask, out=self._own_scores)
        if prefix is not None:
            self._prefix_scores.copy_(prefix[1][self.start : self.end])
        torch.softmax(self._scores, -1, out=self._weights)
        torch.bmm(self._own_weights, values, out=self._out)
        if prefix is not None:
            self._out_by_row.addcmul_(prefix[0][self.start : self.end], self._prefix_weight)


@functools.cache
def own_rows_alike(
    rows: int,
    kv_heads: int,
    groups: int,
    head_dim: int,
    value_dim: int,
    length: int,
    capacity: int,
    has_prefix: bool,
    dtype: torch.dtype,
    threads: int,
) -> bool:
    """Whether a row in a block of `rows`, in a store of `capacity` tokens, gets the bits of a single row. Tested with random
    numbers, the same in every row."""
    del threads  # other kernels may be chosen for another number of them
    generator = torch.Generator().manual_seed(0)

    def random(*shape: int) -> torch.Tensor:
        return torch.randn(shape, generator=generator).to(dtype)

    q = random(1, kv_heads, groups, head_dim)
    k = random(kv_heads, head_dim, length)
    v = random(kv_heads, length, value_dim)
    prefix = (random(1, kv_heads, groups, value_dim), random(1, kv_heads, groups)) if has_prefix else None

    def attended(rows: int, capacity: int) -> torch.Tensor:
        keys, values = k.new_zeros(rows, kv_heads, head_dim, capacity), v.new_zeros(rows, kv_heads, capacity, value_dim)
        keys[..., :length], values[:, :, :length] = k, v
        queries, out = q.repeat(rows, 1, 1, 1), q.new_empty(rows, kv_heads, groups, value_dim)
        part = OwnPart((0, rows, length), queries, out, None, has_prefix)
        part.set_lengths(torch.full((rows,), max(0, length - 3)))
        whole = None if prefix is None else (prefix[0].expand_as(out), prefix[1].expand(rows, -1, -1))
        part.attend(*part.matrices(keys, values), whole, None)
        return out

    alone, together = attended(1, length), attended(rows, capacity)
    return torch.equal(together, alone.expand_as(together))


@functools.cache
def prompts_alike(
    slots: int,
    kv_heads: int,
    queries: int,
    head_dim: int,
    value_dim: int,
    length: int,
    capacity: int,
    dtype: torch.dtype,
    threads: int,
) -> bool:
    """`own_rows_alike` for the prompts of `slots` groups, each asked by `queries` queries per key head."""
    del threads
    generator = torch.Generator().manual_seed(0)
    shapes = (queries, head_dim), (length, head_dim), (length, value_dim)
    q, k, v = (torch.randn(1, kv_heads, *shape, generator=generator).to(dtype) for shape in shapes)

    def attended(slots: int, capacity: int) -> tuple[torch.Tensor, torch.Tensor]:
        keys, values = (x.new_zeros(slots, kv_heads, capacity, x.shape[-1]) for x in (k, v))
        keys[:, :, :length], values[:, :, :length] = k, v
        scoring = Scoring(1.0)
        return attend_part(q.repeat(slots, 1, 1, 1), keys[:, :, :length], values[:, :, :length], None, scoring)

    pairs = zip(attended(1, length), attended(slots, capacity), strict=True)
    return all(torch.equal(together, alone.expand_as(together)) for alone, together in pairs)
