"""Who sees whom in one forward of the native engine: decode rows against their caches, prompt pieces against theirs.

tokens of a forward   [ decode row 0 .. R-1 | piece of prompt a | piece of prompt b | ... ]
keys of a decode row  prefix store, slot of its group (the prompt, stored once)  +  own store, slot = row (its response)
keys of a piece       prefix store, slot of its group, up to itself
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
import torch.nn.functional as F

from verl.rollout.native.decode_attention import DecodeRows
from verl.rollout.native.kv_cache import SlotStore
from verl.rollout.native.partial_attention import Scoring, additive_mask, attend_plain


@dataclass(frozen=True)
class Piece:
    """Tokens [start, end) of a prompt that are computed in this forward; they go to `slot` of the prefix store."""

    slot: int
    start: int
    end: int


class StepLayout:
    """The layout of one forward (see the head of this file); `attend` is what each attention layer calls.

    `rows` is None when no sample runs, else has been advanced to this forward; `pieces` go to the store `prefix`.
    """

    def __init__(self, rows: DecodeRows | None, prefix: SlotStore, pieces: list[Piece]):
        self._rows, self._prefix, self._pieces = rows, prefix, pieces

    def attend(
        self,
        layer: int,
        q: torch.Tensor,
        k: torch.Tensor,
        v: torch.Tensor,
        *,
        scale: float | None,
        sliding_window: int | None,
        softcap: float | None,
    ) -> torch.Tensor:
        """See AttentionLayout: q [1, heads, tokens, head_dim] -> [1, tokens, heads, head_dim]. Stores k and v."""
        scoring = Scoring(q.shape[-1] ** -0.5 if scale is None else scale, sliding_window, softcap)
        q, k, v = (x[0].transpose(0, 1) for x in (q, k, v))
        return self.attend_tokens(layer, q, k, v, scoring).unsqueeze(0)

    def attend_tokens(
        self, layer: int, q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, scoring: Scoring
    ) -> torch.Tensor:
        """`attend` for q [tokens, heads, head_dim], k and v [tokens, kv_heads, head_dim]; returns what q is shaped like, good
        until the next call."""
        dtype = q.dtype
        if dtype == torch.bfloat16 and q.device.type == "cpu":
            # what is multiplied stays a bfloat16 number, and the batched products of float32 are the fast ones
            q, k, v = q.float(), k.float(), v.float()
        if not self._pieces and self._rows is not None:
            return self._rows.attend(layer, q, k, v, scoring).to(dtype)
        start, parts = 0, []
        if self._rows is not None:
            start = self._rows.num_rows
            parts.append(self._rows.attend(layer, q[:start], k[:start], v[:start], scoring))
        for piece in self._pieces:
            tokens = slice(start, start + piece.end - piece.start)
            parts.append(self._prefill(layer, piece, q[tokens], k[tokens], v[tokens], scoring))
            start = tokens.stop
        return torch.cat(parts).to(dtype)

    def _prefill(
        self, layer: int, piece: Piece, q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, scoring: Scoring
    ) -> torch.Tensor:
        keys, values = self._prefix.tensors(layer, k, v)
        q, k, v = (x.transpose(0, 1).unsqueeze(0) for x in (q, k, v))
        keys[piece.slot, :, piece.start : piece.end] = k[0]
        values[piece.slot, :, piece.start : piece.end] = v[0]
        if piece.start:
            k, v = keys[piece.slot, None, :, : piece.end], values[piece.slot, None, :, : piece.end]
        groups = q.shape[1] // k.shape[1]
        if scoring.softcap is not None:
            folded = q.unflatten(1, (-1, groups)).flatten(2, 3)
            mask = additive_mask(_causal(piece, scoring.window, q.device), q.dtype).repeat(groups, 1)
            out, _ = attend_plain(folded, k, v, mask, scoring)
            return out.unflatten(2, (groups, -1)).flatten(1, 2)[0].transpose(0, 1)
        whole = not piece.start and (scoring.window is None or piece.end <= scoring.window)
        visible = None if whole else _causal(piece, scoring.window, q.device)
        out = F.scaled_dot_product_attention(
            q, k, v, attn_mask=visible, is_causal=whole, scale=scoring.scale, enable_gqa=groups > 1
        )
        return out[0].transpose(0, 1)


def _causal(piece: Piece, window: int | None, device: torch.device) -> torch.Tensor:
    """bool [tokens of the piece, tokens so far]: which keys each token sees."""
    query = torch.arange(piece.start, piece.end, device=device)[:, None]
    key = torch.arange(piece.end, device=device)
    visible = key <= query
    return visible if window is None else visible & (key > query - window)
