"""The part of a Hugging Face tokenizer that verl uses, for annotations. No torch."""

import copy
import functools
from collections.abc import Mapping, Sequence
from typing import Any, Protocol, cast, overload


class Tokenizer(Protocol):
    """A tokenizer of transformers, or another class with these members."""

    eos_token: str | None
    eos_token_id: int | None
    pad_token: str | None
    pad_token_id: int | None
    chat_template: str | None
    special_tokens_map: Mapping[str, object]
    processor: Any  # the ImageProcessor that load_tokenizer adds, or None

    @property
    def all_special_ids(self) -> list[int]: ...

    @property
    def all_special_tokens(self) -> list[str]: ...

    def __call__(self, text: str, **settings: object) -> Mapping[str, Any]:
        """input_ids, and what `settings` ask for."""
        ...

    def __len__(self) -> int:
        """Entries of the vocabulary, added tokens included."""
        ...

    @overload
    def encode(self, text: str, *, add_special_tokens: bool = True) -> list[int]: ...

    @overload
    def encode(self, text: list[str], *, add_special_tokens: bool = True) -> list[list[int]]: ...

    def decode(self, token_ids: Sequence[int] | int, skip_special_tokens: bool = False, **settings: bool) -> str: ...

    def batch_decode(self, sequences: Sequence[Sequence[int]], skip_special_tokens: bool = False) -> list[str]: ...

    @overload
    def convert_ids_to_tokens(self, ids: int) -> str: ...

    @overload
    def convert_ids_to_tokens(self, ids: Sequence[int]) -> list[str | None]: ...

    def get_chat_template(self, chat_template: str | None = None, tools: Sequence[object] | None = None) -> str: ...

    def get_vocab(self) -> dict[str, int]: ...

    def apply_chat_template(self, conversation: Sequence[object], **settings: object) -> Any:
        """The conversation, or several of them, as text, or with tokenize=True as token ids."""
        ...

    def save_pretrained(self, save_directory: object) -> object: ...


def listing_ids(tokenizer: Any) -> Tokenizer:
    """A copy whose apply_chat_template gives a list of token ids, as in the releases of transformers that functions and agents
    of users are written for."""
    listing = copy.copy(tokenizer)
    vars(listing)["apply_chat_template"] = functools.partial(tokenizer.apply_chat_template, return_dict=False)
    return cast("Tokenizer", listing)
