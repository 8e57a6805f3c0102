"""Row formats of supervised fine-tuning: detection by columns, and every format as one prompt and one completion."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

import numpy as np

from verl.data.images import image_messages
from verl.data.messages import (
    MARKS,
    list_in,
    messages_in,
    refuse_media,
    template_kwargs_of,
    text_in,
    tools_in,
    unfilled,
    with_system,
    without_marks,
)
from verl.data.prompts import require_whole_answers
from verl.data.schema import Messages
from verl.errors import DataError
from verl.foreign_text import quoted

if TYPE_CHECKING:
    from verl.config.sections.data import SFTDataConfig


@dataclass(frozen=True)
class Example:
    """One row of any format. `prompt` and `completion` are chat messages or texts; the prompt is empty where a format does not
    set it apart. A text completion after chat messages follows the rendered generation prompt directly. `trains` has the own
    mark (MARKS) of each message, or None."""

    row_format: str
    prompt: Messages | str
    completion: Messages | str
    trains: tuple[bool | None, ...] = ()
    tools: list[dict[str, Any]] | None = None
    template_kwargs: Mapping[str, Any] = field(default_factory=dict)
    images: list[Any] = field(default_factory=list)  # sources, in the order of the parts of messages

    @property
    def default_loss_on(self) -> str:
        """The value of data.loss_on for its format."""
        by_format = {"prompt_completion": "completion", "prompt_response": "completion", "text": "all"}
        return by_format.get(self.row_format, "assistant")


def format_of(row: Mapping[str, object], settings: SFTDataConfig) -> str:
    """Name of the row's format. Raises DataError when its columns fit no format or several, or not the requested one."""
    needed = _columns(settings)
    has = {str(name) for name, value in row.items() if value is not None}
    # prompt_key and response_key have no default, so setting them decides
    requested = settings.row_format or ("prompt_response" if settings.prompt_key else None)
    if requested:
        if requested not in needed:
            raise DataError(f"data.row_format={requested} needs data.prompt_key and data.response_key.")
        if lacks := [name for name in needed[requested] if name not in has]:
            raise DataError(f"a row of the format {requested} lacks {named(lacks)}; it has {named(sorted(has))}.")
        return requested
    formats = [name for name, columns in needed.items() if has.issuperset(columns)]
    if len(formats) == 1:
        return formats[0]
    if formats:
        claims = " and ".join(f"{name} ({named(needed[name])})" for name in formats)
        raise DataError(f"the row has the columns of {claims}; set data.row_format to the one to train on.")
    lacking = "; ".join(f"{n}: {named(c for c in columns if c not in has)}" for n, columns in needed.items())
    raise DataError(
        f"the row fits no format; it has {named(sorted(has))} and lacks, for each format: {lacking}. Rename its "
        "columns, or name them by data.messages_key, data.text_key, or data.prompt_key and data.response_key."
    )


def example_of(row: Mapping[str, object], settings: SFTDataConfig, *, images: bool = False) -> Example:
    """The row in the form that is turned into tokens; `images`: the model reads them. Raises DataError naming the field."""
    row, row_format = unfilled(row), format_of(row, settings)
    refuse_media(row, settings, images=images)
    prompt, completion = _READERS[row_format](row, settings, images)
    if isinstance(prompt, list) != isinstance(completion, list) and row_format == "prompt_completion":
        prompt = [{"role": "user", "content": prompt}] if isinstance(prompt, str) else prompt
        completion = [{"role": "assistant", "content": completion}] if isinstance(completion, str) else completion
    if prompt:
        prompt = with_system(prompt, row, settings)
    elif row_format != "text":
        completion = with_system(completion, row, settings)
    marked = [*(prompt if isinstance(prompt, list) else ()), *(completion if isinstance(completion, list) else ())]
    kwargs = template_kwargs_of(row, settings)
    require_whole_answers(prompt, kwargs)
    trains = tuple(_says_it_trains(message, number) for number, message in enumerate(marked))
    sources: list[Any] = []
    if images:
        marked, sources = image_messages(marked, row, settings)
        split = len(prompt) if isinstance(prompt, list) else 0
        prompt = marked[:split] if isinstance(prompt, list) else prompt
        completion = marked[split:] if isinstance(completion, list) else completion
    return Example(
        row_format,
        without_marks(prompt),
        without_marks(completion),
        trains,
        tools_in(row.get(settings.tools_key), settings.tools_key),
        kwargs,
        sources,
    )


def _columns(settings: SFTDataConfig) -> dict[str, tuple[str, ...]]:
    needed = {
        "messages": (settings.messages_key,),
        "conversations": ("conversations",),
        "prompt_completion": ("prompt", "completion"),
        "text": (settings.text_key,),
        "alpaca": ("instruction", "output"),
    }
    if settings.messages_key == "conversations" and settings.row_format is None:
        del needed["conversations"]  # both read either spelling of a message
    if settings.prompt_key and settings.response_key:
        needed["prompt_response"] = (settings.prompt_key, settings.response_key)
    return needed


def named(names: Any) -> str:
    return ", ".join(repr(name) for name in names) or "nothing"


def alpaca_prompt(row: Mapping[str, object]) -> Messages:
    """The messages before the answer of a row with `instruction`; its `input`, `history` and `system` are optional."""
    question, more = text_in(row["instruction"], "instruction"), row.get("input")
    if more:
        question = f"{question}\n{text_in(more, 'input')}"
    messages: Messages = []
    for number, pair in enumerate(list_in(row.get("history") or [], "history")):
        if not isinstance(pair, Sequence | np.ndarray) or isinstance(pair, str) or len(pair) != 2:
            raise DataError(f"field 'history[{number}]' must be a pair of texts, a question and its answer.")
        texts = [text_in(part, f"history[{number}]") for part in pair]
        messages += [{"role": r, "content": text} for r, text in zip(("user", "assistant"), texts, strict=True)]
    return [*messages, {"role": "user", "content": question}]


def _text_or_messages(value: object, name: str, images: bool) -> Any:
    return text_in(value, name) if isinstance(value, str) else messages_in(value, name, images=images)


def _prompt_response_row(row: Mapping[str, object], settings: SFTDataConfig, images: bool) -> tuple[Messages, str]:
    prompt = _inner(row, str(settings.prompt_key), settings.prompt_dict_keys)
    response = _inner(row, str(settings.response_key), settings.response_dict_keys)
    return [{"role": "user", "content": prompt}], response


# the prompt and the completion of a row of each format
_READERS: dict[str, Callable[[Mapping[str, Any], SFTDataConfig, bool], Sequence[Any]]] = {
    "messages": lambda row, s, images: ([], messages_in(row[s.messages_key], s.messages_key, images=images)),
    "conversations": lambda row, _, images: ([], messages_in(row["conversations"], "conversations", images=images)),
    "prompt_completion": lambda row, _, images: [
        _text_or_messages(row[name], name, images) for name in ("prompt", "completion")
    ],
    "text": lambda row, s, _: ("", text_in(row[s.text_key], s.text_key)),
    "alpaca": lambda row, *_: (
        [],
        [*alpaca_prompt(row), {"role": "assistant", "content": text_in(row["output"], "output")}],
    ),
    "prompt_response": _prompt_response_row,
}


def _inner(row: Mapping[str, object], key: str, dict_keys: Sequence[str]) -> str:
    """A text, `dict_keys` deep inside the column `key`."""
    value, path = row[key], key
    for name in dict_keys:
        if not isinstance(value, Mapping) or name not in value:
            raise DataError(
                f"field {path!r} has no {name!r}; correct data.prompt_dict_keys or data.response_dict_keys."
            )
        value, path = value[name], f"{path}.{name}"
    return text_in(value, path)


def _says_it_trains(message: Mapping[str, object], number: int) -> bool | None:
    marks = [message[key] for key in MARKS if key in message]
    if wrong := [mark for mark in marks if mark not in (0, 1)]:  # 0.0, 1.0, False and True are equal to these
        raise DataError(f"message {number} has {quoted(wrong[0], 80)} as {' or '.join(MARKS)}; write 0 or 1.")
    if len(set(map(bool, marks))) == 2:
        raise DataError(f"message {number} has two of {', '.join(MARKS)} that contradict each other; leave one out.")
    return bool(marks[0]) if marks else None
