"""Check on a few tokens that a loaded model computes the same through our attention and head as through its own."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import torch

from verl.errors import ModelError
from verl.models.attention import ATTENTION_NAME
from verl.models.forward import hidden_states, packed_outputs
from verl.models.packed import PackedLayout
from verl.models.packing import PackedBatch, pack_rows

# two samples of one prompt, of unequal length; ids that every vocabulary has
_PROMPT, _RESPONSES = (1, 2, 3, 4), ((5, 6, 7, 8), (7, 5))
_RELATIVE_TOLERANCE = {torch.float32: 1e-3, torch.float64: 1e-3, torch.bfloat16: 0.1}


class _NotingLayout(PackedLayout):
    """Remembers which layers called it."""

    def __init__(self, layout: PackedLayout):
        super().__init__(layout.segments)
        self.layers: set[int] = set()

    def attend(self, layer: int, *args: Any, **kwargs: Any) -> torch.Tensor:
        self.layers.add(layer)
        return super().attend(layer, *args, **kwargs)


@torch.no_grad()
def check_model(module: Any) -> None:
    """Raises ModelError naming the architecture when a layer passes our attention by, or when packed and
    prefix-shared results differ from plain forwards with the family's own eager attention (sinks, biases or caps that
    we do not have)."""
    name = type(module.get_decoder()).__name__
    device = next(module.parameters()).device
    packed = pack_rows(_columns(), device=device)
    layout = _NotingLayout(packed.layout)
    packed = PackedBatch(**{**vars(packed), "layout": layout})
    with _mode(module, training=False):
        ours = _describe(module, packed)
        expected_layers = set(range(module.config.get_text_config().num_hidden_layers))
        if layout.layers != expected_layers:
            passed_by = sorted(expected_layers - layout.layers)
            raise ModelError(
                f"{name} is not supported: its layers {passed_by[:4]} do not go through the attention interface that "
                "packed training needs. Use a dense-attention decoder (Llama, Qwen, Mistral, Gemma and their families)."
            )
        theirs = _reference(module, device)
    error = ((ours - theirs).norm() / theirs.norm()).item()
    if not error < _RELATIVE_TOLERANCE[next(module.parameters()).dtype]:
        raise ModelError(
            f"{name} is not supported: its packed forward differs from its own attention (relative error {error:.2g}), "
            "so it uses an attention or logit variant that verl does not have."
        )


def _describe(module: Any, packed: PackedBatch) -> torch.Tensor:
    """The compared values: log-probs of a policy, hidden states of a value model; float32 [predictions, ...]."""
    if hasattr(module, "get_output_embeddings"):
        return packed_outputs(module, packed, ("log_probs",))["log_probs"][packed.row, packed.column].float()
    return hidden_states(module, packed).float()


def _reference(module: Any, device: torch.device) -> torch.Tensor:
    """The same through the model's own eager attention, one row at a time."""
    rows = []
    decoder = module if hasattr(module, "get_output_embeddings") else module.get_decoder()
    decoder.set_attn_implementation("eager")
    try:
        for response in _RESPONSES:
            ids = torch.tensor([_PROMPT + response], device=device)
            output = decoder(input_ids=ids, use_cache=False)
            predicting = slice(len(_PROMPT) - 1, -1)
            if hasattr(output, "logits"):
                log_probs = output.logits[0, predicting].float().log_softmax(-1)
                rows.append(log_probs.gather(1, torch.tensor(response, device=device).unsqueeze(1)).squeeze(1))
            else:
                rows.append(output.last_hidden_state[0, predicting].float())
    finally:
        decoder.set_attn_implementation(ATTENTION_NAME)
    return torch.cat(rows)


def _columns() -> dict[str, torch.Tensor]:
    width = max(len(r) for r in _RESPONSES)
    responses = torch.tensor([[*r, *[0] * (width - len(r))] for r in _RESPONSES])
    prompts = torch.tensor([_PROMPT] * len(_RESPONSES))
    mask = torch.tensor([[i < len(r) for i in range(width)] for r in _RESPONSES])
    return {
        "prompts": prompts,
        "prompt_mask": torch.ones_like(prompts).bool(),
        "responses": responses,
        "response_mask": mask,
    }


@contextmanager
def _mode(module: Any, training: bool) -> Iterator[None]:
    before = module.training
    module.train(training)
    try:
        yield
    finally:
        module.train(before)
