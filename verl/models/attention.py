"""Our attention behind Hugging Face's attention interface.

Models are built with `attn_implementation="verl"` and called with a `layout` keyword. The model hands it down
unchanged to every attention layer. The layout knows the tokens that each token sees: a packed batch for training (packed.py),
a cache for generation (rollout). So training and rollout run the same modules on the same weights, and no model is
patched.
"""

from typing import NamedTuple, Protocol

import torch
from transformers import AttentionInterface

ATTENTION_NAME = "verl"


class Scoring(NamedTuple):
    """The scores of a layer: q.k * scale, capped to softcap * tanh(score / softcap), the newest `window`
    tokens only."""

    scale: float
    window: int | None = None
    softcap: float | None = None


class AttentionLayout(Protocol):
    def attend(self, layer: int, q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, scoring: Scoring) -> torch.Tensor:
        """q [1, heads, tokens, head_dim], k and v [1, kv_heads, tokens, head_dim], rotary embedding applied.
        Returns [1, tokens, heads, head_dim]."""
        ...


class AttentionModule(Protocol):
    """An attention layer of transformers."""

    layer_idx: int


def verl_attention(
    module: AttentionModule,
    query: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
    attention_mask: torch.Tensor | None,
    layout: AttentionLayout | None = None,
    scaling: float | None = None,
    dropout: float = 0.0,
    sliding_window: int | None = None,
    softcap: float | None = None,
    **_: object,
) -> tuple[torch.Tensor, None]:
    """The function that transformers calls in each layer; see AttentionLayout for shapes."""
    if layout is None:
        raise RuntimeError("A model with verl attention was called without `layout=`; call it through verl.models.")
    if attention_mask is not None:
        raise RuntimeError(
            "attention scores get a mask or bias of the family's own, which packed attention does not add"
        )
    if sliding_window is None:  # some families keep it on the module only
        sliding_window = getattr(module, "sliding_window", None)
    scoring = Scoring(query.shape[-1] ** -0.5 if scaling is None else scaling, sliding_window, softcap)
    return layout.attend(module.layer_idx, query, key, value, scoring), None


AttentionInterface.register(ATTENTION_NAME, verl_attention)
