"""Row formats of supervised fine-tuning: detection by columns, and every format as one prompt and one completion."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

import numpy as np

from verl.data.images import image_messages
from verl.data.schema import Messages, check_plain, message_of, no_media
from verl.data.tables import parse_json
from verl.errors import DataError
from verl.foreign_text import clean, quoted

if TYPE_CHECKING:
    from verl.config.sections.data import SFTDataConfig, TextDataConfig

# the speakers of ShareGPT, as role of a chat message
SPEAKERS = {
    "system": "system",
    "human": "user",
    "user": "user",
    "gpt": "assistant",
    "assistant": "assistant",
    "model": "assistant",
    "chatgpt": "assistant",
    "function_call": "assistant",
    "observation": "tool",
    "function_response": "tool",
    "tool": "tool",
}

MARKS = ("loss_mask", "train", "weight")  # of a message, 0 or 1: whether it trains; weight is OpenAI's


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
        return {"prompt_completion": "completion", "prompt_response": "completion", "text": "all"}.get(
            self.row_format, "assistant"
        )


def format_of(row: Mapping[str, object], settings: SFTDataConfig) -> str:
    """Name of the row's format. Raises DataError when its columns fit no format or several, or not the requested one."""
    needed = _columns(settings)
    has = {str(name) for name, value in row.items() if value is not None}
    # prompt_key and response_key have no default, so setting them decides
    asked = settings.row_format or ("prompt_response" if settings.prompt_key else None)
    if asked:
        if asked not in needed:
            raise DataError(f"data.row_format={asked} needs data.prompt_key and data.response_key.")
        if lacks := [name for name in needed[asked] if name not in has]:
            raise DataError(f"a row of the format {asked} lacks {named(lacks)}; it has {named(sorted(has))}.")
        return asked
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
    row_format = format_of(row, settings)
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
    trains = tuple(_says_it_trains(message, number) for number, message in enumerate(marked))
    sources: list[Any] = []
    if images:
        marked, sources = image_messages(marked, row, settings)
        split = len(prompt) if isinstance(prompt, list) else 0
        prompt = marked[:split] if isinstance(prompt, list) else prompt
        completion = marked[split:] if isinstance(completion, list) else completion
    return Example(
        row_format,
        _without_marks(prompt),
        _without_marks(completion),
        trains,
        tools_in(row.get(settings.tools_key), settings.tools_key),
        template_kwargs_of(row, settings),
        sources,
    )


def refuse_media(row: Mapping[str, object], settings: TextDataConfig, *, images: bool = False) -> None:
    """Raises DataError for a row with images or videos where the program or its model does not read `images`."""
    for key, kind in ((settings.image_key, "images"), (settings.video_key, "videos")):
        media = row.get(key)
        if media is not None and not (hasattr(media, "__len__") and len(media) == 0) and not images:
            raise DataError(no_media(kind, f"field {key!r}"))


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
    """The messages before the answer of a row with `instruction`, and `input`, `history` and `system` where it has them."""
    question, more = text_in(row["instruction"], "instruction"), row.get("input")
    if more:
        question = f"{question}\n{text_in(more, 'input')}"
    messages: Messages = []
    for number, pair in enumerate(_list(row.get("history") or [], "history")):
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


def text_in(value: object, field_name: str) -> str:
    if not isinstance(value, str) or not value:
        raise DataError(
            f"field {field_name!r} must be a text of at least one character, but it is {quoted(value, 80)}."
        )
    check_plain(value, field_name)
    return value


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


def with_system(prompt: Messages | str, row: Mapping[str, object], settings: TextDataConfig) -> Any:
    """The beginning of a row behind the message of its `system` column, which some collections have. Raises DataError where
    the model would not read the column, or the tools of a text."""
    system = text_in(row["system"], "system") if row.get("system") else ""
    if isinstance(prompt, str):
        tools = settings.tools_key if tools_in(row.get(settings.tools_key), settings.tools_key) else ""
        if name := "system" if system not in prompt else tools:
            raise DataError(
                f"the row is text, which trains as it is, so that the model would not read its field {name!r}. Write the "
                "prompt as messages, write the field into its text, or leave the field out."
            )
        return prompt
    has_own = prompt[0]["role"] in ("system", "developer")
    if not system or (has_own and prompt[0]["content"] == system):
        return prompt
    if has_own:
        raise DataError("field 'system' and the first message are different system messages; leave one out.")
    return [{"role": "system", "content": system}, *prompt]


def _list(value: object, field_name: str) -> list[object]:
    if not isinstance(value, list | tuple | np.ndarray):
        raise DataError(f"field {field_name!r} must be a list, but it is a {type(value).__name__}.")
    return list(value)


def messages_in(value: object, field_name: str, *, images: bool = False) -> Messages:
    """Checked messages of either spelling; their marks (MARKS) are still in them. `images`: see message_of."""
    messages = _list(value, field_name)
    if not messages:
        raise DataError(f"field {field_name!r} is an empty list; give at least one message.")
    return [_message(message, f"{field_name}[{number}]", images) for number, message in enumerate(messages)]


def _message(message: object, place: str, images: bool) -> dict[str, object]:
    if isinstance(message, Mapping) and message.get("role") is None and message.get("from") is not None:
        message = _from_sharegpt(message, place)
    checked = message_of(message, f"field {place!r}", images=images)
    if "tool_calls" in checked:
        checked["tool_calls"] = [
            _tool_call(call, place) for call in _json_list(checked["tool_calls"], f"{place}.tool_calls")
        ]
        if not checked["tool_calls"]:
            del checked["tool_calls"]
    return checked


def _from_sharegpt(message: Mapping[str, object], place: str) -> dict[str, object]:
    speaker, value = message["from"], message.get("value")
    if not isinstance(speaker, str) or speaker not in SPEAKERS:
        raise DataError(f"field '{place}.from' is {quoted(speaker, 80)}; it can be {', '.join(SPEAKERS)}.")
    marks = {key: message[key] for key in MARKS if key in message}
    if speaker != "function_call":
        return {"role": SPEAKERS[speaker], "content": value, **marks}
    calls = _json(value, f"{place}.value")
    return {"role": "assistant", "content": "", "tool_calls": calls if isinstance(calls, list) else [calls], **marks}


def _tool_call(call: Any, place: str) -> dict[str, object]:
    """A call as chat templates expect it. They write arguments as JSON, so a text, as OpenAI has it, would be quoted twice."""
    call = _pruned(call)
    function = call.get("function", call) if isinstance(call, Mapping) else None
    if not isinstance(function, Mapping) or not isinstance(function.get("name"), str):
        raise DataError(f"field '{place}' has a tool call without a function name: {quoted(call, 80)}.")
    arguments = _json(function.get("arguments"), f"{place}.tool_calls.arguments")
    outer = {key: value for key, value in call.items() if key != "function"} if "function" in call else {}
    return {"type": "function", **outer, "function": {**function, "arguments": {} if arguments is None else arguments}}


def _pruned(value: object) -> Any:
    """The value without fields that are None: parquet gives every object of a column the fields of all of them."""
    if isinstance(value, Mapping):
        return {key: _pruned(inner) for key, inner in value.items() if inner is not None}
    return [_pruned(inner) for inner in value] if isinstance(value, list | tuple | np.ndarray) else value


def _json(value: object, field_name: str) -> object:
    """The value, read from JSON when it is a text: columns of objects of many shapes are often stored so."""
    if isinstance(value, str):
        try:
            value = parse_json(value) if value else None
        except ValueError as error:
            raise DataError(f"field {field_name!r} is a text that is not JSON: {clean(error)}.") from error
    check_plain(value, field_name)
    return value


def _json_list(value: object, field_name: str) -> list[object]:
    parsed = _json(value, field_name)
    return [] if parsed is None else _list(parsed, field_name)


def tools_in(value: object, field_name: str) -> list[dict[str, Any]] | None:
    """The JSON schemas of a column of tools; None where it is empty."""
    tools = [_pruned(_json(tool, field_name)) for tool in _json_list(value, field_name)]
    if wrong := [tool for tool in tools if not isinstance(tool, dict)]:
        raise DataError(f"field {field_name!r} must be a list of JSON schemas, but has {quoted(wrong[0], 80)}.")
    return tools or None


def template_kwargs_of(row: Mapping[str, object], settings: TextDataConfig) -> dict[str, Any]:
    """`data.apply_chat_template_kwargs`, the row's `chat_template_kwargs`, and enable_thinking where either has a value."""
    own = _pruned(_json(row.get("chat_template_kwargs"), "chat_template_kwargs"))
    if not isinstance(own, Mapping | None):
        raise DataError(f"field 'chat_template_kwargs' must be an object, but it is {quoted(own, 80)}.")
    arguments = {**settings.apply_chat_template_kwargs, **(own or {})}
    thinking = row.get(settings.enable_thinking_key)
    if thinking is None and "enable_thinking" not in (own or {}):
        thinking = settings.enable_thinking_default
    if thinking is None:
        return arguments
    if not isinstance(thinking, bool | np.bool_):
        raise DataError(
            f"field {settings.enable_thinking_key!r} must be true or false, but it is {quoted(thinking, 80)}."
        )
    return {**arguments, "enable_thinking": bool(thinking)}


def _says_it_trains(message: Mapping[str, object], number: int) -> bool | None:
    marks = [message[key] for key in MARKS if key in message]
    if wrong := [mark for mark in marks if mark not in (0, 1)]:  # 0.0, 1.0, False and True are equal to these
        raise DataError(f"message {number} has {quoted(wrong[0], 80)} as {' or '.join(MARKS)}; write 0 or 1.")
    if len(set(map(bool, marks))) == 2:
        raise DataError(f"message {number} has two of {', '.join(MARKS)} that contradict each other; leave one out.")
    return bool(marks[0]) if marks else None


def _without_marks(part: Messages | str) -> Messages | str:
    if isinstance(part, str):
        return part
    return [{key: value for key, value in m.items() if key not in MARKS} for m in part]
