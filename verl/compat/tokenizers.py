"""Tokenizers and processors by folder or hub name, as recipes load them."""

from __future__ import annotations

import logging
from collections.abc import Mapping
from typing import Any

log = logging.getLogger(__name__)


def hf_tokenizer(
    name_or_path: str,
    correct_pad_token: bool = True,
    correct_gemma2: bool = True,
    trust_remote_code: bool = False,
    **_other: Any,
) -> Any:
    """The tokenizer of a folder or hub name, with a pad token. Raises ModelError."""
    from verl.config import ModelConfig
    from verl.models.load import load_tokenizer

    return load_tokenizer(ModelConfig(path=name_or_path, trust_remote_code=trust_remote_code))


def hf_processor(name_or_path: str, trust_remote_code: bool = False, **settings: Any) -> Any:
    """The processor (images, audio) of a folder or hub name; None for a model of text alone. Raises ModelError for a folder
    that is not there."""
    import transformers

    from verl.models.load import locate

    source = locate(name_or_path)
    try:
        found = transformers.AutoProcessor.from_pretrained(source, trust_remote_code=trust_remote_code, **settings)
    except (OSError, ValueError, KeyError, ImportError, TypeError) as error:
        log.info("%s has no processor: %s", name_or_path, str(error).splitlines()[0])
        return None
    # for a model of text AutoProcessor falls back to its tokenizer
    return found if isinstance(found, transformers.ProcessorMixin) else None


def set_pad_token_id(tokenizer: Any) -> None:
    """Give `tokenizer` its end-of-sequence token as pad token where it has none."""
    if tokenizer.pad_token_id is None:
        tokenizer.pad_token_id = tokenizer.eos_token_id
        log.warning("The tokenizer has no pad token; its end-of-sequence token %s stands in.", tokenizer.eos_token_id)


def normalize_token_ids(tokenized_output: Any) -> list[int]:
    """The token ids of one text as a flat list, from any form that `apply_chat_template(tokenize=True)` returns: a list, an
    array, a batch of one, or a mapping with `input_ids`. Raises TypeError for anything else."""
    ids = tokenized_output
    if isinstance(ids, Mapping):
        ids = ids["input_ids"]
    elif hasattr(ids, "input_ids"):
        ids = ids.input_ids
    if hasattr(ids, "tolist"):
        ids = ids.tolist()
    ids = list(ids) if isinstance(ids, (list, tuple)) else ids
    if isinstance(ids, list) and len(ids) == 1 and isinstance(ids[0], (list, tuple)):
        ids = list(ids[0])
    if not isinstance(ids, list) or not all(hasattr(i, "__index__") for i in ids):
        raise TypeError(f"Token ids are a flat list of integers, not {type(tokenized_output).__name__}: {ids!r:.80}")
    return [int(i) for i in ids]
