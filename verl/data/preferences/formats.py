"""Row formats of preferences: detection by columns, and every format as one prompt with its completions. They are the formats
of TRL, OpenRLHF, LLaMA-Factory and UltraFeedback that docs/preferences.md lists."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

import numpy as np

from verl.data.conversations.formats import alpaca_prompt, named
from verl.data.images import image_messages
from verl.data.messages import messages_in, refuse_media, template_kwargs_of, text_in, tools_in, unfilled, with_system
from verl.data.prompts import require_whole_answers
from verl.data.schema import Messages, check_plain, number_in
from verl.data_proto.token_ids import num_common
from verl.errors import DataError
from verl.foreign_text import quoted

if TYPE_CHECKING:
    from verl.config.sections.data import PreferenceDataConfig

Text = Messages | str


@dataclass(frozen=True)
class Preference:
    """One row of any format. `completions` are the chosen and the rejected one, or a single one: it is desirable if `label`
    is true; all are chat messages or texts, as the prompt. `margin`: by how much the chosen one is better (0.0: not known).

    >>> Preference("pair", "1 + 1 = ", ("2", "3"), margin=1.0).completions[0]
    '2'
    """

    row_format: str
    prompt: Text
    completions: tuple[Text, ...]
    label: bool | None = None
    margin: float = 0.0
    tools: list[dict[str, object]] | None = None
    template_kwargs: Mapping[str, object] = field(default_factory=dict)
    images: list[Any] = field(default_factory=list)  # sources, in the order of the parts of the prompt


def preference_of(row: Mapping[str, object], settings: PreferenceDataConfig, *, images: bool = False) -> Preference:
    """The row in the form that is turned into tokens; `images`: the model reads them. Raises DataError naming the field."""
    row = unfilled(row)
    refuse_media(row, settings, images=images)
    has = {str(name) for name, value in row.items() if value is not None}
    if has.issuperset((settings.chosen_key, settings.rejected_key)):
        name, prompt, completions = _pair(row, has, settings, images)
        label = None
    elif settings.label_key in has:
        name, prompt, completions = _labelled(row, has, settings, images)
        label = _label(row[settings.label_key], settings.label_key)
    else:
        raise DataError(
            f"the row is neither a pair ({named((settings.chosen_key, settings.rejected_key))}) nor a labelled completion "
            f"({named((settings.label_key,))}); it has {named(sorted(has))}. Rename its columns, or name them by "
            "data.chosen_key and data.rejected_key, or data.completion_key and data.label_key."
        )
    kwargs = template_kwargs_of(row, settings)
    require_whole_answers(prompt, kwargs)
    if len(completions) == 2 and completions[0] == completions[1]:
        raise DataError(
            f"fields {settings.chosen_key!r} and {settings.rejected_key!r} are equal, so that there is nothing to prefer; "
            "leave the row out."
        )
    prompt = with_system(prompt, row, settings)
    sources: list[object] = []
    if images:
        prompt, completions, sources = _placed(prompt, completions, row, settings)
    return Preference(
        name,
        prompt,
        completions,
        label,
        0.0 if (margin := row.get(settings.margin_key)) is None else number_in(margin, settings.margin_key),
        tools_in(row.get(settings.tools_key), settings.tools_key),
        kwargs,
        sources,
    )


def _placed(
    prompt: Text, completions: tuple[Text, ...], row: Mapping[str, object], settings: PreferenceDataConfig
) -> tuple[Text, tuple[Text, ...], list[object]]:
    """Prompt and completions with parts of content for the row's images, and the sources of these images."""
    prompt_messages = prompt if isinstance(prompt, list) else []
    sources: list[object] = []
    rests: list[Text] = []
    for completion in completions:
        messages = [*prompt_messages, *(completion if isinstance(completion, list) else ())]
        messages, sources = image_messages(messages, row, settings)
        prompt = messages[: len(prompt_messages)] if isinstance(prompt, list) else prompt
        rests.append(messages[len(prompt_messages) :] if isinstance(completion, list) else completion)
    return prompt, tuple(rests), sources


def _pair(
    row: Mapping[str, object], has: set[str], settings: PreferenceDataConfig, images: bool
) -> tuple[str, Text, tuple[Text, ...]]:
    """Format, prompt, and the chosen and rejected completion."""
    keys = (settings.chosen_key, settings.rejected_key)
    chosen: Any
    rejected: Any
    chosen, rejected = (_text_or_messages(row[key], key, images) for key in keys)
    if settings.prompt_key in has:
        prompt: Any = _text_or_messages(row[settings.prompt_key], settings.prompt_key, images)
        are_texts = isinstance(prompt, str) and isinstance(chosen, str) and isinstance(rejected, str)
        if not are_texts:
            prompt, chosen, rejected = _as_chat(prompt, "user"), _as_chat(chosen), _as_chat(rejected)
        length = len(prompt)
        # a prompt of one word, such as "1", may be the beginning of both answers by chance
        if chosen[:length] == rejected[:length] == prompt and not (are_texts and len(prompt.split()) < 2):
            return "repeated_prompt", prompt, (chosen[length:], rejected[length:])
        if not are_texts and any(message["role"] != "assistant" for message in (chosen[0], rejected[0])):
            return "repeated_prompt", *_whole(prompt, chosen, rejected, settings)
        return "prompt_chosen_rejected", prompt, (chosen, rejected)
    for name in ("conversations", "instruction"):
        if name in has:
            prompt = alpaca_prompt(row) if name == "instruction" else messages_in(row[name], name, images=images)
            return f"{name}_chosen_rejected", prompt, (_as_chat(chosen), _as_chat(rejected))
    if isinstance(chosen, str) != isinstance(rejected, str):
        raise DataError(f"fields {named(keys)} must both be texts or both be lists of messages.")
    return "chosen_rejected", *_split(chosen, rejected, keys)


def _labelled(
    row: Mapping[str, object], has: set[str], settings: PreferenceDataConfig, images: bool
) -> tuple[str, Text, tuple[Text, ...]]:
    if has.issuperset((settings.prompt_key, settings.completion_key)):
        keys = (settings.prompt_key, settings.completion_key)
        prompt, completion = (_text_or_messages(row[key], key, images) for key in keys)
        if not (isinstance(prompt, str) and isinstance(completion, str)):
            prompt, completion = _as_chat(prompt, "user"), _as_chat(completion)
        return "prompt_completion_label", prompt, (completion,)
    for name in ("messages", "conversations"):
        if name in has:
            messages = messages_in(row[name], name, images=images)
            if messages[-1]["role"] != "assistant" or len(messages) < 2:
                raise DataError(f"the last message of field {name!r} must be the assistant's answer to an earlier one.")
            return f"{name}_label", messages[:-1], (messages[-1:],)
    if has.issuperset(("instruction", "output")):
        return "instruction_output_label", alpaca_prompt(row), (_as_chat(text_in(row["output"], "output")),)
    raise DataError(
        f"the row has a label, but no completion; it has {named(sorted(has))}. A labelled row has "
        f"{named((settings.prompt_key, settings.completion_key))}, or 'messages', 'conversations', or 'instruction' and "
        "'output'."
    )


def _text_or_messages(value: object, key: str, images: bool) -> Text:
    """A text, perhaps empty, or checked messages; a single message may stand without a list."""
    if isinstance(value, str):
        check_plain(value, key)
        return value
    if isinstance(value, bool | int | float):
        raise DataError(f"field {key!r} must be a text or a list of messages, but it is {value}. Write it as a text.")
    return messages_in([value] if isinstance(value, Mapping) else value, key, images=images)


def _as_chat(part: Text, role: str = "assistant") -> Messages:
    return [{"role": role, "content": part}] if isinstance(part, str) else part


def _whole(prompt: Messages, chosen: Any, rejected: Any, settings: PreferenceDataConfig) -> tuple[Text, Any]:
    """See _split, of conversations that may begin with more than the prompt. Raises DataError without the prompt."""
    begin: Any
    begin, completions = _split(chosen, rejected, (settings.chosen_key, settings.rejected_key))
    told = [(message["role"], str(message.get("content")).strip()) for message in begin]
    for message in prompt:
        if (message["role"], str(message.get("content")).strip()) not in told:
            raise DataError(
                f"fields {settings.chosen_key!r} and {settings.rejected_key!r} are whole conversations without the "
                f"{message['role']} message of {settings.prompt_key!r}: {quoted(message.get('content'), 80)}. Correct the "
                "row, or set data.prompt_key to a name that no field has, to train without that message."
            )
    return begin, completions


def _split(chosen: Any, rejected: Any, keys: Sequence[str]) -> tuple[Text, tuple[Text, ...]]:
    """The common beginning of two completions, and the end of each."""
    length = num_common(chosen, rejected)
    if isinstance(chosen, str) and chosen != rejected and chosen[:length].endswith(" "):
        length -= 1  # a space before a word is a part of its first token in most vocabularies
    prompt, rest = chosen[:length], (chosen[length:], rejected[length:])
    if not prompt and isinstance(prompt, list):
        raise DataError(f"fields {named(keys)} have no common first message, which would be the prompt; give them one.")
    if chosen != rejected and isinstance(prompt, list) and not all(rest):
        key = keys[0 if not rest[0] else 1]
        raise DataError(f"field {key!r} ends where the common beginning of the pair does; it has no answer.")
    return prompt, rest


def _label(value: object, key: str) -> bool:
    if isinstance(value, bool | np.bool_) or value in (0, 1):
        return bool(value)
    raise DataError(f"field {key!r} must be true (desirable) or false, but it is {quoted(value, 80)}.")
