"""The one reader of conversations in rows: messages of either spelling, and the columns `system`, `tools`,
`chat_template_kwargs` and `enable_thinking`. Every program reads its rows by it.

A field that is null in a row of arrow (parquet, `datasets`) may be there only since another row has it, so it is left out. Any
other null is what the row says: in JSON, in Python, and in a JSON text of an arrow column.
"""

from __future__ import annotations

from collections.abc import Collection, Mapping
from typing import TYPE_CHECKING, Any, cast

import numpy as np

from verl.data.schema import Messages, check_plain, message_of, no_media
from verl.data.tables import ArrowRow, parse_json
from verl.errors import ConfigError, DataError, VerlError, nearest
from verl.foreign_text import clean, quoted

if TYPE_CHECKING:
    from verl.config import DataConfig
    from verl.config.sections.data import TextDataConfig

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

CHAT_COLUMNS = (
    "system",
    "tools",
    "chat_template_kwargs",
    "enable_thinking",
)  # beside the messages, by their usual names
CONTINUE = "continue_final_message"  # argument of the chat template: the last message is the beginning of the answer
_SET_BY_PROGRAMS = {
    "add_generation_prompt",
    "conversation",
    "first",
    "messages",
    "place",
    "self",
    "tokenize",
    "tokenizer",
}
# arguments of tokenizers and processors that no template reads; rows become tokens and pictures in other ways
OF_TOKENIZERS = {
    *("padding", "truncation", "max_length", "return_tensors", "return_dict", "return_assistant_tokens_mask"),
    *("tokenizer_kwargs", "processor_kwargs", "load_audio_from_video"),
}
MARKS = ("loss_mask", "train", "weight")  # of a message, 0 or 1: whether it trains; weight is OpenAI's


def unfilled(row: Mapping[str, object], names: Collection[str] | None = None) -> Mapping[str, Any]:
    """The row without the fields that arrow has filled in, in the columns `names` (None: all)."""
    if not isinstance(row, ArrowRow):
        return row
    return {name: _pruned(value) if names is None or name in names else value for name, value in row.items()}


def prompt_messages(
    row: Mapping[str, object], config: DataConfig, key: str | None = None, *, images: bool = False
) -> Messages:
    """The chat messages of a prompt, behind its `system` column; a plain text becomes one user message. Raises DataError."""
    key = config.prompt_key if key is None else key
    if key not in row:
        hint = nearest(key, row) or f"; there are {', '.join(map(str, row))}."
        raise DataError(f"there is no field {key!r}{hint} data.prompt_key names the field with the prompt.")
    prompt = unfilled(row, (key,))[key]
    if isinstance(prompt, str):
        if not prompt:
            raise DataError(f"field {key!r} is an empty text; a prompt needs at least one character.")
        check_plain(prompt, key)
        prompt = [{"role": "user", "content": prompt}]
    elif not isinstance(prompt, list | tuple | np.ndarray):
        raise DataError(
            f"field {key!r} is a {type(prompt).__name__}, not a text or a list of messages "
            "{role, content}; data.prompt_key names the field with the prompt."
        )
    return cast("Messages", with_system(without_marks(messages_in(prompt, key, images=images)), row, config))


def text_or_messages(row: Mapping[str, object], messages: Messages, prompt_key: str) -> Messages | str:
    """A prompt that was written as a plain text stays one, for tokenizers that have no chat template, unless it has images or a
    system message."""
    text = row.get(prompt_key)
    is_text = isinstance(text, str) and len(messages) == 1 and isinstance(messages[0]["content"], str)
    return str(text) if is_text else messages


def columns_of_chat(config: DataConfig | TextDataConfig) -> tuple[str, ...]:
    """Names of the columns that decide how a row's messages are rendered."""
    return ("system", config.tools_key, "chat_template_kwargs", config.enable_thinking_key)


def row_template_kwargs(row: Mapping[str, object], config: DataConfig | TextDataConfig) -> dict[str, object]:
    """The row's further arguments of the chat template, its tools included. Raises DataError naming the field."""
    row = unfilled(row, columns_of_chat(config))
    tools = tools_in(row.get(config.tools_key), config.tools_key)
    return {**_own_kwargs(row, config), **({} if tools is None else {"tools": tools})}


def template_kwargs_of(row: Mapping[str, object], settings: TextDataConfig) -> dict[str, Any]:
    """`data.apply_chat_template_kwargs`, and the row's arguments without its tools. Raises DataError naming the field."""
    default = settings.enable_thinking_default
    by_default = {} if default is None else {"enable_thinking": default}
    kwargs = checked_kwargs(settings.apply_chat_template_kwargs, "data.apply_chat_template_kwargs", ConfigError)
    return {**kwargs, **by_default, **_own_kwargs(row, settings)}


def checked_kwargs(kwargs: Mapping[str, object], name: str, fault: type[VerlError] = DataError) -> Mapping[str, object]:
    """Arguments of the chat template without a name that the program sets itself. Raises `fault` naming the field."""
    if taken := sorted(_SET_BY_PROGRAMS & kwargs.keys()):
        raise fault(
            f"{name} sets {taken[0]!r}, which is no argument for the chat template: the program sets it. Remove it."
        )
    if without_effect := sorted(OF_TOKENIZERS & kwargs.keys()):
        raise fault(
            f"{name} sets {without_effect[0]!r}, which is an argument of the tokenizer: no template reads it, and it would "
            "have no effect. Remove it; keys of data bound the tokens of a row."
        )
    if not isinstance(kwargs.get(CONTINUE, False), bool | None):
        raise fault(f"{CONTINUE} in {name} must be true or false, but it is {quoted(kwargs[CONTINUE], 80)}.")
    return kwargs


def _own_kwargs(row: Mapping[str, object], config: DataConfig | TextDataConfig) -> dict[str, object]:
    kwargs, key = _json(row.get("chat_template_kwargs"), "chat_template_kwargs"), config.enable_thinking_key
    if not isinstance(kwargs, Mapping | None):
        raise DataError(f"field 'chat_template_kwargs' must be an object, but it is {quoted(kwargs, 80)}.")
    thinking = row.get(key)
    if not isinstance(thinking, bool | np.bool_ | None):
        raise DataError(f"field {key!r} must be true or false, but it is {quoted(thinking, 80)}.")
    written = {n: v for n, v in checked_kwargs(kwargs or {}, "field 'chat_template_kwargs'").items() if v is not None}
    return {**written, **({} if thinking is None else {"enable_thinking": bool(thinking)})}


def refuse_media(row: Mapping[str, object], settings: TextDataConfig, *, images: bool = False) -> None:
    """Raises DataError for a row with images or videos unless the program and its model read `images`."""
    for key, kind in ((settings.image_key, "images"), (settings.video_key, "videos")):
        media = row.get(key)
        if media is not None and not (hasattr(media, "__len__") and len(media) == 0) and not images:
            raise DataError(no_media(kind, f"field {key!r}"))


def text_in(value: object, field_name: str) -> str:
    if not isinstance(value, str) or not value:
        raise DataError(
            f"field {field_name!r} must be a text of at least one character, but it is {quoted(value, 80)}."
        )
    check_plain(value, field_name)
    return value


def with_system(prompt: Messages | str, row: Mapping[str, object], settings: DataConfig | TextDataConfig) -> Any:
    """The beginning of a row behind the message of its `system` column, if it has one. Raises DataError if
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


def list_in(value: object, field_name: str) -> list[object]:
    if not isinstance(value, list | tuple | np.ndarray):
        raise DataError(f"field {field_name!r} must be a list, but it is a {type(value).__name__}.")
    return list(value)


def messages_in(value: object, field_name: str, *, images: bool = False) -> Messages:
    """Checked messages of either spelling; their marks (MARKS) are still in them. `images`: see message_of."""
    messages = list_in(value, field_name)
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
    call = _written(call)
    function = _written(call.get("function", call)) if isinstance(call, Mapping) else None
    if not isinstance(function, Mapping) or not isinstance(function.get("name"), str):
        raise DataError(f"field '{place}' has a tool call without a function name: {quoted(call, 80)}.")
    arguments = _json(function.get("arguments"), f"{place}.tool_calls.arguments")
    outer = {key: value for key, value in call.items() if key != "function"} if "function" in call else {}
    return {"type": "function", **outer, "function": {**function, "arguments": {} if arguments is None else arguments}}


def _written(value: object) -> object:
    """An object of OpenAI's without its own fields that are None, such as an id."""
    return {k: v for k, v in value.items() if v is not None} if isinstance(value, Mapping) else value


def _pruned(value: object) -> Any:
    """The value without fields that are None: arrow gives every object of a column the fields of all of them."""
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
    return [] if parsed is None else list_in(parsed, field_name)


def tools_in(value: object, field_name: str) -> list[dict[str, Any]] | None:
    """The JSON schemas of a column of tools; None if it is empty."""
    tools: list[Any] = [_json(tool, field_name) for tool in _json_list(value, field_name)]
    if wrong := [tool for tool in tools if not isinstance(tool, dict)]:
        raise DataError(f"field {field_name!r} must be a list of JSON schemas, but has {quoted(wrong[0], 80)}.")
    return tools or None


def without_marks(part: Messages | str) -> Messages | str:
    if isinstance(part, str):
        return part
    return [{key: value for key, value in m.items() if key not in MARKS} for m in part]
