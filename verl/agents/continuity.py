"""Token continuity: the prompt of a turn is the very tokens of the turn before, then the new messages as the template renders
them.

    sampled        ... assistant\nLet me add.<|im_end|>
    + suffix                                           \n<|im_start|>tool\n5<|im_end|>\n<|im_start|>assistant\n

Nothing that was sampled is ever tokenized again. The suffix is rendered behind a synthetic turn: the text between that turn's
content and the end, up to the special token that ends a turn if the policy has sampled one. So it does not depend on what
was sampled, and templates that rewrite earlier turns (Qwen3 drops their <think>) rewrite nothing.
"""

from __future__ import annotations

import copy
import logging
import re
from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, TypeAlias

from verl.agents.parsers import Schemas
from verl.config import full_key
from verl.data.images import expanded
from verl.data.prompts import control_tokens, encode_text, render_chat
from verl.data.schema import Messages
from verl.data_proto.token_ids import num_common
from verl.data_proto.tokenizer import Tokenizer
from verl.errors import ConfigError, DataError

log = logging.getLogger(__name__)

MARK = "\ue000"  # a private-use character: the content of the synthetic turn
BREAK = "\u200b"  # a zero-width space, put into control tokens of foreign texts
PLACE = "a turn of an episode"
Content: TypeAlias = "str | list[dict[str, Any]]"
_PROBE = 1 << 16  # characters that are encoded at once to learn whether a text is too long
_SLACK = 2  # times `max_tokens`: a text that is encoded in parts has a few more tokens
_CALL = {"id": "call00000", "type": "function", "function": {"name": "f", "arguments": {}}}


@dataclass(frozen=True)
class Rewriting:
    """A template that renders earlier turns otherwise once later ones follow: the text that differs first."""

    before: str
    after: str


class ChatContinuity:
    """Token ids of new messages behind a sampled turn, with one tokenizer, its chat template and `template_kwargs`. A text that
    cannot have at most `max_tokens` tokens is refused before it is encoded (None: no limit), since all episodes wait for the
    encoding. `image_tokens` stand for an image and a video in rendered messages. Raises ConfigError when there is no chat
    template, or it cannot render a turn that follows another."""

    def __init__(
        self,
        tokenizer: Tokenizer,
        template_kwargs: Mapping[str, object] | None = None,
        max_tokens: int | None = None,
        image_tokens: Sequence[str] = (),
    ):
        if not getattr(tokenizer, "chat_template", None):
            raise ConfigError(
                "Episodes of several turns need a chat template, and the tokenizer has none. Set "
                f"{full_key('model.custom_chat_template')}."
            )
        self.tokenizer = tokenizer
        self.template_kwargs = dict(template_kwargs or {})
        added = getattr(tokenizer, "added_tokens_decoder", {})
        self.special_ids = {*tokenizer.all_special_ids, *(i for i, token in added.items() if token.special)}
        self._control: re.Pattern[str] | None = control_tokens(tokenizer)
        self.max_tokens, self.image_tokens = max_tokens, image_tokens
        # most characters of `max_tokens` tokens; a longer text is not even rendered
        longest_token = max(map(len, tokenizer.get_vocab()), default=1)  # characters, as the vocabulary writes it
        self.max_chars = None if max_tokens is None else max(_PROBE, _SLACK * max_tokens * longest_token)
        self.tool_role_as_user = not self._renders_tools()
        self._ends_turns = self._writes_end()
        self._split({"role": "user", "content": "x"})

    def of_row(self, template_kwargs: Mapping[str, object]) -> ChatContinuity:
        """The same with a row's arguments of the chat template."""
        row = copy.copy(self)
        row.template_kwargs = {**self.template_kwargs, **template_kwargs}
        return row

    def prompt(self, messages: Messages, tools: Schemas | None = None, images: Sequence[str] = ()) -> list[int]:
        """Token ids of a conversation up to the beginning of the next turn of the assistant; `images` are the texts that stand
        for its images. Raises DataError."""
        self._require_short(messages)
        kwargs = {**self.template_kwargs, **({"tools": list(tools)} if tools else {})}
        text = render_chat(self.tokenizer, self._fitted(messages), PLACE, add_generation_prompt=True, **kwargs)
        return self.encode(self._with_images(text, images))

    def suffix(
        self, messages: Messages, last_token: int | None, stop_ids: Collection[int] = (), images: Sequence[str] = ()
    ) -> list[int]:
        """Token ids of `messages` and of the beginning of the next turn, to follow a sampled turn with the last token
        `last_token`. If that is a stop token the turn has ended, else the suffix ends it. If a template (GLM) ends no
        turn, but begins each message with a token of its role, that token stays unless it was sampled. Control tokens in the
        texts of the messages are broken. `images` are the texts that stand for their images. Raises DataError."""
        self._require_short(messages)
        safe = [{**m, "content": self._neutral_content(m.get("content"))} for m in messages]
        between, end = self._split(*safe)
        # begins with a special token, so no tokenizer takes it for the start of a text
        ids = self.encode(self._with_images(between, images))
        if end is None:
            return ids
        return ids[1:] if last_token == end or (self._ends_turns and last_token in stop_ids) else ids

    def encode(self, text: str, place: str = PLACE, *, add_special_tokens: bool = False) -> list[int]:
        """Token ids of a text. Raises DataError, also for more than about `max_tokens` tokens."""
        if self.max_tokens is not None and len(text) > max(_PROBE, self.max_tokens):
            num_tokens = 0
            for start in range(0, len(text), _PROBE):
                part = encode_text(
                    self.tokenizer, text[start : start + _PROBE], place, add_special_tokens=False, verbose=False
                )
                if (num_tokens := num_tokens + len(part)) > _SLACK * self.max_tokens:
                    raise self._too_long(len(text))
        return encode_text(self.tokenizer, text, place, add_special_tokens=add_special_tokens)

    def _with_images(self, text: str, images: Sequence[str]) -> str:
        return expanded(text, self.image_tokens, images, PLACE) if self.image_tokens else text

    def _neutral_content(self, content: object) -> Any:
        if not isinstance(content, list):
            return self.neutral(str(content or ""))
        return [{**p, "text": self.neutral(p["text"])} if p["type"] == "text" else p for p in content]

    def _require_short(self, messages: Messages) -> None:
        num_chars = sum(len(str(message.get("content") or "")) for message in messages)
        if self.max_chars is not None and num_chars > self.max_chars:
            raise self._too_long(num_chars)

    def _too_long(self, num_chars: int) -> DataError:
        return DataError(
            f"{PLACE}: a text of {num_chars:,} characters has more tokens than data.max_prompt_length and "
            f"data.max_response_length allow, {self.max_tokens:,} together. Let the environment, tool or agent return less."
        )

    def neutral(self, text: str) -> str:
        """A foreign text without control tokens such as <|im_end|>: a zero-width space breaks each."""
        if self._control is None:
            return text
        return self._control.sub(lambda match: match[0][:1] + BREAK + match[0][1:], text)

    def rewriting(self) -> Rewriting | None:
        """The difference in an earlier turn once later ones follow it; None when the template renders it as before."""
        turns: Messages = [
            {"role": "user", "content": "1"},
            {"role": "assistant", "content": "<think>\n2\n</think>\n\n3"},
        ]
        before = self._render(turns, ended=True)
        after = self._render([*turns, {"role": "user", "content": "4"}], ended=False)
        at = num_common(before, after)
        if at >= len(before.rstrip()):
            return None
        return Rewriting(before[max(0, at - 20) : at + 20], after[max(0, at - 20) : at + 20])

    def shows_tools(self, tools: Schemas) -> bool:
        """Whether the template writes tools into a prompt."""
        messages = [{"role": "user", "content": "x"}]
        kwargs = {k: v for k, v in self.template_kwargs.items() if k != "tools"}
        texts = [
            render_chat(self.tokenizer, messages, PLACE, add_generation_prompt=True, **kwargs, **more)
            for more in ({}, {"tools": list(tools)})
        ]
        return texts[0] != texts[1]

    def _split(self, *messages: dict[str, object]) -> tuple[str, int | None]:
        """(text from the content of the turn before to the next turn, the special token at its beginning, if any)."""
        turn = {"role": "assistant", "content": MARK}
        try:
            text = self._render([{"role": "user", "content": "x"}, turn, *messages], ended=False)
        except DataError:
            if not any(message["role"] == "tool" for message in messages):
                raise
            # some templates render a tool's answer only after a call
            text = self._after_calls(messages)
        else:
            text = text.partition(MARK)[2] if MARK in text else self._missing()
        ids = self.encode(text)
        first = next((i for i in ids if i in self.special_ids), None)
        if first is None:
            return text, None
        name = self.tokenizer.convert_ids_to_tokens(first)
        start = text.find(name)
        # the policy did not sample the template's text between content and end, such as a line end
        return text[start:] if start >= 0 else text, first if start >= 0 else None

    def _after_calls(self, messages: Sequence[dict[str, object]]) -> str:
        calls = [
            {**_CALL, "id": message.get("tool_call_id") or _CALL["id"]}
            for message in messages
            if message["role"] == "tool"
        ]
        turns: Messages = [{"role": "user", "content": "x"}, {"role": "assistant", "content": "", "tool_calls": calls}]
        before = self._render(turns, ended=True)
        after = self._render([*turns, *messages], ended=False)
        if not after.startswith(before):
            raise DataError(
                f"{PLACE}: the chat template renders a call otherwise once its answer follows, so the answer cannot be "
                "appended to what was sampled. Use another template (custom_chat_template)."
            )
        ids = encode_text(self.tokenizer, before, PLACE, add_special_tokens=False)
        last = next((i for i in reversed(ids) if i in self.special_ids), None)
        name = None if last is None else self.tokenizer.convert_ids_to_tokens(last)
        return (before[before.rfind(name) :] if name and name in before else "") + after[len(before) :]

    def _render(self, messages: Messages, *, ended: bool) -> str:
        kwargs = {k: v for k, v in self.template_kwargs.items() if k != "tools"}
        fitted = self._fitted(list(messages))
        return render_chat(self.tokenizer, fitted, PLACE, add_generation_prompt=not ended, **kwargs)

    def _fitted(self, messages: Messages) -> Messages:
        """The messages, with answers of tools as turns of the user if the template has no role for them."""
        if not getattr(self, "tool_role_as_user", False):
            return messages
        fitted: Messages = []
        for message in messages:
            if message["role"] == "tool":
                content = joined_contents("<tool_response>\n", message.get("content") or "", "\n</tool_response>")
                if fitted and fitted[-1].get("answers"):  # templates of two roles want them in turn
                    fitted[-1]["content"] = joined_contents(fitted[-1]["content"], "\n", content)
                else:
                    fitted.append({"role": "user", "content": content, "answers": True})
            else:
                fitted.append(message)
        return [{k: v for k, v in message.items() if k != "answers"} for message in fitted]

    def _writes_end(self) -> bool:
        turns: Messages = [{"role": "user", "content": "x"}, {"role": "assistant", "content": MARK}]
        return not self.special_ids.isdisjoint(self.encode(self._render(turns, ended=True).rpartition(MARK)[2]))

    def _renders_tools(self) -> bool:
        try:
            between, _ = self._split({"role": "tool", "content": BREAK, "name": "f", "tool_call_id": _CALL["id"]})
        except DataError:
            return False
        return BREAK in between

    def _missing(self) -> str:
        raise ConfigError(
            "The chat template leaves out the content of an earlier turn of the assistant, so an episode of several turns "
            f"cannot be rendered with it. Use another one ({full_key('model.custom_chat_template')})."
        )


def joined_contents(*contents: Content) -> Content:
    """Contents behind each other: a text, or parts if one of them has parts."""
    if all(isinstance(content, str) for content in contents):
        return "".join(map(str, contents))
    parts = [[{"type": "text", "text": content}] if isinstance(content, str) else content for content in contents]
    return [part for content in parts for part in content]
