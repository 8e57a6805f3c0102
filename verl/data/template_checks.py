"""Checks that a chat template and its tokenizer are deterministic, and that the model reads every field of a message.

A template is a program. Without support for tools it renders a call as an empty turn. If it reads the clock or a random
number, it renders a resumed run differently. Both are checked: a row is rendered again with a field emptied, and a row is
rendered several times. Rows of one shape (roles, fields, tools) are checked once.
"""

from collections.abc import Callable, Iterator, Mapping, Sequence
from functools import partial
from typing import Any

from verl.data.prompts import encode_text, render_chat
from verl.data.schema import Messages
from verl.data_proto.tokenizer import Tokenizer
from verl.errors import DataError

_NUM_TRIES = 16  # a template with one random choice of two passes with probability 2**-16
_THOUGHTS = ("reasoning_content", "reasoning", "thinking")  # fields of a message, by family of models
_FIELDS = ("content", "tool_calls", "function_call", *_THOUGHTS)
_PROBE = "The quick brown fox jumps over 13 lazy dogs, again and again: internationalization, reproducibility. " * 4


class TemplateChecks:
    """The checks of one tokenizer; `shapes` that have passed are not checked again."""

    def __init__(self, tokenizer: Tokenizer):
        self.tokenizer = tokenizer
        self.shapes: set[object] = set()

    def check_prompt(
        self, prompt: Messages | str, place: str, template_kwargs: Mapping[str, Any], *, tools_matter: bool = False
    ) -> None:
        """`check_chat` of the sampler's input. The run's tools do not matter: an agent may describe them in its own words."""
        if isinstance(prompt, str) and not getattr(self.tokenizer, "chat_template", None):
            self.check_text(prompt, place, add_special_tokens=True)
        else:
            messages = [{"role": "user", "content": prompt}] if isinstance(prompt, str) else prompt
            self.check_chat(messages, place, tools_matter=tools_matter, add_generation_prompt=True, **template_kwargs)

    def check_text(self, text: str, place: str, **settings: bool) -> None:
        """Raises DataError when the tokenizer gives different tokens for one text, or nothing; checks only the first text."""
        if "text" in self.shapes:
            return
        probe = encode_text(self.tokenizer, _PROBE, place, **settings)
        if any(encode_text(self.tokenizer, _PROBE, place, **settings) != probe for _ in range(_NUM_TRIES)):
            raise DataError(
                f"{place}: the tokenizer gives other tokens for the same text each time, so that no run could be repeated or "
                "resumed. Set dropout to null in tokenizer.json."
            )
        ids, nothing = (encode_text(self.tokenizer, content, place, **settings) for content in (text, ""))
        if text.strip() and ids == nothing:
            raise DataError(
                f"{place}: the tokenizer gives the same tokens for the text as for an empty one: it deletes all of it. Repair "
                "the normalizer in tokenizer.json."
            )
        self.shapes.add("text")

    def check_chat(
        self, messages: Messages, place: str, *, first: int = 0, tools_matter: bool = True, **template_kwargs: object
    ) -> None:
        """Raises DataError when renderings of `messages` differ, or when a field of the messages from number
        `first` on does not change the model's input. With `tools_matter` the tools in `template_kwargs` must change it, too."""
        kind = repr(sorted((name, value) for name, value in template_kwargs.items() if name != "tools"))
        tools = template_kwargs.get("tools") if tools_matter else None
        new = [part for part in _parts(messages, first, tools) if (kind, part[0]) not in self.shapes]
        if not new:
            return
        text = render_chat(self.tokenizer, messages, place, **template_kwargs)
        if any(render_chat(self.tokenizer, messages, place, **template_kwargs) != text for _ in range(_NUM_TRIES)):
            raise DataError(
                f"{place}: the chat template renders the same messages otherwise each time (a random choice?), so that no run "
                "could be repeated or resumed. Use another one (custom_chat_template)."
            )
        ids = self._ids(text, place)
        self.check_text(text, place, add_special_tokens=False)
        for shape, what, variants in new:
            texts = [self._rendered(m, place, **{**template_kwargs, **more}) for m, more in variants()]
            if all(other == text or (other is not None and self._ids(other, place) == ids) for other in texts):
                if not all(other == text for other in texts):
                    raise DataError(
                        f"{place}: the tokenizer has no tokens for {what}, so the model would not read it. Use the model's own "
                        "tokenizer files."
                    )
                raise DataError(
                    f"{place}: the chat template leaves out {what}, so the model would not read it. Use a template that writes "
                    "it (custom_chat_template), put it into the content of a message, or leave it out of the row."
                )
            self.shapes.add((kind, shape))

    def _rendered(self, messages: Messages, place: str, **settings: object) -> str | None:
        """The rendering; None if the template refuses the messages: it can only do so if it reads them."""
        try:
            return render_chat(self.tokenizer, messages, place, **{k: v for k, v in settings.items() if v is not None})
        except DataError:
            return None

    def _ids(self, text: str, place: str) -> list[int]:
        return encode_text(self.tokenizer, text, place, add_special_tokens=False)


_Variants = Callable[[], list[tuple[Messages, dict[str, object]]]]  # made only for a new shape


def _parts(messages: Messages, first: int, tools: object) -> Iterator[tuple[object, str, _Variants]]:
    """Parts that the model is to read: (shape, name, variants of messages and template arguments without the part). If the
    template writes it, at least one of the variants reads otherwise."""
    if tools:
        roles = tuple(sorted({message["role"] for message in messages}))
        yield ("tools", roles), "the row's tools", lambda: [(messages, {"tools": None})]
    for number, message in enumerate(messages[first:], first):
        is_last = number == len(messages) - 1
        filled = tuple(name for name in _FIELDS if (v := message.get(name)) and (not isinstance(v, str) or v.strip()))
        before = messages[number - 1]["role"] if number else None
        shape = (message["role"], before, filled, is_last, bool(tools))
        for name in filled:
            is_thought = name in _THOUGHTS or "</think>" in str(message[name])
            if is_thought and message["role"] == "assistant" and not is_last:
                continue  # templates drop the thoughts of earlier turns on purpose
            field = f"{'the content' if name == 'content' else name} of message {number} (role {message['role']})"
            # a text also becomes longer, since a template may have a default for an empty one
            values: Sequence[object] = ["", f"{message[name]} x"] if isinstance(message[name], str) else [None]
            yield (name, *shape), field, partial(_variants, messages, number, name, values)
            if name == "tool_calls" and any(_arguments(call) for call in message[name]):
                bare = [_without_arguments(call) for call in message[name]]
                yield (
                    ("arguments", *shape),
                    f"the arguments of {field}",
                    partial(_variants, messages, number, name, [bare]),
                )


def _variants(
    messages: Messages, number: int, name: str, values: Sequence[object]
) -> list[tuple[Messages, dict[str, object]]]:
    """The messages with each of `values` as the field `name` of message `number`."""
    return [(_replaced(messages, number, name, value), {}) for value in values]


def _replaced(messages: Messages, number: int, name: str, value: object) -> Messages:
    message = {**messages[number], name: value}
    if value is None:
        del message[name]
        message.setdefault("content", "")
    return [*messages[:number], message, *messages[number + 1 :]]


def _arguments(call: object) -> object:
    return (call.get("function", call) if isinstance(call, Mapping) else {}).get("arguments")


def _without_arguments(call: Mapping[str, Any]) -> dict[str, object]:
    bare: dict[str, object] = {"arguments": {}}
    return {**call, "function": {**call["function"], **bare}} if "function" in call else {**call, **bare}
