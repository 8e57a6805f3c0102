"""Checks of a tokenizer: its files before a library reads them, and its token ids against the ids of the model.

An id of 2**31 in tokenizer.json makes the tokenizers library allocate memory without end.
"""

import functools
import json
import logging
import re
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from jinja2 import TemplateSyntaxError

from verl.config import ModelConfig
from verl.data_proto.tokenizer import Tokenizer
from verl.errors import ConfigError, ModelError, is_failure
from verl.foreign_text import clean, quoted
from verl.models.folder import fetch, read_json_object
from verl.regular_files import read_user_text

log = logging.getLogger(__name__)

_GAP = 1 << 16  # ids that a vocabulary may leave out, in all
_MAX_ADDED, _MANY_ADDED = 1 << 18, 20_000  # added tokens; the library takes about a minute for 200,000
_MAX_RULES = 4 << 20  # characters of a normalizer or another part of rules; the tables of T5's have 0.5 million
_RULES = ("normalizer", "pre_tokenizer", "post_processor", "decoder", "truncation", "padding")
_PROBE = "a"
_MESSAGE = "A message that a template writes."
_TEXTLESS_SHARE = 0.1  # of a vocabulary without text; padding to round sizes adds less


def set_chat_template(tokenizer: Any, template: str) -> None:
    """The chat template of `model.custom_chat_template`, text or a file. Raises ModelError for a template of no use: it
    is not Jinja, or writes no content of a message."""
    source, fix = "model.custom_chat_template", "Name a file, or give a Jinja template."
    if len(template) < 4096 and "{" not in template:
        source = f"{source}={template}"
        template = read_user_text(template, "The file model.custom_chat_template", ModelError, fix=fix)
    tokenizer.chat_template = template
    texts = []
    for content in (_MESSAGE, [{"type": "text", "text": _MESSAGE}]):
        try:
            texts.append(tokenizer.apply_chat_template([{"role": "user", "content": content}], tokenize=False))
        except TemplateSyntaxError as error:
            raise ModelError(
                f"{source} is not a Jinja template: {clean(error)} (line {error.lineno}). {fix}"
            ) from error
        except Exception:  # noqa: BLE001 - it may want a system message, or tools; rows have their messages
            return
    if not any(_MESSAGE in text for text in texts):
        raise ModelError(
            f"{source} leaves out the content of a message. It is written by {{{{ message['content'] }}}}."
        )


def embedding_rows(model: ModelConfig) -> int | None:
    """The rows of the embedding of `model.path` by its config.json; check_tensors compares the weights with it. None if
    it cannot be read or has no such entry: loading the model then reports the cause."""
    config = _config_of(model)
    inner = config.get("text_config")
    places = (model.override_config or {}, config, inner if isinstance(inner, dict) else {})
    rows = next((size for place in places if (size := place.get("vocab_size")) is not None), None)
    return rows if type(rows) is int and rows > 0 else None


def model_type_of(model: ModelConfig) -> str:
    """The family of `model.path` by its config.json; "" if it cannot be read."""
    return str(_config_of(model).get("model_type", ""))


def _config_of(model: ModelConfig) -> dict[str, object]:
    try:
        return read_json_object(fetch(model.path, weights=False) / "config.json")
    except ModelError:
        return {}


def check_tokenizer_file(folder: Path, num_embeddings: int | None) -> None:
    """Raise ModelError for a tokenizer.json that a library could not load, or not within bounds of time and memory. A process
    reads each content once."""
    file = folder / "tokenizer.json"
    if file.exists():
        status = file.stat()
        _check_content(file, (status.st_ino, status.st_size, status.st_mtime_ns), num_embeddings)


@functools.lru_cache
def _check_content(file: Path, version: tuple[int, ...], num_embeddings: int | None) -> None:
    content = read_json_object(file)
    vocabulary, added = _vocabulary(file, content), _added(file, content)
    if len(added) > _MANY_ADDED:
        log.warning("%s has %s added tokens; loading it takes up to a minute and more.", file, f"{len(added):,}")
    limit = max(len(vocabulary) + len(added), num_embeddings or 0) + _GAP
    for token, number in (*vocabulary, *added):
        if type(number) is not int or not 0 <= number < limit:
            raise ModelError(
                f"{clean(file)} gives token {quoted(token, 40)} the id {quoted(number, 40)}; ids of its {len(vocabulary):,} + "
                f"{len(added):,} tokens are whole numbers below {limit:,}. Download or convert the model again."
            )
    for name in _RULES:
        if len(json.dumps(content.get(name))) > _MAX_RULES:
            raise ModelError(f"{clean(file)} has a {name} of more than {_MAX_RULES:,} characters, which no model has.")


def check_token_ids(tokenizer: Tokenizer, path: str, num_embeddings: int) -> None:
    """Raise ModelError when the end-of-sequence token has no embedding; notice other tokens that have none."""
    if (tokenizer.eos_token_id or 0) >= num_embeddings:
        raise ModelError(
            f"The tokenizer of {clean(path)} ends a text with {quoted(tokenizer.eos_token, 40)} (id {tokenizer.eos_token_id}), "
            f"and the model has {num_embeddings:,} embeddings. Tokenizer and model do not belong together."
        )
    beyond = sorted((number, token) for token, number in tokenizer.get_vocab().items() if number >= num_embeddings)
    if beyond:
        log.warning(
            "%d tokens of %s have no embedding in the model, the first %s (id %d of %d). A row that has one is refused.",
            len(beyond), path, quoted(beyond[0][1], 40), beyond[0][0], num_embeddings,
        )  # fmt: skip


def num_appended(tokenizer: Any) -> int:
    """Number of tokens that a tokenizer puts behind each text (add_eos_token, a post-processor). A policy would sample after
    the end of a prompt, and texts that train get their own end. Raises ModelError if control tokens are read as text."""
    if getattr(tokenizer, "split_special_tokens", False):
        raise ModelError(
            "tokenizer_config.json has split_special_tokens=true, so that the control tokens of chat templates are read as "
            "plain text. Remove that entry."
        )
    try:
        text, encoded = tokenizer.encode(_PROBE, add_special_tokens=False), tokenizer.encode(_PROBE)
    except BaseException as error:
        if not is_failure(error):
            raise
        return 0  # encoding a row reports the cause
    starts = [start for start in range(len(encoded)) if encoded[start : start + len(text)] == text]
    return len(encoded) - starts[0] - len(text) if text and starts else 0


def eos_token_ids(module: Any, tokenizer: Tokenizer) -> tuple[int, ...]:
    """Tokens that end a response, from generation_config.json, config.json and the tokenizer, ascending. Ids that the model
    does not have are left out with a warning."""
    stops: set[int] = set()
    for source in (getattr(module, "generation_config", None), getattr(module, "config", None), tokenizer):
        ids = getattr(source, "eos_token_id", None)
        stops.update([ids] if isinstance(ids, int) else ids or [])
    size = getattr(module.config.get_text_config(), "vocab_size", None) or max(stops, default=0) + 1
    if outside := sorted(token for token in stops if token >= size):
        log.warning("eos_token_id %d can end no response: the model has the token ids 0 to %d.", outside[0], size - 1)
    return tuple(sorted(token for token in stops if token < size))


def check_vocabulary(size: int, tokenizer: Tokenizer, stop_token_ids: Sequence[int]) -> str:
    """A warning if many of the `size` token ids of a model have no text in its tokenizer; "" if few have none, as in
    vocabularies that are padded. Raises ConfigError for one of rollout.stop_token_ids that is not a token id of the model."""
    outside = [token for token in stop_token_ids if not 0 <= token < size]
    if outside:
        raise ConfigError(
            f"actor_rollout_ref.rollout.stop_token_ids: {outside[0]} is no token id of the model. Its ids are 0 to {size - 1}."
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


def hidden_tags(tokenizer: Tokenizer) -> list[str]:
    """Special tokens that come as an opening and a closing tag (<think>, </think>): decoding for scorers leaves them out."""
    added = {token.content for token in getattr(tokenizer, "added_tokens_decoder", {}).values() if token.special}
    opening = [name for name in sorted(added) if re.fullmatch(r"<[A-Za-z_]{2,}>", name) and f"</{name[1:]}" in added]
    return [tag for name in opening for tag in (name, f"</{name[1:]}")]


def _vocabulary(file: Path, content: Mapping[str, object]) -> list[tuple[object, object]]:
    """(token, id) of the vocabulary. Raises ModelError if it is of no known form."""
    model = content.get("model")
    vocabulary = model.get("vocab") if isinstance(model, dict) else None
    if isinstance(vocabulary, dict):
        return list(vocabulary.items())
    if isinstance(vocabulary, list):  # of Unigram: pairs of token and score, by id
        return [
            (pair[0] if isinstance(pair, list) and pair else pair, number) for number, pair in enumerate(vocabulary)
        ]
    raise ModelError(f"{clean(file)} has no model.vocab of tokens. Download or convert the model again.")


def _added(file: Path, content: Mapping[str, object]) -> list[tuple[object, object]]:
    """(token, id) of the added tokens. Raises ModelError if they are none, or more than any tokenizer has."""
    tokens = content.get("added_tokens") or []
    if not isinstance(tokens, list) or not all(isinstance(token, dict) for token in tokens):
        raise ModelError(
            f"{clean(file)} has added_tokens that are no list of objects. Download or convert the model again."
        )
    if len(tokens) > _MAX_ADDED:
        raise ModelError(f"{clean(file)} has {len(tokens):,} added tokens; at most {_MAX_ADDED:,} are read.")
    return [(token.get("content"), token.get("id")) for token in tokens]
