"""Attention to one part of the keys, with the log-sum-exp of its scores, so that parts can be merged exactly.

To shared prompts: aten's flash attention for CPU, as fast as batched matmuls and without scores in memory. A plain attention
replaces it for soft-capped scores and other devices. To a row's own tokens: batched matmuls with keys as columns. They came
nearest to the time of reading keys and values once. For 64 rows, 64 tokens and 30 layers they took 13.6 ms, flash attention
16 to 19 ms, gathered pages of 16 tokens 39 ms, and only reading 10 ms.
"""

import torch

from verl.models.attention import Scoring

_FLASH = getattr(torch.ops.aten, "_scaled_dot_product_flash_attention_for_cpu", None)


def additive_mask(visible: torch.Tensor, dtype: torch.dtype) -> torch.Tensor:
    """0 for visible keys, else a finite number so low that its softmax weight is 0. A part without visible keys then merges
    with weight 0; minus infinity would give NaN."""
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
    mask of the tokens that a row has. `block` is (first row, last row + 1, longest length).
    """

    def __init__(
        self,
        block: tuple[int, int, int],
        queries: torch.Tensor,
        out: torch.Tensor,
        window: int | None,
        has_prefix: bool,
    ):
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
