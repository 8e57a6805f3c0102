"""Pictures of rows, and the bytes of images and videos: from objects, paths, file URLs and data URLs, up to a size."""

from __future__ import annotations

import base64
import binascii
import io
from collections.abc import Mapping
from typing import TYPE_CHECKING
from urllib.parse import unquote, urlparse

import numpy as np

from verl.data.schema import SOURCES
from verl.errors import DataError, MissingExtraError
from verl.foreign_text import clean, quoted
from verl.regular_files import require_regular

if TYPE_CHECKING:
    from PIL import Image

MAX_BYTES = 64 << 20  # of an image file
MAX_PIXELS = 1 << 26  # 8192 x 8192
_FORMATS = ("PNG", "JPEG", "WEBP", "BMP", "GIF", "TIFF")


def read_image(source: object, place: str) -> Image.Image:
    """The picture at `source`, also an array, as a PIL image in RGB. Raises DataError, which begins with `place`, for an
    unknown source, a file that is no image or is damaged, and a file or picture beyond MAX_BYTES and MAX_PIXELS."""
    try:
        from PIL import Image
    except ImportError as error:
        raise MissingExtraError("Reading images", "pillow", "pillow") from error
    if isinstance(source, np.ndarray):
        if source.dtype != np.uint8 or source.ndim not in (2, 3):
            raise DataError(
                f"{place} is an array of {source.dtype} and shape {source.shape}; give uint8 [height, width, 3], or a picture."
            )
        picture: Image.Image = Image.fromarray(source)
    elif isinstance(source, Image.Image):
        picture = source
    else:
        content = bytes_at(source, place, MAX_BYTES)
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


def image_text(source: object, place: str) -> str:
    """The path or URL of an image, or its bytes as a data URL, for a row in JSON. Raises DataError as read_image."""
    source = innermost_source(source, place)
    if isinstance(source, str):
        return source
    if hasattr(source, "save") or isinstance(source, np.ndarray):
        source = png(read_image(source, place))
    return "data:;base64," + base64.b64encode(bytes_at(source, place, MAX_BYTES)).decode()


def png(picture: Image.Image) -> bytes:
    """The file of a PIL picture."""
    file = io.BytesIO()
    picture.save(file, "PNG", compress_level=1)
    return file.getvalue()


def innermost_source(source: object, place: str) -> object:
    """The path, URL, bytes, picture or list to which an object leads. Raises DataError, which begins with `place`."""
    while isinstance(source, Mapping):
        entries = {name: source[name] for name in SOURCES if source.get(name) is not None}
        if not entries:
            raise DataError(f"{place} is an object without image, video, bytes, path or url; give one of them.")
        source = entries.get("bytes", next(iter(entries.values())))
    return source


def bytes_at(source: object, place: str, max_bytes: int) -> bytes:
    """The bytes of a file. Raises DataError, which begins with `place`, also for more than `max_bytes`."""
    source = innermost_source(source, place)
    if isinstance(source, str):
        return _named(source, place, max_bytes)
    if not isinstance(source, bytes | bytearray | memoryview):
        raise DataError(
            f"{place} is {quoted(source, 40)}, a {type(source).__name__}; give a picture, bytes, a path, or a file or data URL."
        )
    return _limited(bytes(source), place, max_bytes)


def _named(name: str, place: str, max_bytes: int) -> bytes:
    """The bytes that a path or a URL names."""
    kind, _, rest = name.partition(":")
    if kind == "data":
        return _data_url(rest, place, max_bytes)
    if kind in ("http", "https", "s3", "gs", "hdfs"):
        raise DataError(f"{place} is at {quoted(name, 80)}, and nothing is downloaded. Save it, and give its path.")
    path = unquote(urlparse(name).path) if kind == "file" else name
    file = require_regular(path, f"{place}: the file", DataError, "Give the path of an image or a video.")
    with file.open("rb") as opened:
        return _limited(opened.read(max_bytes + 1), place, max_bytes)


def _data_url(rest: str, place: str, max_bytes: int) -> bytes:
    head, comma, text = rest.partition(",")
    if not comma or not head.endswith(";base64"):
        raise DataError(f"{place} is a data URL without base64; write data:image/png;base64, and the bytes.")
    try:
        return _limited(base64.b64decode(text, validate=True), place, max_bytes)
    except (binascii.Error, ValueError) as error:
        raise DataError(f"{place} is a data URL whose base64 is damaged ({clean(error)}). Encode it again.") from error


def _limited(content: bytes, place: str, max_bytes: int) -> bytes:
    if not content:
        raise DataError(f"{place} is empty. Give the bytes of an image or a video.")
    if len(content) > max_bytes:
        raise DataError(f"{place} has more than {max_bytes:,} bytes. Store it smaller.")
    return content
