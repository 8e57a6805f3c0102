"""Images of rows: where they stand in the messages, and their pixels, read within limits.

    {"prompt": [{"role": "user", "content": "<image>How many dots?"}], "images": ["dots.png"]}
    {"prompt": [{"role": "user", "content": [{"type": "image", "image": "dots.png"}, {"type": "text", "text": "How many?"}]}]}

An image is a picture of PIL, bytes of a file, {"bytes"}, {"path"}, {"image"} or {"url"}, a path, a file URL, or a data URL in
base64. Nothing is downloaded.
"""

from __future__ import annotations

import base64
import binascii
import hashlib
import io
import json
import re
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any
from urllib.parse import unquote, urlparse

import numpy as np

from verl.data.schema import IMAGE_PARTS, Messages
from verl.data_proto.media import ImageFiles, Media
from verl.data_proto.tokenizer import Tokenizer
from verl.errors import ConfigError, DataError, MissingExtraError, nearest
from verl.foreign_text import clean, quoted
from verl.regular_files import require_regular
from verl.tracking.pictures import thumbnail

if TYPE_CHECKING:
    from verl.config import DataConfig
    from verl.config.sections.data import TextDataConfig
    from verl.models.processor import ImageProcessor

PLACEHOLDER = "<image>"
MAX_BYTES = 64 << 20  # of a file
MAX_PIXELS = 1 << 26  # 8192 x 8192
_FORMATS = ("PNG", "JPEG", "WEBP", "BMP", "GIF", "TIFF")
_SOURCES = ("image", "bytes", "path", "url", "image_url")  # fields that hold an image, or lead to it


def image_messages(messages: Messages, images: object, key: str) -> tuple[Messages, list[object]]:
    """Messages with parts of content wherever a row has images, and the sources of these images in the order of the parts.

    A placeholder in a text, and a part without a source, take the next of `images`, the field `key` of the row. Messages
    without an image stay as they are. Raises DataError where placeholders and images differ in number.
    """
    images = listed(images)
    has_parts = any(isinstance(message.get("content"), list) for message in messages)
    if not images and not has_parts:
        return messages, []
    placed = [{**message, "content": list(_parts(message))} for message in messages]
    sources: list[Any] = []
    waiting = iter(images)
    num_open = 0
    for part in (part for message in placed for part in message["content"] if part["type"] == "image"):
        source = part.pop("source", None)
        if source is None:
            num_open += 1
            source = next(waiting, None)
        sources.append(source)
    if num_open != len(images):
        raise DataError(
            f"field {key!r} has {len(images)} images, and the messages have {num_open} places for them ({PLACEHOLDER} in a "
            "text, or a part of type image). Give each image one place."
        )
    return placed, sources


def listed(images: object) -> list[Any]:
    """The images of a field, which has one image or several."""
    if images is None:
        return []
    return list(images) if isinstance(images, list | tuple | np.ndarray) else [images]


def _parts(message: Mapping[str, Any]) -> Iterator[dict[str, Any]]:
    """The content of a message as parts of type text and image; text of the assistant has no placeholders."""
    content = message.get("content")
    parts = content if isinstance(content, list) else [{"type": "text", "text": content or ""}]
    for part in parts:
        if part["type"] in IMAGE_PARTS:
            yield {"type": "image", "source": next((part[name] for name in _SOURCES if name in part), None)}
            continue
        texts = [part["text"]] if message["role"] == "assistant" else re.split(f"({PLACEHOLDER})", part["text"])
        yield from (
            {"type": "image"} if text == PLACEHOLDER else {"type": "text", "text": text} for text in texts if text
        )


def image_encoder(tokenizer: Tokenizer, settings: DataConfig | TextDataConfig) -> ImageEncoder | None:
    """The encoder of the images of rows by the section `data`; None for a model that reads text."""
    processor = getattr(tokenizer, "processor", None)
    return None if processor is None else ImageEncoder(processor, settings.mm_processor_kwargs)


class ImageEncoder:
    """Reads the images of rows with a processor and its further arguments (data.mm_processor_kwargs). Raises ConfigError for
    an argument that it does not take."""

    def __init__(self, processor: ImageProcessor, settings: Mapping[str, Any]):
        for name in settings.keys() - processor.arguments:
            hint = nearest(name, processor.arguments) or f"; it takes {', '.join(sorted(processor.arguments))}."
            raise ConfigError(f"data.mm_processor_kwargs: the model's image processor has no argument {name!r}{hint}")
        self.processor, self.settings = processor, dict(settings)
        self._settings_digest = hashlib.sha256(
            (processor.settings + json.dumps(self.settings, sort_keys=True, default=str)).encode()
        ).digest()

    def require_none(self, ids: Sequence[int], place: str) -> None:
        """Raise DataError where the tokens of a row without images have the token that stands for one."""
        if self.processor.token_id in ids:
            raise DataError(
                f"{place}: the row has no images, and its text has {quoted(self.processor.token)}, which stands for one. Give "
                "the image, or remove it from the text."
            )

    def read(self, sources: Sequence[Any], place: str) -> PromptImages:
        """The images at `sources`. Raises DataError naming `place` and the image."""
        return self.encode(
            [read_image(source, f"{place}: image {number}") for number, source in enumerate(sources)], place
        )

    def encode(self, pictures: Sequence[Any], place: str) -> PromptImages:
        """The images of PIL pictures in RGB. Raises DataError naming `place`."""
        digest = hashlib.sha256(self._settings_digest)
        for picture in pictures:
            digest.update(f"{picture.size}".encode() + picture.tobytes())
        try:
            tensors, texts = self.processor.read(pictures, self.settings)
        except Exception as error:  # of a family's processor, for a size that it does not take or an unknown argument
            raise DataError(
                f"{place}: the model's processor cannot read the row's images ({type(error).__name__}: {clean(error)}). Change "
                "the images, or data.mm_processor_kwargs."
            ) from error
        files = ImageFiles(tuple(map(png, pictures)), self.settings) if self.processor.keeps_files else None
        media = Media(digest.hexdigest(), tensors, tuple(map(thumbnail, pictures)), tuple(texts), files)
        return PromptImages(media, self.processor, place)


@dataclass(frozen=True)
class RowImages:
    """Images of a row at their sources. Their pixels, which take far more memory, are read when they are needed."""

    sources: Sequence[Any]
    encoder: ImageEncoder
    place: str

    def read(self) -> PromptImages:
        """The images with their pixels. Raises DataError."""
        return self.encoder.read(self.sources, self.place)


class PromptImages:
    """The images of one row in its rendered messages."""

    def __init__(self, media: Media, processor: ImageProcessor, place: str):
        self.media, self.place = media, place
        self.token, self.token_id = processor.token, processor.token_id

    def expanded(self, text: str, *, whole: bool = True) -> str:
        """Rendered messages with the text of its image in place of each token; with `whole`, they have all images of the row.
        Raises DataError where the text has other tokens of images than the row has images."""
        return expanded(text, self.token, self.media.texts, self.place, whole=whole)

    def check(self, ids: Sequence[int], text: str) -> None:
        """Raise DataError unless the tokens `ids` of an expanded text have as many parts of images as the text."""
        num_parts, num_ids = text.count(self.token), sum(token == self.token_id for token in ids)
        if num_parts != num_ids:
            raise DataError(
                f"{self.place}: the tokenizer gives {num_ids} tokens for {num_parts} times {quoted(self.token)}. Use the "
                "tokenizer files of the model."
            )


def expanded(text: str, token: str, texts: Sequence[str], place: str, *, whole: bool = True) -> str:
    """See PromptImages.expanded, for the `texts` of images that stand in place of `token`."""
    pieces = text.split(token)
    num_tokens = len(pieces) - 1
    if num_tokens > len(texts) or (whole and num_tokens < len(texts)):
        raise DataError(
            f"{place}: the rendered messages have {num_tokens} times {quoted(token)}, and there are {len(texts)} images. "
            "Remove that token from the texts, or use the chat template of the model."
        )
    return pieces[0] + "".join(image + piece for image, piece in zip(texts, pieces[1:], strict=False))


def read_image(source: object, place: str) -> Any:
    """The picture at `source` as a PIL image in RGB. Raises DataError, which begins with `place`, for an unknown source, a
    file that is no image or is damaged, and a file or picture beyond MAX_BYTES and MAX_PIXELS."""
    try:
        from PIL import Image
    except ImportError as error:
        raise MissingExtraError("Reading images", "pillow", "pillow") from error
    if isinstance(source, Image.Image):
        picture = source
    else:
        content = _content(source, place)
        try:
            picture = Image.open(io.BytesIO(content), formats=_FORMATS)
        except Image.DecompressionBombError as error:
            raise DataError(f"{place} has more than {MAX_PIXELS:,} pixels; make it smaller.") from error
        except Exception as error:  # of a codec, for bytes that it does not expect
            raise DataError(f"{place} is no image that can be read ({', '.join(_FORMATS)}). Write it again.") from error
    if picture.width * picture.height > MAX_PIXELS:
        raise DataError(
            f"{place} has {picture.width} x {picture.height} pixels, more than {MAX_PIXELS:,}; make it smaller."
        )
    if (num_frames := getattr(picture, "n_frames", 1)) > 1:
        raise DataError(f"{place} has {num_frames} frames; give one picture.")
    try:
        return picture.convert("RGB")
    except Exception as error:  # of a codec, for a file that ends early or is damaged
        raise DataError(f"{place} is damaged: {clean(error)}. Write it again.") from error


def image_text(source: Any, place: str) -> str:
    """The path or URL of an image, or its bytes as a data URL, for a row in JSON. Raises DataError as read_image."""
    source = _innermost(source, place)
    if isinstance(source, str):
        return source
    if hasattr(source, "save"):  # a picture of PIL
        source = png(source.convert("RGB"))
    return "data:;base64," + base64.b64encode(_content(source, place)).decode()


def png(picture: Any) -> bytes:
    """The file of a PIL picture."""
    file = io.BytesIO()
    picture.save(file, "PNG", compress_level=1)
    return file.getvalue()


def _innermost(source: object, place: str) -> Any:
    """The path, URL, bytes or picture to which an object leads."""
    while isinstance(source, Mapping):
        entries = {name: source[name] for name in _SOURCES if source.get(name) is not None}
        if not entries:
            raise DataError(f"{place} is an object without image, bytes, path or url; give one of them.")
        source = entries.get("bytes", next(iter(entries.values())))
    return source


def _content(source: object, place: str) -> bytes:
    """The bytes of an image file."""
    source = _innermost(source, place)
    if isinstance(source, str):
        return _named(source, place)
    if not isinstance(source, bytes | bytearray | memoryview):
        raise DataError(
            f"{place} is {quoted(source, 40)}, a {type(source).__name__}; give a picture, bytes, a path, or a file or data URL."
        )
    return _limited(bytes(source), place)


def _named(name: str, place: str) -> bytes:
    """The bytes that a path or a URL names."""
    kind, _, rest = name.partition(":")
    if kind == "data":
        return _data_url(rest, place)
    if kind in ("http", "https", "s3", "gs", "hdfs"):
        raise DataError(f"{place} is at {quoted(name, 80)}, and nothing is downloaded. Save it, and give its path.")
    path = unquote(urlparse(name).path) if kind == "file" else name
    file = require_regular(path, f"{place}: the file", DataError, "Give the path of an image.")
    with file.open("rb") as opened:
        return _limited(opened.read(MAX_BYTES + 1), place)


def _data_url(rest: str, place: str) -> bytes:
    head, comma, text = rest.partition(",")
    if not comma or not head.endswith(";base64"):
        raise DataError(f"{place} is a data URL without base64; write data:image/png;base64, and the bytes.")
    try:
        return _limited(base64.b64decode(text, validate=True), place)
    except (binascii.Error, ValueError) as error:
        raise DataError(f"{place} is a data URL whose base64 is damaged ({clean(error)}). Encode it again.") from error


def _limited(content: bytes, place: str) -> bytes:
    if not content:
        raise DataError(f"{place} is empty. Give the bytes of an image.")
    if len(content) > MAX_BYTES:
        raise DataError(f"{place} has more than {MAX_BYTES:,} bytes. Store it smaller.")
    return content
