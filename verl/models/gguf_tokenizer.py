"""Tokenizers in GGUF files: tokens, merges, special tokens and chat template, with llama.cpp's name for how text is split."""

from __future__ import annotations

import logging
from collections.abc import Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Any

from verl.errors import ModelError
from verl.foreign_text import quoted
from verl.models.folder import read_json_object

if TYPE_CHECKING:
    import gguf

log = logging.getLogger(__name__)

_CONTRACTIONS, _WORDS = r"(?i:'s|'t|'re|'ve|'m|'ll|'d)|", r"[^\r\n\p{L}\p{N}]?\p{L}+|"
_REST = r"| ?[^\s\p{L}\p{N}]+[\r\n]*|\s*[\r\n]+|\s+(?!\S)|\s+"
_UPPER, _LOWER = r"[\p{Lu}\p{Lt}\p{Lm}\p{Lo}\p{M}]", r"[\p{Ll}\p{Lm}\p{Lo}\p{M}]"
_TEKKEN = (
    rf"[^\r\n\p{{L}}\p{{N}}]?{_UPPER}*{_LOWER}+|[^\r\n\p{{L}}\p{{N}}]?{_UPPER}+{_LOWER}*|\p{{N}}"
    r"| ?[^\s\p{L}\p{N}]+[\r\n/]*|\s*[\r\n]+|\s+(?!\S)|\s+"
)
# what precedes the bytes in pre_tokenizer of tokenizer.json -> tokenizer.ggml.pre, as in llama.cpp's src/llama-vocab.cpp
_SPLITS = {
    (): "gpt-2",
    ("Digits",): "smollm",
    (_CONTRACTIONS + _WORDS + r"\p{N}{1,3}" + _REST,): "llama-bpe",
    (_CONTRACTIONS + _WORDS + r"\p{N}" + _REST,): "qwen2",
    (_TEKKEN,): "tekken",
}


def add_tokenizer(writer: gguf.GGUFWriter, folder: Path, num_embeddings: int) -> None:
    """Add the tokenizer in `folder` to a file. Raises ModelError for a kind that llama.cpp would split in another way."""
    import gguf

    tokenizer = read_json_object(folder / "tokenizer.json")
    model: Mapping[str, Any] = tokenizer["model"]
    if model.get("type") != "BPE":
        raise ModelError(f"GGUF export takes BPE tokenizers; {folder} has one of type {quoted(model.get('type'), 40)}.")
    vocabulary: dict[str, int] = {**model["vocab"], **{t["content"]: t["id"] for t in tokenizer["added_tokens"]}}
    special = {token["id"]: token["special"] for token in tokenizer["added_tokens"]}
    by_id = {number: token for token, number in vocabulary.items()}
    tokens, types = [], []
    for number in range(num_embeddings):
        tokens.append(by_id.get(number, f"[PAD{number}]"))
        types.append(_type(tokens[-1], number in by_id, special.get(number), bool(model.get("byte_fallback"))))
    writer.add_token_list(tokens)
    writer.add_token_types(types)
    if model.get("byte_fallback"):
        writer.add_tokenizer_model("llama")  # SentencePiece merges by scores
        writer.add_token_scores(_scores(model["merges"], tokens))
        writer.add_add_space_prefix(_adds_prefix_space(tokenizer))
    else:
        if not model.get("merges"):
            log.warning(
                "The tokenizer in %s has no merges: neither llama.cpp nor transformers reads the GGUF file.", folder
            )
        writer.add_tokenizer_model("gpt2")
        writer.add_tokenizer_pre(_split(tokenizer.get("pre_tokenizer") or {}, folder))
    special_tokens = gguf.SpecialVocab(folder, load_merges=not model.get("byte_fallback"), n_vocab=num_embeddings)
    special_tokens.add_special_token.setdefault("bos", False)  # llama.cpp's default depends on the kind
    special_tokens.add_to_gguf(writer, quiet=True)


def _type(token: str, is_used: bool, is_special: bool | None, has_bytes: bool) -> gguf.TokenType:
    """`is_special` is None for tokens that were not added."""
    from gguf import TokenType

    if not is_used:
        return TokenType.UNUSED
    if is_special is not None:
        return TokenType.CONTROL if is_special else TokenType.USER_DEFINED
    if has_bytes and len(token) == 6 and token.startswith("<0x"):
        return TokenType.BYTE
    return TokenType.NORMAL


def _scores(merges: list[Any], tokens: list[str]) -> list[float]:
    """The score of each token: minus the rank of the first merge that makes it. SentencePiece orders merges by it."""
    ranks: dict[str, int] = {}
    for rank, merge in enumerate(merges):
        ranks.setdefault("".join(merge.split(" ") if isinstance(merge, str) else merge), rank)
    return [-float(ranks.get(token, len(merges))) for token in tokens]


def _adds_prefix_space(tokenizer: Mapping[str, Any]) -> bool:
    """Whether text begins with a space, by a normalizer or the pre-tokenizer."""
    normalizer, split = tokenizer.get("normalizer") or {}, tokenizer.get("pre_tokenizer") or {}
    parts = normalizer.get("normalizers", [normalizer])
    return any(p.get("type") == "Prepend" for p in parts) or split.get("prepend_scheme", "never") != "never"


def _split(pre_tokenizer: Mapping[str, Any], folder: Path) -> str:
    """llama.cpp's name for a pre-tokenizer. Raises ModelError for one that it may not have."""
    *first, last = pre_tokenizer.get("pretokenizers") or [pre_tokenizer]
    rules = tuple(
        "Digits" if part.get("individual_digits") else (part.get("pattern") or {}).get("Regex", part.get("type"))
        for part in first
    )
    has_own_rule = bool(last.get("use_regex", True)) == (rules in ((), ("Digits",)))
    if last.get("type") != "ByteLevel" or last.get("add_prefix_space") or not has_own_rule or rules not in _SPLITS:
        raise ModelError(
            f"GGUF export has no name for the pre_tokenizer in {folder / 'tokenizer.json'}: {quoted(pre_tokenizer, 200)}. "
            f"It knows {', '.join(_SPLITS.values())}."
        )
    return _SPLITS[rules]
