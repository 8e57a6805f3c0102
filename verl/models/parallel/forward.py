"""The forward pass of a model whose tokens, heads or vocabulary are divided over ranks."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
import torch.distributed as dist
from torch import nn

from verl.errors import ModelError
from verl.models.forward import head_transform
from verl.models.log_probs import TokenStats, token_log_probs
from verl.models.packed import PackedLayout, Segment
from verl.models.packing import PackedBatch
from verl.models.parallel.collectives import own_range
from verl.models.parallel.sequence import Piece, take_piece
from verl.models.parallel.vocabulary import parallel_log_probs

KNOWN = {"policy": ("log_probs", "entropy", "sum_pi_squared"), "value": ("values",)}


class ParallelModel(nn.Module):
    """A model with everything that a loss needs of it in one `forward`, so that what shards its parameters sees them used
    inside one call. All parameters take part in each call, whatever the batch, and so do all ranks of both groups."""

    def __init__(self, model: Any, kind: str, sequence: dist.ProcessGroup, tensor: dist.ProcessGroup):
        super().__init__()
        self.model = model
        self.kind = kind
        self.sequence, self.tensor = sequence, tensor

    def forward(self, packed: PackedBatch, outputs: Sequence[str], temperature: float) -> dict[str, torch.Tensor]:
        """The asked outputs [batch, response], each with a graph, zero where nothing is predicted. Raises ModelError for
        an output that the model does not have."""
        for name in outputs:
            if name not in KNOWN[self.kind]:
                raise ModelError(f"A {self.kind} model has no output {name!r}; it has {', '.join(KNOWN[self.kind])}.")
        piece = take_piece(packed, self.sequence)
        decoder = self.model.get_decoder()
        states = decoder(
            input_ids=piece.input_ids, position_ids=piece.position_ids, use_cache=False, layout=piece.layout
        )
        hidden = states.last_hidden_state[0].index_select(0, piece.hidden_index)
        if self.kind == "value":
            return {"values": packed.scatter(piece.whole(self.model.value(hidden)))}
        stats = self._stats(hidden, piece, outputs, temperature)
        return {name: packed.scatter(piece.whole(getattr(stats, name))) for name in outputs}

    def _stats(self, hidden: torch.Tensor, piece: Piece, outputs: Sequence[str], temperature: float) -> TokenStats:
        head = self.model.get_output_embeddings()
        wanted: dict[str, Any] = {
            "want_entropy": "entropy" in outputs,
            "want_sum_pi_squared": "sum_pi_squared" in outputs,
            "bias": getattr(head, "bias", None),
            **head_transform(self.model.config),
        }
        if self.tensor.size() == 1:
            return token_log_probs(hidden, head.weight, piece.targets, temperature, **wanted)
        first, _ = own_range(self.model.config.get_text_config().vocab_size, self.tensor)
        return parallel_log_probs(hidden, head.weight, piece.targets, temperature, self.tensor, first, **wanted)


def empty_batch(shape: tuple[int, int], device: torch.device) -> PackedBatch:
    """One token and no prediction: what a rank computes when it only has to take part."""
    one, none = torch.zeros(1, 1, dtype=torch.int64, device=device), torch.empty(0, dtype=torch.int64, device=device)
    return PackedBatch(one, one, PackedLayout([Segment(0, 1)]), none, none, none, none, shape)
