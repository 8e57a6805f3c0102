"""The token ids that a model, its tokenizer and a run name, against those that the model has."""

from __future__ import annotations

import logging
from collections.abc import Sequence
from typing import Any

from verl.errors import ConfigError

log = logging.getLogger(__name__)

_TEXTLESS_SHARE = 0.1  # of a vocabulary without text; padding to round sizes adds less


def eos_token_ids(module: Any, tokenizer: Any) -> tuple[int, ...]:
    """Every token that ends a response: those of generation_config.json, config.json and the tokenizer, ascending. Ids that the
    model has not are left out with a warning."""
    found: set[int] = set()
    for source in (getattr(module, "generation_config", None), getattr(module, "config", None), tokenizer):
        ids = getattr(source, "eos_token_id", None)
        found.update([ids] if isinstance(ids, int) else ids or [])
    size = getattr(module.config.get_text_config(), "vocab_size", None) or max(found, default=0) + 1
    if outside := sorted(token for token in found if token >= size):
        log.warning("eos_token_id %d can end no response: the model has the token ids 0 to %d.", outside[0], size - 1)
    return tuple(sorted(token for token in found if token < size))


def check_vocabulary(size: int, tokenizer: Any, stop_token_ids: Sequence[int]) -> str:
    """A warning where many of the `size` token ids of a model have no text in its tokenizer; "" where few have none, as in
    vocabularies that are padded. Raises ConfigError for one of rollout.stop_token_ids that is not a token id of the model."""
    outside = [token for token in stop_token_ids if not 0 <= token < size]
    if outside:
        raise ConfigError(
            f"actor_rollout_ref.rollout.stop_token_ids: {outside[0]} is no token id of the model, which has 0 to {size - 1}."
        )
    if len(tokenizer) >= (1 - _TEXTLESS_SHARE) * size:
        return ""
    return (
        f"The model has {size:,} token ids and its tokenizer {len(tokenizer):,}, so that {1 - len(tokenizer) / size:.0%} of "
        "the ids have no text. A sample may consist of them; use the tokenizer that belongs to the model."
    )
