"""Images of rows: their places in the messages, and their pixels, read within limits.

    {"prompt": [{"role": "user", "content": "<image>How many dots?"}], "images": ["dots.png"]}
    {"prompt": [{"role": "user", "content": [{"type": "image", "image": "dots.png"}, {"type": "text", "text": "How many?"}]}]}

An image is a picture of PIL, bytes of a file, {"bytes"}, {"path"}, {"image"} or {"url"}, a path, a file URL, or a data URL in
base64. Nothing is downloaded. Videos stand in messages in the same way (verl/data/pictures.py).
"""

from __future__ import annotations

import hashlib
import json
import re
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Any, TypeAlias

import numpy as np

from verl.data.schema import IMAGE_PARTS, SOURCES, VIDEO_PARTS, Messages
from verl.data_proto.media import SAMPLING, Clip, ImageFiles, Media, VideoSource
from verl.data_proto.tokenizer import Tokenizer
from verl.errors import ConfigError, DataError, nearest
from verl.foreign_text import clean, quoted
from verl.tracking.pictures import thumbnail

if TYPE_CHECKING:
    from PIL import Image

    from verl.config import DataConfig
    from verl.config.sections.data import TextDataConfig
    from verl.data.conversations.tokens import TrainingSequence
    from verl.models.processor import ImageProcessor


Picture: TypeAlias = "Image.Image | Clip"
_PARTS = {"image": IMAGE_PARTS, "video": VIDEO_PARTS}  # kind -> types of parts; <kind> stands for one in a text


def image_messages(
    messages: Messages, row: Mapping[str, object], settings: DataConfig | TextDataConfig
) -> tuple[Messages, list[object]]:
    """Messages with parts of content wherever a row has images or videos, and their sources in the order of the parts. A
    placeholder in a text, and a part without a source, take the next of the field `image_key` or `video_key`. Raises DataError
    if placeholders and images or videos differ in number."""
    keys = {"image": settings.image_key, "video": settings.video_key}
    media = {kind: listed(row.get(key)) for kind, key in keys.items()}
    if not any(media.values()) and not any(map(_has_places, messages)):
        return messages, []
    placed = [{**message, "content": list(_parts(message))} for message in messages]
    sources: list[object] = []
    waiting = {kind: iter(values) for kind, values in media.items()}
    num_open = dict.fromkeys(media, 0)
    for part in (part for message in placed for part in message["content"] if part["type"] in media):
        kind, source = part["type"], part.pop("source", None)
        if source is None:
            num_open[kind] += 1
            source = next(waiting[kind], None)
        sources.append(source if kind == "image" else VideoSource(source))
    for kind, values in media.items():
        if num_open[kind] != len(values):
            raise DataError(
                f"field {keys[kind]!r} has {len(values)} {kind}s, and the messages have {num_open[kind]} places for them "
                f"(<{kind}> in a text, or a part of type {kind}). Give each {kind} one place."
            )
    return placed, sources


def _has_places(message: Mapping[str, Any]) -> bool:
    """Whether the content of a message has parts, or a text with a placeholder."""
    content = message.get("content") or ""
    if isinstance(content, list):
        return True
    return message["role"] != "assistant" and any(f"<{kind}>" in content for kind in _PARTS)


def listed(images: object) -> list[object]:
    """The images of a field that has one image or several."""
    if images is None:
        return []
    return list(images) if isinstance(images, list | tuple | np.ndarray) else [images]


def _parts(message: Mapping[str, Any]) -> Iterator[dict[str, Any]]:
    """The content of a message as parts of type text, image and video; text of the assistant has no placeholders."""
    content = message.get("content")
    parts = content if isinstance(content, list) else [{"type": "text", "text": content or ""}]
    for part in parts:
        if kind := next((kind for kind, types in _PARTS.items() if part["type"] in types), None):
            source = next((part[name] for name in SOURCES if name in part), None)
            yield {"type": kind, "source": part if source is not None and kind == "video" else source}
            continue
        texts = [part["text"]] if message["role"] == "assistant" else re.split("(<image>|<video>)", part["text"])
        places = {f"<{kind}>": kind for kind in _PARTS}
        yield from ({"type": places[t]} if t in places else {"type": "text", "text": t} for t in texts if t)


def image_encoder(tokenizer: Tokenizer, settings: DataConfig | TextDataConfig) -> ImageEncoder | None:
    """The encoder of the images of rows by the section `data`; None for a model that reads text."""
    processor = getattr(tokenizer, "processor", None)
    return None if processor is None else ImageEncoder(processor, settings.mm_processor_kwargs)


class ImageEncoder:
    """Reads the images and videos of rows with a processor and its further arguments (data.mm_processor_kwargs). Raises
    ConfigError for an argument that it does not take."""

    def __init__(self, processor: ImageProcessor, settings: Mapping[str, object]):
        for name in settings.keys() - processor.arguments:
            hint = nearest(name, processor.arguments) or f"; it takes {', '.join(sorted(processor.arguments))}."
            raise ConfigError(f"data.mm_processor_kwargs: the model's image processor has no argument {name!r}{hint}")
        self.processor, self.settings = processor, dict(settings)
        # of the image processor
        self._arguments = {name: value for name, value in settings.items() if name not in SAMPLING}
        self._settings_digest = hashlib.sha256(
            (processor.settings + json.dumps(self.settings, sort_keys=True, default=str)).encode()
        ).digest()

    def require_none(self, ids: Sequence[int], place: str) -> None:
        """Raise DataError if the tokens of a row without images have the token that stands for one."""
        for token, number in self.processor.marks.items():
            if number in ids:
                raise DataError(
                    f"{place}: the row has no images, and its text has {quoted(token)}, which stands for one. Give the image, "
                    "or remove it from the text."
                )

    def read(self, sources: Sequence[object], place: str) -> PromptImages:
        """The images and videos at `sources`. Raises DataError naming `place` and the image or video."""
        return self.encode([self.opened(source, place, number) for number, source in enumerate(sources)], place)

    def opened(self, source: object, place: str, number: int) -> Picture:
        """The picture or the clip at a source, the image or video `number` of `place`. Raises DataError."""
        from verl.data.pictures import read_image

        if not isinstance(source, VideoSource):
            return read_image(source, f"{place}: image {number}")
        place = f"{place}: video {number}"
        if why := self.processor.no_videos or (self.processor.keeps_files and self.processor.not_sent):
            raise DataError(f"{place} {why}. Leave out rows with videos.")
        from verl.data.pictures import read_clip

        defaults = {**self.processor.video_settings, **self.settings}
        return read_clip(source, defaults, place, self.processor.frames_at_once)

    def encode(self, pictures: Sequence[Picture], place: str) -> PromptImages:
        """The images of PIL pictures in RGB, and of clips. Raises DataError naming `place`."""
        digest = hashlib.sha256(self._settings_digest)
        for picture in (frame for item in pictures for frame in _frames(item)):
            digest.update(f"{picture.size}".encode() + picture.tobytes())
        for clip in (item for item in pictures if isinstance(item, Clip)):
            digest.update(f"{clip.indices} {clip.num_frames} {clip.fps} {sorted(clip.limits.items())}".encode())
        try:
            tensors, texts = self.processor.read(pictures, self.settings)
        except Exception as error:  # of a family's processor, for a size that it does not take or an unknown argument
            raise DataError(
                f"{place}: the model's processor cannot read the row's images ({type(error).__name__}: {clean(error)}). Change "
                "the images, or data.mm_processor_kwargs."
            ) from error
        files = None
        if self.processor.keeps_files:
            files = ImageFiles(tuple(map(as_file, self.processor.as_read(pictures, tensors))), self._arguments)
        thumbnails = tuple(thumbnail(_frames(item)[0]) for item in pictures)
        kinds = tuple("video" if isinstance(item, Clip) else "image" for item in pictures)
        media = Media(digest.hexdigest(), tensors, thumbnails, tuple(texts), kinds, files)
        return PromptImages(media, self.processor, place)


def as_file(item: Picture) -> bytes | Clip:
    """The PNG file of a picture, and a clip of such files."""
    from verl.data.pictures import png

    return replace(item, frames=tuple(map(png, item.frames))) if isinstance(item, Clip) else png(item)


def _frames(item: Picture) -> Sequence[Image.Image]:
    return item.frames if isinstance(item, Clip) else (item,)


@dataclass(frozen=True)
class RowImages:
    """Images of a row at their sources. Their pixels take far more memory and are read when they are needed."""

    sources: Sequence[object]
    encoder: ImageEncoder
    place: str

    def read(self) -> PromptImages:
        """The images with their pixels. Raises DataError."""
        return self.encoder.read(self.sources, self.place)


class PromptImages:
    """The images of one row in its rendered messages."""

    def __init__(self, media: Media, processor: ImageProcessor, place: str):
        self.media, self.place = media, place
        self._tokens, self._marks = processor.tokens, processor.marks

    def expanded(self, text: str, *, complete: bool = True) -> str:
        """Rendered messages with the text of its image in place of each token; with `complete`, they have all images of the
        row. Raises DataError if the text has other tokens of images than the row has images."""
        return expanded(text, self._tokens, self.media.texts, self.place, complete=complete)

    def check(self, ids: Sequence[int], text: str) -> None:
        """Raise DataError unless the tokens `ids` of an expanded text have as many parts of images as the text."""
        num_parts, num_ids = self.num_parts(text), self.num_tokens(ids)
        if num_parts != num_ids:
            names = " or ".join(map(quoted, self._marks))
            raise DataError(
                f"{self.place}: the tokenizer gives {num_ids} tokens for {num_parts} times {names}. Use the tokenizer files of "
                "the model."
            )

    def num_tokens(self, ids: Sequence[int]) -> int:
        """Number of `ids` that stand for a part of an image."""
        return sum(token in self._marks.values() for token in ids)

    def num_parts(self, *texts: str) -> int:
        """Number of tokens in `texts` that stand for parts of images."""
        return sum(text.count(token) for text in texts for token in self._marks)


def expanded(text: str, tokens: Sequence[str], texts: Sequence[str], place: str, *, complete: bool = True) -> str:
    """See PromptImages.expanded, for the `texts` of images that stand in place of one of `tokens`."""
    pieces = re.split("|".join(map(re.escape, tokens)), text)
    num_tokens = len(pieces) - 1
    if num_tokens > len(texts) or (complete and num_tokens < len(texts)):
        names = " or ".join(map(quoted, tokens))
        raise DataError(
            f"{place}: the rendered messages have {num_tokens} times {names}, and there are {len(texts)} images. Remove that "
            "token from the texts, or use the chat template of the model."
        )
    return pieces[0] + "".join(image + piece for image, piece in zip(texts, pieces[1:], strict=False))


class ConversationImages:
    """Images at `sources` in the conversation of a row; `encoder` is None for a model that reads text."""

    def __init__(self, sources: Sequence[object], encoder: ImageEncoder | None, place: str):
        self.encoder, self.place = encoder, place
        self.row = RowImages(sources, encoder, place) if sources and encoder is not None else None
        self._read = None if self.row is None else self.row.read()

    def expanded(self, text: str) -> str:
        """The rendering of the first messages, with the text of each of their images."""
        return text if self._read is None else self._read.expanded(text, complete=False)

    def attached(self, sequences: list[TrainingSequence]) -> list[TrainingSequence]:
        """The sequences of the row with its images. Raises DataError if one follows the first token that trains, or if a
        row without images has a token that stands for one."""
        if self.encoder is None:
            return sequences
        for sequence in sequences:
            if self._read is None:
                self.encoder.require_none(sequence.input_ids.tolist(), self.place)
            else:
                self._require_before(sequence)
        return [replace(sequence, images=self.row) for sequence in sequences]

    def _require_before(self, sequence: TrainingSequence) -> None:
        assert self._read is not None
        before = sequence.input_ids[: int(sequence.loss_mask.argmax())]
        if self._read.num_tokens(before.tolist()) != self._read.num_parts(*self._read.media.texts):
            raise DataError(
                f"{self.place}: an image follows the first token that trains, which is not available in this version. Give the "
                "images in messages before the first answer that trains, or train only on the last answer (loss_mask)."
            )
