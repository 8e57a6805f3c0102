"""Settings of the rows that supervised fine-tuning trains on; each field has the name of its key under `data`."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

from verl.errors import ConfigError

ROW_FORMATS = ("messages", "conversations", "prompt_completion", "text", "alpaca", "prompt_response")
LOSS_ON = ("assistant", "completion", "all")
TRUNCATIONS = ("error", "left", "right")


@dataclass(frozen=True)
class ConversationSettings:
    """How rows are read, turned into tokens, masked and cut.

    `loss_on` names the tokens that train. `assistant`: what the model would sample, the end of each turn included.
    `completion`: everything after the prompt, which for rows without one is everything before the last assistant
    message. `all`: every token. None is `assistant` for rows of chat messages, `completion` for rows with a prompt and
    a completion, `all` for texts.
    Raises ConfigError for a value that a field cannot have.
    """

    row_format: str | None = None  # None: found by the columns of each row
    messages_key: str = "messages"
    tools_key: str = "tools"
    enable_thinking_key: str = "enable_thinking"
    enable_thinking_default: bool | None = None
    text_key: str = "text"
    prompt_key: str | None = None  # with response_key: columns of one question and its answer, as older releases had
    response_key: str | None = None
    prompt_dict_keys: tuple[str, ...] = ()  # fields inside prompt_key, outermost first
    response_dict_keys: tuple[str, ...] = ()
    image_key: str = "images"
    video_key: str = "videos"
    apply_chat_template_kwargs: Mapping[str, Any] = field(default_factory=dict)
    loss_on: str | None = None
    ignore_input_ids_mismatch: bool = False
    max_length: int | None = 1024
    truncation: str = "error"
    stop_token_ids: tuple[int, ...] = ()  # that end generation beside the tokenizer's own (generation_config)

    def __post_init__(self) -> None:
        for name, known in (("row_format", ROW_FORMATS), ("loss_on", LOSS_ON), ("truncation", TRUNCATIONS)):
            value = getattr(self, name)
            if value not in known and not (value is None and name != "truncation"):
                raise ConfigError(f"data.{name} is {value!r}; it can be {', '.join(known)}.")
        if self.max_length is not None and self.max_length < 2:
            raise ConfigError(
                f"data.max_length is {self.max_length}; a token needs one before it to be predicted from."
            )
        if (self.prompt_key is None) != (self.response_key is None):
            raise ConfigError("data.prompt_key and data.response_key name two columns of one format; set both or none.")
