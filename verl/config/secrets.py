"""Keys, tokens and passwords: found by name, and masked in everything that a run writes.

The name of a config key (`reward_kwargs.api_key`) or an environment variable (`WANDB_API_KEY`) says whether its value is
secret. The password of a URL is secret, too. `MASK` replaces it wherever the run writes it.
"""

import functools
import json
import os
import re
from collections.abc import Iterator, Mapping
from typing import Any

MASK = "<secret>"
MIN_LENGTH = 8  # replacing shorter values would cut words out of texts

_WORDS = re.compile(r"[A-Z]+(?![a-z])|[A-Z]?[a-z0-9]+")
_SECRET_WORDS = set(
    "password passwd passphrase secret secrets credential credentials apikey bearer cookie cookies jwt".split()
)
_LAST_WORDS = {"token", "authorization", "auth", "pat"}  # secret at the end of a name: hub_token, not token_budget
_BEFORE_LAST = {  # last word -> words before it that make a secret of it
    **dict.fromkeys(
        ("key", "keys"),
        ("api", "access", "account", "private", "secret", "auth", "license", "signing", "encryption", "storage", "ssh"),
    ),
    **dict.fromkeys(("header", "headers"), ("auth", "authorization")),
}
_VOCABULARY = set("dp eos bos pad unk mask sep cls stop end start image special think".split())
_IN_URL = re.compile(r"(?<=://)[^/\s:@]*:([^/\s@]+)@")
_OF_HEADER = re.compile(r"^\s*(?:Bearer|Basic)\s+(\S+)\s*$")  # all of a value, for any key

_known: list[str] = []  # the longest first, since one may be a part of another


@functools.cache
def is_secret_name(name: str) -> bool:
    """Whether a key or an environment variable of this name holds a secret: api_key, HF_TOKEN, dbPassword; but neither
    eos_token nor max_tokens.

    >>> is_secret_name("WANDB_API_KEY"), is_secret_name("pad_token")
    (True, False)
    """
    words = [word.lower() for word in _WORDS.findall(name)]
    if not words:
        return False
    before = words[-2] if len(words) > 1 else ""
    if words[-1] in _LAST_WORDS:
        return before not in _VOCABULARY
    if words[-1] in _BEFORE_LAST:
        return before in _BEFORE_LAST[words[-1]] or not _SECRET_WORDS.isdisjoint(words)
    return not _SECRET_WORDS.isdisjoint(words)


def remember_secrets(values: object = None) -> None:
    """Make `hide` mask the secrets of the environment, and of `values`: a config section, mapping or list."""
    secrets = {secret for name, value in os.environ.items() for secret in _secrets_in(value, is_secret_name(name))}
    secrets |= set(_secrets_in(values, False))
    # as they stand in JSON, with their quotes escaped
    secrets |= {json.dumps(secret, ensure_ascii=False)[1:-1] for secret in secrets}
    secrets |= set(_known)
    _known[:] = sorted((secret for secret in secrets if len(secret) >= MIN_LENGTH), key=len, reverse=True)


def _secrets_in(value: object, named_so: bool) -> Iterator[str]:
    if isinstance(value, str):
        if named_so and not value.startswith("${") and value != MASK:
            yield value
        yield from _IN_URL.findall(value)
        yield from _OF_HEADER.findall(value)
    for name, inner in _entries(value):
        if not isinstance(inner, int | float | None):
            yield from _secrets_in(inner, named_so or is_secret_name(name))


def _entries(value: object) -> Iterator[tuple[str, object]]:
    if hasattr(value, "items"):
        yield from ((str(name), inner) for name, inner in value.items())
    elif isinstance(value, list | tuple):
        yield from (("", inner) for inner in value)


def hide(text: str) -> str:
    """`text` with MASK for every secret that was remembered."""
    for secret in _known:
        if secret in text:
            text = text.replace(secret, MASK)
    return text


def holds_mask(value: object) -> bool:
    """Whether MASK replaces a secret, as in the config that a run has written."""
    if isinstance(value, str):
        return MASK in value
    return any(holds_mask(inner) for _, inner in _entries(value))


def hide_values(values: object, name: str = "") -> Any:
    """A copy of plain values (dicts, lists, text, numbers) for readers: without secrets, those too short for `hide` among
    them."""
    if isinstance(values, Mapping):
        return {key: hide_values(value, str(key)) for key, value in values.items()}
    if isinstance(values, list | tuple):
        return [hide_values(value, name) for value in values]
    if isinstance(values, str) and values:
        return MASK if is_secret_name(name) else _IN_URL.sub(lambda m: m[0].replace(m[1], MASK), hide(values))
    return values
