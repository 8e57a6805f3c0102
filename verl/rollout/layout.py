"""Attention of one forward of the native engine: decode rows over their caches, chunks of prompts over theirs.

tokens of a forward   [ decode row 0 .. R-1 | chunk of prompt a | chunk of prompt b | ... ]
keys of a decode row  prefix store, slot of its group (the prompt, stored once)  +  row store, slot = row (its response)
keys of a chunk       prefix store, slot of its group, up to itself
"""

from dataclasses import dataclass

import torch
import torch.nn.functional as F

from verl.models.attention import Scoring
from verl.models.delta_net import DeltaInputs
from verl.models.routing import Routing
from verl.rollout.native.torch.decode_attention import DecodeRows
from verl.rollout.native.torch.kv_cache import SlotStore
from verl.rollout.native.torch.partial_attention import additive_mask, attend_plain


@dataclass(frozen=True)
class Chunk:
    """Tokens [start, end) of a prompt that are computed in this forward; they go to `slot` of the prefix store."""

    slot: int
    start: int
    end: int


class StepLayout:
    """The layout of one forward (see the head of this file); `attend` is what each attention layer calls.

    `rows` is None when no sample runs, else has been advanced to this forward; `chunks` go to the store `prefix`.
    """

    def __init__(self, rows: DecodeRows | None, prefix: SlotStore, chunks: list[Chunk]):
        self._rows, self._prefix, self._pieces = rows, prefix, chunks
        self.routing: Routing | None = None  # of the tokens, if experts are recorded

    def attend(self, layer: int, q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, scoring: Scoring) -> torch.Tensor:
        """See AttentionLayout: q [1, heads, tokens, head_dim] -> [1, tokens, heads, head_dim]. Stores k and v."""
        q, k, v = (x[0].transpose(0, 1) for x in (q, k, v))
        return self.attend_tokens(layer, q, k, v, scoring).unsqueeze(0)

    def attend_tokens(
        self, layer: int, q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, scoring: Scoring
    ) -> torch.Tensor:
        """`attend` for q [tokens, heads, head_dim], k and v [tokens, kv_heads, head_dim]; returns what q is shaped like, good
        until the next call."""
        dtype = q.dtype
        if dtype == torch.bfloat16 and q.device.type == "cpu":
            # the operands stay bfloat16 values, and batched matmuls of float32 are the fast ones
            q, k, v = q.float(), k.float(), v.float()
        if not self._pieces and self._rows is not None:
            return self._rows.attend(layer, q, k, v, scoring).to(dtype)
        start, parts = 0, []
        if self._rows is not None:
            start = self._rows.num_rows
            parts.append(self._rows.attend(layer, q[:start], k[:start], v[:start], scoring))
        for chunk in self._pieces:
            tokens = slice(start, start + chunk.end - chunk.start)
            parts.append(self._prefill(layer, chunk, q[tokens], k[tokens], v[tokens], scoring))
            start = tokens.stop
        return torch.cat(parts).to(dtype)

    def recur(self, layer: int, inputs: DeltaInputs) -> torch.Tensor:
        """Outputs [tokens, heads, value_dim] of linear attention. Renews the states of rows and of the prompts of chunks."""
        start, parts, first = 0, [], inputs.first_states
        if self._rows is not None:
            start = self._rows.num_rows
            parts.append(inputs.part(0, start).stepped(self._rows.states(layer, first)))
        for chunk in self._pieces:
            end = start + chunk.end - chunk.start
            states = [t[chunk.slot : chunk.slot + 1] for t in self._prefix.states(layer, first)]
            if not chunk.start:
                for state in states:
                    state.zero_()
            parts.append(inputs.part(start, end).continued(states))
            start = end
        return torch.cat(parts)

    def _prefill(
        self, layer: int, chunk: Chunk, q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, scoring: Scoring
    ) -> torch.Tensor:
        keys, values = self._prefix.tensors(layer, k, v)
        q, k, v = (x.transpose(0, 1).unsqueeze(0) for x in (q, k, v))
        keys[chunk.slot, :, chunk.start : chunk.end] = k[0]
        values[chunk.slot, :, chunk.start : chunk.end] = v[0]
        if chunk.start:
            k, v = keys[chunk.slot, None, :, : chunk.end], values[chunk.slot, None, :, : chunk.end]
        groups = q.shape[1] // k.shape[1]
        if scoring.softcap is not None:
            folded = q.unflatten(1, (-1, groups)).flatten(2, 3)
            mask = additive_mask(_causal(chunk, scoring.window, q.device), q.dtype).repeat(groups, 1)
            out, _ = attend_plain(folded, k, v, mask, scoring)
            tokens_first: torch.Tensor = out.unflatten(2, (groups, -1)).flatten(1, 2)[0].transpose(0, 1)
            return tokens_first
        is_complete = not chunk.start and (scoring.window is None or chunk.end <= scoring.window)
        visible = None if is_complete else _causal(chunk, scoring.window, q.device)
        out = F.scaled_dot_product_attention(
            q, k, v, attn_mask=visible, is_causal=is_complete, scale=scoring.scale, enable_gqa=groups > 1
        )
        return out[0].transpose(0, 1)


def _causal(chunk: Chunk, window: int | None, device: torch.device) -> torch.Tensor:
    """bool [tokens of the chunk, tokens so far]: the keys that each token sees."""
    query = torch.arange(chunk.start, chunk.end, device=device)[:, None]
    key = torch.arange(chunk.end, device=device)
    visible = key <= query
    return visible if window is None else visible & (key > query - window)
