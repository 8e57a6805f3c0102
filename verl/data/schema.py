"""Checks of a row: messages, scorer name, reference answer.

Errors name the field and the fix; `at(place)` puts file and row in front of them.
"""

from __future__ import annotations

import dataclasses
import difflib
import functools
import math
from collections.abc import Collection, Iterator, Mapping
from contextlib import contextmanager
from typing import TYPE_CHECKING, Any

import numpy as np

from verl.errors import DataError, UnavailableRowError, nearest
from verl.foreign_text import quoted
from verl.model_families import VISION

if TYPE_CHECKING:
    from verl.config import DataConfig

Messages = list[dict[str, Any]]

_KEY_OF_AGENT = {
    "tool_agent": "multi_turn.enable=True", "environment_agent": "agent.environment", "endpoint_agent": "agent.runner"
}  # fmt: skip

ROLES = ("system", "user", "assistant", "tool", "function", "developer")
MAX_DEPTH = 50  # of lists and objects inside each other
MAX_SOURCE = 200  # characters of the name of a task, a part of names of metrics
MAX_NUMBER = 1e12  # of a margin or a rating: losses add squares of them in float32
UNSCORED = {"style": "model"}  # reward_model of a row without one, if rewards do not train


@contextmanager
def at(place: str) -> Iterator[None]:
    """DataErrors of the block name the place: "train.parquet, row 3 (counted from 0): ..."."""
    try:
        yield
    except UnavailableRowError as error:
        raise UnavailableRowError(error.feature, place) from error
    except DataError as error:
        raise DataError(f"{place}: {error}") from error


def message_of(message: object, place: str, *, images: bool = False) -> dict[str, Any]:
    """A checked message without the fields that are None; parts of text are joined. With `images` the content may have parts of
    MEDIA_PARTS, and is then a list of parts. Raises DataError with `place`."""
    if not isinstance(message, Mapping):
        raise DataError(f"{place} is a {type(message).__name__}; a message is an object with role and content.")
    # parquet gives every message the fields of all messages; fields that were not written come back as None
    fields = {key: value for key, value in message.items() if value is not None}
    content = fields.get("content")
    parts = None
    if isinstance(content, (list, tuple, np.ndarray)):
        objects = [part if isinstance(part, Mapping) else {} for part in content]  # {} for a part that is no object
        parts = [{name: value for name, value in part.items() if value is not None} for part in objects]
    plain = fields if parts is None else {**fields, "content": [p for p in parts if p.get("type") not in MEDIA_PARTS]}
    check_plain(plain, place.removeprefix("field ").strip("'"))
    role = fields.get("role")
    if not isinstance(role, str) or not role:
        raise DataError(f"{place} has no text 'role'; use 'system', 'user' or 'assistant'.")
    # a template may have further roles, but a near miss of a common role is a typo that it would pass over
    if role not in ROLES and (close := difflib.get_close_matches(role.strip().lower(), ROLES, n=1, cutoff=0.75)):
        raise DataError(f"{place} has the role {quoted(role)}; did you mean {close[0]!r}?")
    calls = fields.get("tool_calls")
    if isinstance(content, str) or (content is None and isinstance(calls, (list, tuple, np.ndarray)) and len(calls)):
        return fields
    if parts is not None:
        return {**fields, "content": _checked_parts(parts, place, images)}
    raise DataError(f"{place} has no text 'content' (it is {type(content).__name__}).")


def messages_of(messages: object, *, images: bool = False) -> Messages:
    """The checked messages of a request's field `messages`. Raises DataError, also for none."""
    if not isinstance(messages, list) or not messages:
        raise DataError("`messages` must be a list of messages {role, content}")
    return [message_of(message, f"messages[{number}]", images=images) for number, message in enumerate(messages)]


def _checked_parts(parts: list[dict[str, Any]], place: str, images: bool) -> str | list[dict[str, object]]:
    media_parts = [p for p in parts if not (p.get("type") == "text" and isinstance(p.get("text"), str))]
    if not media_parts:
        return "".join(part["text"] for part in parts)
    allowed = MEDIA_PARTS if images else ()
    if all(part.get("type") in allowed for part in media_parts):
        return parts
    kinds = [_MEDIA.get(kind.partition("_")[0]) for p in media_parts if (kind := str(p.get("type"))) not in allowed]
    if media := next(filter(None, kinds), None):
        raise UnavailableRowError(no_media(media, "content of a message"))
    names = "text, images and videos" if images else "text"
    raise DataError(f"{place} has content other than {names}, which no program reads.")


# types of parts of a content
IMAGE_PARTS = ("image", "image_url")
VIDEO_PARTS = ("video", "video_url")
MEDIA_PARTS = (*IMAGE_PARTS, *VIDEO_PARTS)
SOURCES = (*MEDIA_PARTS, "bytes", "path", "url")  # fields that hold an image or a video, or lead to it
_MEDIA = {"image": "images", "video": "videos", "audio": "audio"}


def no_media(media: str, where: str) -> str:
    """The sentence about rows with `media` that a run cannot read."""
    if media != "audio":
        return (
            f"{media} ({where}) cannot be read: the program trains on text, or the model has no image processor, or it is of "
            f"none of the families {', '.join(VISION)}. Use a model of these with its processor's files, or "
            "rows of text."
        )
    return f"audio ({where}) is not available in this version. Use rows of text, images and videos."


def check_row(
    row: Mapping[str, object], config: DataConfig, agents: Collection[str] = (), *, images: bool = False
) -> None:
    """Check all fields except the prompt: scorer, reference answer, extra_info, no media or with `images` no audio, no
    agent outside `agents`. Raises DataError."""
    _check_features(row, config, agents, images)
    source = row.get(config.reward_fn_key)
    if not isinstance(source, str) or not source:
        value = "missing" if source is None else quoted(source)
        raise DataError(
            f"field {config.reward_fn_key!r} must be a text that names the task, but it is {value}; it selects the built-in "
            "scorer. With a reward function of your own any name will do. data.reward_fn_key names the field."
        )
    check_plain(source, config.reward_fn_key)
    if not source.isprintable() or len(source) > MAX_SOURCE:
        raise DataError(
            f"field {config.reward_fn_key!r} must be a name of at most {MAX_SOURCE} characters without line ends and other "
            f"control characters, but it is {quoted(source)}; metrics are named after it."
        )
    _check_reward_model(row)
    extra = row.get("extra_info")
    if extra is not None and not isinstance(extra, Mapping):
        raise DataError(f"field 'extra_info' is a {type(extra).__name__}; it must be an object, or left out.")
    if "extra_info" not in row and (close := _like_extra_info(tuple(map(str, row)))):
        raise DataError(f"there is a field {close!r}; did you mean 'extra_info'?")
    check_plain(extra, "extra_info")


@functools.lru_cache  # rows of a file have the same fields
def _like_extra_info(fields: tuple[str, ...]) -> str:
    """The field that is nearly named extra_info; "" for none."""
    return next(iter(difflib.get_close_matches("extra_info", fields, n=1, cutoff=0.85)), "")


def _check_features(row: Mapping[str, object], config: DataConfig, agents: Collection[str], images: bool) -> None:
    """Raise UnavailableRowError for a feature that a row needs and that is not available; empty columns are fine."""
    for key, media in ((config.image_key, "images"), (config.video_key, "videos"), (config.audio_key, "audio")):
        if not _is_nothing(row.get(key)) and not (images and media != "audio"):
            raise UnavailableRowError(no_media(media, f"field {key!r}"))
    agent = row.get("agent_name")
    if agents:
        if agent is not None and agent not in agents:
            raise DataError(
                f"the agent loop {quoted(agent)} (field 'agent_name') is not known{nearest(str(agent), agents) or '.'} "
                "Declare it in actor_rollout_ref.rollout.agent.agent_loop_config_path."
            )
        return
    if agent is not None and agent != "single_turn_agent":
        key = _KEY_OF_AGENT.get(str(agent), "agent.agent_loop_config_path")
        raise UnavailableRowError(
            f"the row names the agent loop {quoted(agent)} (field 'agent_name'), but the run has no agents; it would train "
            f"single-turn, without tools. Set actor_rollout_ref.rollout.{key}, or leave the field out if that is meant."
        )
    extra = row.get("extra_info")
    places = {"extra_info.": extra if isinstance(extra, Mapping) else {}, "": row}
    for prefix, fields in places.items():
        for name in ("tools_kwargs", "interaction_kwargs"):
            if not _is_nothing(fields.get(name)):
                raise UnavailableRowError(
                    f"the row has tools or interactions (field {prefix + name!r}), but the run has no agents; it would train "
                    "single-turn, without them. Set actor_rollout_ref.rollout.multi_turn.enable=True, or leave the field out "
                    "if that is meant."
                )


def _is_nothing(value: object, depth: int = 0) -> bool:
    """Whether a value is None, empty, or an object of only such values, as a parquet file fills in missing fields."""
    if isinstance(value, Mapping):
        return depth < MAX_DEPTH and all(_is_nothing(inner, depth + 1) for inner in value.values())
    return value is None or (hasattr(value, "__len__") and len(value) == 0)


def _check_reward_model(row: Mapping[str, object]) -> None:
    reward = row.get("reward_model")
    if not isinstance(reward, Mapping):
        kind = "missing" if reward is None else f"a {type(reward).__name__}"
        raise DataError(
            f"field 'reward_model' is {kind}; it must be an object with the reference answer, such as "
            '{"ground_truth": "5"}.'
        )
    if reward.get("style") != "model" and reward.get("ground_truth") is None:
        raise DataError(
            "field 'reward_model.ground_truth' is missing; give the reference answer, or set "
            "reward_model.style to 'model' when a model judges without one."
        )
    check_plain(reward, "reward_model")
    truth = reward.get("ground_truth")
    if isinstance(truth, float) and not math.isfinite(truth):
        raise DataError(
            f"field 'reward_model.ground_truth' is {truth}, which is what a missing value becomes in a table; give the "
            "reference answer."
        )


def check_plain(value: object, field: str, depth: int = 0) -> None:
    """Check a value for reward functions and the run's records: text that UTF-8 can hold, numbers, True, False, null,
    and lists and objects of them, at most MAX_DEPTH inside each other. Raises DataError naming the field."""
    if isinstance(value, str):
        if not value.isascii():
            try:
                value.encode()
            except UnicodeEncodeError as error:
                raise DataError(
                    f"field {field!r} holds half a character (the surrogate {value[error.start]!a}); write it whole."
                ) from error
    elif isinstance(value, Mapping | list | tuple | np.ndarray):
        if depth == MAX_DEPTH:
            raise DataError(f"field {field!r} is nested more than {MAX_DEPTH} deep; make it flat.")
        parts = value.items() if isinstance(value, Mapping) else enumerate(value)
        for name, part in parts:
            check_plain(name, field)
            if part is None or type(part) in (int, float, bool):
                continue  # long lists of numbers are common
            inner = f"{field}.{name}" if isinstance(value, Mapping) else f"{field}[{name}]"
            check_plain(part, inner if len(inner) < 200 else field, depth + 1)
    elif not (value is None or isinstance(value, bool | int | float | np.generic)):
        raise DataError(
            f"field {field!r} is a {type(value).__name__}; rows may hold text, numbers, lists and objects. For binary data "
            "give the path of a file, for a date its text."
        )


def number_in(value: object, field: str) -> float:
    """A number of a row. Raises DataError unless it is finite and of at most MAX_NUMBER in size."""
    if isinstance(value, bool) or not isinstance(value, int | float | np.number) or not abs(value) <= MAX_NUMBER:
        raise DataError(
            f"field {field!r} must be a finite number of at most {MAX_NUMBER:g} in size, but it is {quoted(value, 80)}."
        )
    return float(value)


def whole_section(config: DataConfig | Mapping[str, object]) -> Any:
    """The section `data`, with defaults for keys that a mapping (a recipe's own config) leaves out."""
    from verl.config import DataConfig

    if isinstance(config, DataConfig) or not isinstance(config, Mapping):
        return config
    from omegaconf import OmegaConf

    merged = OmegaConf.merge(OmegaConf.create(dataclasses.asdict(DataConfig())), OmegaConf.create(dict(config)))
    return OmegaConf.create(OmegaConf.to_container(merged))
