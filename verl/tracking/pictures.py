"""Files that samples refer to: texts of tokens (tokens.jsonl), and small pictures (samples/images/{digest}.jpg), written once.

sample_rows gives {"images": ["data:image/jpeg;base64,..."]}; a file of samples has {"images": ["3f0c...1b.jpg"]}.
"""

from __future__ import annotations

import base64
import hashlib
import io
import re
from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import TYPE_CHECKING

from verl.data_proto.tokenizer import Tokenizer
from verl.regular_files import require_regular, whole_file
from verl.tracking.files import Json, append_rows, has, is_count, is_text, read_json_rows

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


def with_stored_images(row: Json, folder: Path) -> Mapping[str, object]:
    """A row of samples with `images` as names of files in `folder`. Missing files are written."""
    if not row.get("images"):
        return row
    return {**row, "images": [_stored(base64.b64decode(url.removeprefix(_HEAD)), folder) for url in row["images"]]}


def _stored(content: bytes, folder: Path) -> str:
    file = folder / f"{hashlib.sha256(content).hexdigest()[:32]}.jpg"
    if not file.exists():
        folder.mkdir(parents=True, exist_ok=True)
        with whole_file(file) as temporary:
            temporary.write_bytes(content)
    return file.name


def stored_images(row: Mapping[str, object], folder: Path) -> list[str]:
    """Data URLs of the images of a stored row, for a browser; "" for an image that cannot be shown. A copied folder may hold
    any file, so each is decoded and encoded again. Raises ImportError without Pillow."""
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


TOKENS = "tokens.jsonl"
TOKEN = has(id=is_count, text=is_text)
_COLUMNS = ("prompt_ids", "response_ids")


class TokenTexts:
    """Appends a row for each token that no earlier row of the file has."""

    def __init__(self, path: Path, tokenizer: Tokenizer):
        self._path = path
        self._tokenizer = tokenizer
        self._known: set[int] | None = None

    def record(self, rows: Iterable[Json]) -> None:
        """Record the tokens of samples."""
        if self._known is None:
            self._known = {row["id"] for row in read_json_rows(self._path, TOKEN)}
        import numpy as np  # readers of the file need none

        columns = (np.unique(row[name]) for row in rows for name in _COLUMNS if row.get(name) is not None)
        ids = set(np.unique(np.concatenate([np.empty(0, np.int64), *columns])).tolist())
        new = sorted(ids - self._known)
        if new:
            append_rows(self._path, map(self._row, new))
            self._known.update(new)

    def _row(self, token: int) -> dict[str, object]:
        text = self._tokenizer.decode([token], skip_special_tokens=False, clean_up_tokenization_spaces=False)
        (form,) = self._tokenizer.convert_ids_to_tokens([token])
        if isinstance(form, str) and form.startswith("▁") and not text.startswith(" "):
            text = f" {text}"  # SentencePiece leaves out the space at the start of a text
        special = {"special": True} if token in self._tokenizer.all_special_ids else {}
        return {"id": token, "text": text, **special}
