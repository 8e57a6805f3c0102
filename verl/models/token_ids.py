"""Checks of the token ids that a model, its tokenizer and a run name against the ids that the model has."""

from __future__ import annotations

import json
import logging
import re
from collections.abc import Sequence
from typing import Any

from verl.errors import ConfigError, ModelError
from verl.foreign_text import clean

log = logging.getLogger(__name__)

_TEXTLESS_SHARE = 0.1  # of a vocabulary without text; padding to round sizes adds less


def eos_token_ids(module: Any, tokenizer: Any) -> tuple[int, ...]:
    """Tokens that end a response, from generation_config.json, config.json and the tokenizer, ascending. Ids that the model
    does not have are left out with a warning."""
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


def count_as_text(tokenizer: Any, names: Sequence[str]) -> None:
    """Let `skip_special_tokens` keep the added tokens `names` of a fast tokenizer. Raises ModelError."""
    state = json.loads(tokenizer.backend_tokenizer.to_str())
    added = {token["content"]: token for token in state["added_tokens"]}
    if unknown := [name for name in names if name not in added]:
        raise ModelError(
            f"model.text_tokens has {clean(unknown[0], 80)!r}, which is no added token of the tokenizer; it has "
            f"{clean(', '.join(added), 400)}."
        )
    for name in names:
        added[name]["special"] = False
    tokenizer._tokenizer = type(tokenizer.backend_tokenizer).from_str(json.dumps(state))


def hidden_tags(tokenizer: Any) -> list[str]:
    """Special tokens that come as an opening and a closing tag (<think>, </think>): decoding for scorers leaves them out."""
    added = {token.content for token in getattr(tokenizer, "added_tokens_decoder", {}).values() if token.special}
    opening = [name for name in sorted(added) if re.fullmatch(r"<[A-Za-z_]{2,}>", name) and f"</{name[1:]}" in added]
    return [tag for name in opening for tag in (name, f"</{name[1:]}")]
