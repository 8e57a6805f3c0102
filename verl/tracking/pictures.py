"""Small pictures of the images of samples, for the page about a run: samples/images/{digest}.jpg, each written once.

sample_rows gives {"images": ["data:image/jpeg;base64,..."]}; a file of samples has {"images": ["3f0c...1b.jpg"]}.
"""

from __future__ import annotations

import base64
import hashlib
import io
import os
import re
from collections.abc import Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Any

from verl.regular_files import require_regular

if TYPE_CHECKING:
    from PIL.Image import Image

FOLDER = "images"  # within samples/
SIDE = 256  # pixels of the longer side at most
MAX_IMAGES = 64  # of a sample that are shown
_MAX_BYTES = 1 << 20
_NAME = re.compile(r"[0-9a-f]{32}\.jpg")
_HEAD = "data:image/jpeg;base64,"


def thumbnail(picture: Image) -> str:
    """The data URL of a JPEG of a picture, at most SIDE pixels wide and high."""
    scale = min(1.0, SIDE / max(picture.size))
    width, height = (max(1, round(scale * side)) for side in picture.size)
    buffer = io.BytesIO()
    picture.resize((width, height), reducing_gap=2.0).convert("RGB").save(buffer, "JPEG", quality=85)
    return _HEAD + base64.b64encode(buffer.getvalue()).decode()


def with_stored_images(row: Mapping[str, Any], folder: Path) -> Mapping[str, object]:
    """A row of samples whose `images` are names of files in `folder`, which are written where they are missing."""
    if not row.get("images"):
        return row
    return {**row, "images": [_stored(base64.b64decode(url.removeprefix(_HEAD)), folder) for url in row["images"]]}


def _stored(content: bytes, folder: Path) -> str:
    file = folder / f"{hashlib.sha256(content).hexdigest()[:32]}.jpg"
    if not file.exists():
        folder.mkdir(parents=True, exist_ok=True)
        temporary = file.with_suffix(f".{os.getpid()}.tmp")
        temporary.write_bytes(content)
        temporary.replace(file)
    return file.name


def stored_images(row: Mapping[str, object], folder: Path) -> list[str]:
    """Data URLs of the images of a stored row, for a browser; "" for an image that cannot be shown. A copied folder may hold
    any file, so each is decoded and encoded again. Raises ImportError where Pillow is not installed."""
    names = row.get("images")
    return [_shown(name, folder) for name in names[:MAX_IMAGES]] if isinstance(names, list) else []


def _shown(name: object, folder: Path) -> str:
    from PIL import Image

    if not isinstance(name, str) or not _NAME.fullmatch(name):
        return ""
    try:
        with require_regular(folder / name, "the image").open("rb") as file:
            content = file.read(_MAX_BYTES)
        picture = Image.open(io.BytesIO(content), formats=("JPEG",))
        return thumbnail(picture) if max(picture.size) <= SIDE else ""
    except Exception:  # noqa: BLE001 - of a codec, for a file that is no image
        return ""
