"""Prompt tokens of messages: the chat template at the time of the run, and the truncation of prompts that are too long."""

from __future__ import annotations

import logging
import re
from collections.abc import Mapping, Sequence
from datetime import datetime
from types import MappingProxyType
from typing import TYPE_CHECKING, NamedTuple, cast

from verl.data.images import image_encoder
from verl.data.messages import CONTINUE, checked_kwargs
from verl.data.row_cache import digest_of_tokenizer
from verl.data.schema import Messages
from verl.data_proto.media import Media
from verl.data_proto.token_ids import num_embeddings
from verl.data_proto.tokenizer import Tokenizer
from verl.distributions import load_part
from verl.errors import ConfigError, DataError, UnavailableRowError, is_failure, os_error_of
from verl.foreign_text import clean, quoted

if TYPE_CHECKING:
    from verl.config import DataConfig

log = logging.getLogger(__name__)

TRUNCATIONS = ("error", "left", "right", "middle")

NOTHING: Mapping[str, object] = MappingProxyType({})
_ADDED = 8  # tokens that a tokenizer may add to a text

_time: list[datetime] = []  # of this process


class EncodedPrompt(NamedTuple):
    """Token ids of a prompt, and its images (None: it has none)."""

    ids: list[int]
    media: Media | None


class PromptEncoder:
    """Applies the tokenizer's chat template with `data.apply_chat_template_kwargs` and holds prompts to
    `data.max_prompt_length`. Raises ConfigError for an unknown `data.truncation`."""

    def __init__(self, tokenizer: Tokenizer, config: DataConfig):
        if config.truncation not in TRUNCATIONS:
            raise ConfigError(f"data.truncation is {config.truncation!r}; it can be {', '.join(TRUNCATIONS)}.")
        self.tokenizer = tokenizer
        self.max_length = config.max_prompt_length
        self.truncation = config.truncation
        self._takes_batches: bool | None = None  # not known yet
        self._has_noted = False
        kwargs = config.apply_chat_template_kwargs or {}
        self.template_kwargs = dict(checked_kwargs(kwargs, "data.apply_chat_template_kwargs", ConfigError))
        self.images = image_encoder(tokenizer, config)
        if config.tool_config_path or config.function_tool_path:  # only runs with agents read it
            load_all_tools = load_part("verl.tools.tool_registry").load_all_tools
            tools = load_all_tools(config.tool_config_path, config.function_tool_path)
            self.template_kwargs["tools"] = [tool.tool_schema.for_template() for tool in tools]

    def identity(self) -> list[object]:
        """The values that decide the tokens of a prompt, for a key of the cache; with None when they are not known."""
        return [self.template_kwargs, *identity_of(self.tokenizer)]

    def encode(self, prompt: Messages | str, place: str) -> list[int]:
        """Token ids of a prompt without images; see `encode_row`."""
        return self.encode_row(prompt, place).ids

    def encode_row(
        self,
        prompt: Messages | str,
        place: str,
        images: Sequence[object] = (),
        template_kwargs: Mapping[str, object] = NOTHING,
    ) -> EncodedPrompt:
        """Tokens of a prompt, at most max_prompt_length of them, and its images, at the places of `images` (sources) in its
        messages. `template_kwargs` are the row's arguments of the chat template.
        Raises DataError naming `place` for a template that fails, an image that cannot be read, no tokens, and a
        prompt that is too long if `data.truncation` is error or it has images."""
        encoded = self.encode_whole(prompt, place, images, template_kwargs)
        self._note_closed(prompt, place, template_kwargs)
        if len(encoded.ids) <= self.max_length:
            return encoded
        return EncodedPrompt(self.fitted(encoded.ids, place, images), None)

    def fitted(self, ids: list[int], place: str, images: Sequence[object] = ()) -> list[int]:
        """The tokens of a prompt, at most max_prompt_length of them; see encode_row."""
        if len(ids) <= self.max_length:
            return ids
        if self.truncation == "error" or images:
            cut = "" if images else ", or set data.truncation to left, right or middle"
            raise DataError(
                f"{place}: the prompt has {len(ids)} tokens, more than data.max_prompt_length={self.max_length}. Raise "
                f"the limit{' or make its images smaller' if images else ''}, "
                f"{'or ' if images else ''}set data.filter_overlong_prompts=True to leave such rows out{cut}."
            )
        return truncate(ids, self.max_length, self.truncation)

    def _note_closed(self, prompt: Messages | str, place: str, template_kwargs: Mapping[str, object]) -> None:
        if self._has_noted or isinstance(prompt, str) or prompt[-1].get("role") != "assistant":
            return
        if answer_prefix(prompt, {**self.template_kwargs, **template_kwargs}) is None:
            self._has_noted = True
            log.warning(
                "%s: the prompt ends with a message of the assistant, which is closed, and a new turn begins. To continue it, "
                "set continue_final_message in data.apply_chat_template_kwargs or in chat_template_kwargs of the row.",
                place,
            )

    def encode_whole(
        self,
        prompt: Messages | str,
        place: str,
        images: Sequence[object] = (),
        template_kwargs: Mapping[str, object] = NOTHING,
    ) -> EncodedPrompt:
        """`encode_row` of a prompt of any length."""
        read = self.images.read(images, place) if images and self.images is not None else None
        if getattr(self.tokenizer, "chat_template", None):
            messages = [{"role": "user", "content": prompt}] if isinstance(prompt, str) else prompt
            kwargs = {**self.template_kwargs, **template_kwargs}
            text = render_chat(self.tokenizer, messages, place, add_generation_prompt=True, **kwargs)
            text = text if read is None else read.expanded(text)
            ids = encode_text(self.tokenizer, text, place, add_special_tokens=False)
        elif isinstance(prompt, str):
            ids = encode_text(self.tokenizer, prompt, place)
        else:
            raise UnavailableRowError(
                "the prompt is a list of messages, but the tokenizer has no chat template to join them. Set "
                "actor_rollout_ref.model.custom_chat_template (docs/from-base-to-answers.md has one to copy), or store "
                "prompts as plain texts.",
                place,
            )
        if not ids:
            raise DataError(f"{place}: the prompt has no tokens.")
        if read is None:
            if self.images is not None:
                self.images.require_none(ids, place)
            return EncodedPrompt(list(ids), None)
        read.check(ids, text)
        return EncodedPrompt(list(ids), read.media)

    def lengths(
        self,
        prompts: Sequence[Messages | str],
        template_kwargs: Sequence[Mapping[str, object]] = (),
        *,
        bounded: bool = False,
    ) -> list[int]:
        """Tokens of each prompt as `encode_whole` gives them, by one call of the tokenizer; 0 if only `encode_whole` can say
        how many, or what is wrong: so for all of them if a prompt has arguments of the template.
        With `bounded`, an upper bound for texts that are so short that they fit."""
        by_row = any(template_kwargs) or CONTINUE in self.template_kwargs
        if not prompts or by_row or not getattr(self.tokenizer, "is_fast", False):  # one text at a time
            return [0] * len(prompts)
        limit = num_embeddings(self.tokenizer)
        room = self.max_length - _ADDED if bounded and self._takes_batches and len(self.tokenizer) <= limit else 0
        try:
            texts = self._texts(prompts)
            # a token has at least a character of an ASCII text
            bounds = [len(t) if len(t) <= room and t.isascii() and t.strip() else 0 for t in texts]
            ids = self._encode_many(prompts, [text for text, bound in zip(texts, bounds, strict=True) if not bound])
        except BaseException as error:  # as in `encode_text`, and a template's program
            if not is_failure(error):
                raise
            return [0] * len(prompts)
        marks = {*self.images.processor.marks.values()} if self.images else set()
        exact = (len(tokens) if tokens and max(tokens) < limit and marks.isdisjoint(tokens) else 0 for tokens in ids)
        return [bound or next(exact) for bound in bounds]

    def _texts(self, prompts: Sequence[Messages | str]) -> list[str]:
        """The texts that are tokenized; messages for a tokenizer without a template."""
        if not getattr(self.tokenizer, "chat_template", None):
            return cast("list[str]", list(prompts))
        chats = [[{"role": "user", "content": p}] if isinstance(p, str) else p for p in prompts]
        settings = at_time_of_run({"add_generation_prompt": True, **self.template_kwargs})
        chats = [_readable(self.tokenizer, messages) for messages in chats]
        return cast("list[str]", self.tokenizer.apply_chat_template(chats, tokenize=False, **settings))

    def _encode_many(self, prompts: Sequence[Messages | str], texts: list[str]) -> list[list[int]]:
        """Token ids of texts, the first ones from `prompts`; empty for a tokenizer that takes one text at a time."""
        if not texts:
            return []
        added = {"add_special_tokens": False} if getattr(self.tokenizer, "chat_template", None) else {}
        ids = [_without_end(self.tokenizer, tokens, **added) for tokens in self.tokenizer.encode(texts, **added)]
        if self._takes_batches is None:  # a class of the user's may take a list for the words of one text
            first = [self.encode_whole(prompt, "").ids for prompt in prompts[:4]]
            self._takes_batches = len(ids) == len(texts) and [*ids[:4]] == first
        return ids if self._takes_batches else [[] for _ in texts]


def set_template_time(time: str | None) -> None:
    """Let `strftime_now` of chat templates give `time` (ISO 8601) in this process; None: the time of the first rendering.
    A template that writes the date would else make a run that is resumed a day later another run."""
    _time[:] = [] if time is None else [datetime.fromisoformat(time)]


def template_time() -> str:
    """The time that `strftime_now` gives in this process, ISO 8601."""
    if not _time:
        _time.append(datetime.now().replace(microsecond=0))
    return _time[0].isoformat()


def identity_of(tokenizer: Tokenizer) -> list[object]:
    """The values that decide what a tokenizer makes of messages, for a key of the cache; with None when they are not known."""
    template = str(getattr(tokenizer, "chat_template", None))
    return [digest_of_tokenizer(tokenizer), template_time() if "strftime_now" in template else ""]


def encode_text(tokenizer: Tokenizer, text: str, place: str, **settings: bool) -> list[int]:
    """Token ids of a text. Raises DataError naming `place`, also for a token without an embedding in the model."""
    try:
        ids = _without_end(tokenizer, tokenizer.encode(text, **settings), **settings)
    except BaseException as error:  # the tokenizers library raises Exception itself, and panics
        if not is_failure(error):
            raise
        if no_thread := os_error_of(error):
            raise no_thread from error
        raise DataError(
            f"{place}: the tokenizer cannot read the text ({type(error).__name__}: {clean(error)})."
        ) from error
    limit = num_embeddings(tokenizer)
    if ids and max(ids) >= limit:
        raise DataError(
            f"{place}: the text has the token {quoted(tokenizer.convert_ids_to_tokens(max(ids)), 40)} of id {max(ids)}, and "
            f"the model has {limit:,} embeddings. Leave it out of the row, or use the tokenizer of the model."
        )
    return ids


def _without_end(tokenizer: Tokenizer, ids: list[int], *, add_special_tokens: bool = True, **_: bool) -> list[int]:
    """Tokens of a text without those that the tokenizer puts behind each text (verl.models.tokenizer.num_appended)."""
    return list(ids[: len(ids) - getattr(tokenizer, "num_appended", 0)] if add_special_tokens else ids)


def render_chat(tokenizer: Tokenizer, messages: Messages, place: str, **template_kwargs: object) -> str:
    """The chat template applied to `messages`, at the time of the run. Raises DataError naming `place` when it fails."""
    try:
        prefix = answer_prefix(messages, template_kwargs)
        settings = {k: v for k, v in at_time_of_run(template_kwargs).items() if k != CONTINUE}
        if prefix is not None and not prefix.strip():
            messages = messages[:-1]
        elif prefix is not None:
            settings |= {"add_generation_prompt": False, CONTINUE: True}
        return cast("str", tokenizer.apply_chat_template(_readable(tokenizer, messages), tokenize=False, **settings))
    except Exception as error:
        # a chat template is a program of the model's authors and may raise anything
        raise DataError(
            f"{place}: the chat template failed with {type(error).__name__}: {clean(error)}. Change the row's messages, "
            "data.apply_chat_template_kwargs or the model's custom_chat_template."
        ) from error


def answer_prefix(messages: Messages, template_kwargs: Mapping[str, object]) -> str | None:
    """The text with which the answer to a prompt begins: its last message, of the assistant, if `continue_final_message` is
    set. None: a new turn begins."""
    last = messages[-1] if messages else {}
    begins = template_kwargs.get("add_generation_prompt", True) and last.get("role") == "assistant"
    if not (begins and template_kwargs.get(CONTINUE)):
        return None
    content = last.get("content") or ""
    return content if isinstance(content, str) else "".join(str(part.get("text") or "") for part in content)


def require_whole_answers(prompt: Messages | str, template_kwargs: Mapping[str, object]) -> None:
    """Raises DataError for a row that trains on an answer begun by its prompt."""
    if not isinstance(prompt, str) and answer_prefix(prompt, template_kwargs) is not None:
        raise DataError(
            f"the prompt ends with a message of the assistant that {CONTINUE} continues, and rows that train have whole "
            "answers. Move this message to the beginning of the completion's first message."
        )


def _readable(tokenizer: Tokenizer, messages: Messages) -> Messages:
    """Messages in the form that the chat template reads."""
    processor = getattr(tokenizer, "processor", None)
    if processor is None or not processor.reads_only_parts:
        return messages
    texts = [m.get("content") for m in messages]
    return [
        {**m, "content": [{"type": "text", "text": text}]} if isinstance(text, str) else m
        for m, text in zip(messages, texts, strict=True)
    ]


def at_time_of_run(template_kwargs: dict[str, object]) -> dict[str, object]:
    """Arguments of a chat template with the function that replaces transformers' `strftime_now`."""
    return {"strftime_now": lambda form: datetime.fromisoformat(template_time()).strftime(form), **template_kwargs}


def control_tokens(tokenizer: Tokenizer) -> re.Pattern[str] | None:
    """A pattern of the texts that the tokenizer reads as control tokens, such as <|im_end|>; None when it has none."""
    added = getattr(tokenizer, "added_tokens_decoder", {}).values()
    texts = {*tokenizer.all_special_tokens, *(token.content for token in added if token.special)} - {""}
    return re.compile("|".join(map(re.escape, sorted(texts, key=len, reverse=True)))) if texts else None


def control_token_in(messages: Messages, pattern: re.Pattern[str] | None) -> str:
    """The first control token in the contents of messages; a chat template inserts them as they are. "" for none."""
    if pattern is None:
        return ""
    hits = (pattern.search(str(message.get("content") or "")) for message in messages if isinstance(message, Mapping))
    return next((match[0] for match in hits if match), "")


def truncate(ids: Sequence[int], limit: int, mode: str) -> list[int]:
    """`limit` tokens of `ids`: the last ones (left), the first ones (right), or both ends (middle; the end gets the odd
    token, because the turn of the model begins there)."""
    if len(ids) <= limit:
        return list(ids)
    if mode == "left":
        return list(ids[len(ids) - limit :])
    if mode == "right":
        return list(ids[:limit])
    head = limit // 2
    return [*ids[:head], *ids[len(ids) - (limit - head) :]]
