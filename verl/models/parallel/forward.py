"""The forward pass of a model with tokens, heads or vocabulary divided over ranks."""

from collections.abc import Sequence
from dataclasses import replace
from functools import partial
from typing import Any

import torch
import torch.distributed as dist
from torch import nn

from verl.models.forward import (
    computed_outputs,
    decoder_states,
    fuses_log_probs,
    head_transform,
    hidden_states,
    logit_outputs,
    weight_of,
)
from verl.models.grad_buffers import GradientBuffers
from verl.models.log_probs import TokenStats, token_log_probs
from verl.models.ops.varlen import PackedSegment
from verl.models.outputs import HeadInputs, statistics_wanted
from verl.models.packed import PackedLayout
from verl.models.packing import PackedBatch
from verl.models.padded import forward_kind, padded_states
from verl.models.parallel.collectives import own_range
from verl.models.parallel.sequence import TokenSlice, take_slice
from verl.models.parallel.vocabulary import parallel_log_probs
from verl.models.vision import is_vision_model, vision_states


class ParallelModel(nn.Module):
    """A model with everything that a loss needs of it in one `forward`, so that what shards its parameters sees them used
    inside one call. All parameters take part in each call with any batch, and so do all ranks of both groups (None: this
    rank)."""

    def __init__(self, model: Any, sequence: dist.ProcessGroup | None = None, tensor: dist.ProcessGroup | None = None):
        super().__init__()
        self.in_units = False  # whether verl.models.decoder computes the model
        self.gradients: GradientBuffers | None = None  # it gets the gradients of weights, if given
        self.model = model
        self.sequence, self.tensor = (g if g is not None and g.size() > 1 else None for g in (sequence, tensor))

    def forward(self, packed: PackedBatch, outputs: Sequence[str], temperature: float) -> dict[str, torch.Tensor]:
        """As verl.models.forward.packed_outputs; differentiable outputs have a graph even if nothing is predicted."""
        if forward_kind(self.model) == "logits":
            return logit_outputs(self.model, packed, outputs, temperature)
        part = take_slice(packed, self.sequence)
        if self.in_units:
            hidden = hidden_states(self.model, part, self.gradients)
        elif forward_kind(self.model) == "padded":  # no group divides the tokens of these
            hidden = padded_states(self.model, packed)
        elif self.sequence is self.tensor is None and is_vision_model(self.model):
            hidden = vision_states(self.model, packed).index_select(0, part.hidden_index)
        else:
            hidden = decoder_states(self.model.get_decoder(), part).index_select(0, part.hidden_index)
        if packed.layout.routing is not None and self.sequence is not None:
            packed.layout.routing.gather(part.layout.routing, packed.num_tokens, self.sequence)
        statistics = partial(self._statistics, hidden, part, outputs, temperature)
        inputs = HeadInputs(self.model, hidden, part.targets, temperature, statistics)
        computed = computed_outputs(inputs, packed, outputs, part.whole)
        # FSDP2 hooks outputs, and an operation in place on a view would drop its hook
        return {name: values.clone() if values._is_view() else values for name, values in computed.items()}

    def _statistics(
        self, hidden: torch.Tensor, part: TokenSlice, outputs: Sequence[str], temperature: float
    ) -> TokenStats:
        head, num_tokens = self.model.get_output_embeddings(), self.model.config.get_text_config().vocab_size
        options: dict[str, Any] = {
            "bias": getattr(head, "bias", None),
            **statistics_wanted(outputs, part.columns, num_tokens),
            **head_transform(self.model.config),
        }
        if self.tensor is None:
            options |= {"fused": fuses_log_probs(self.model), "gradients": self.gradients}
            return token_log_probs(hidden, weight_of(head), part.targets, temperature, **options)
        first, _ = own_range(num_tokens, self.tensor)
        return parallel_log_probs(hidden, head.weight, part.targets, temperature, self.tensor, first, **options)


def empty_batch(packed: PackedBatch) -> PackedBatch:
    """One token and no prediction, for a `packed` without tokens: the batch of a rank that only has to take part."""
    one = torch.zeros(1, 1, dtype=torch.int64, device=packed.input_ids.device)
    return replace(packed, input_ids=one, position_ids=one, layout=PackedLayout([PackedSegment(0, 1)]), noise=None)
