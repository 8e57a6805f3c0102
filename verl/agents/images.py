"""Images that tools, environments and agents add to an episode: read within the limits of rows, and stored for a repetition.

An image is a file `episodes/images/DIGEST.png` of the run folder. The journal has its digest, so a step that is taken again has
the same pixels.
"""

from __future__ import annotations

import asyncio
import os
import uuid
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np

from verl.data.images import ImageEncoder, listed
from verl.data.schema import IMAGE_PARTS, no_media
from verl.data_proto.media import Media
from verl.errors import DataError
from verl.tools.schemas import ToolResponse

FOLDER = "images"  # within the folder of the journal


class EpisodeImages:
    """Reads images with `encoder` (None: the model or the engine reads none) and stores them in `folder` (None: nowhere)."""

    def __init__(self, encoder: ImageEncoder | None, folder: Path | None):
        self.encoder, self.folder = encoder, None if folder is None else folder / FOLDER

    @property
    def token(self) -> tuple[str, int] | None:
        """The text that stands for an image and for each of its parts, and its token id."""
        return None if self.encoder is None else (self.encoder.processor.token, self.encoder.processor.token_id)

    async def read(self, sources: Sequence[Any], place: str) -> list[Media]:
        """Media of each image, read on a thread; Media stay as they are. Raises DataError, which begins with `place`."""
        if all(isinstance(source, Media) for source in sources):
            return list(sources)
        return await asyncio.to_thread(self._read_all, sources, place)

    async def stored(self, digests: Sequence[str]) -> list[Media]:
        """Images that the journal names. Raises DataError for a file that is gone."""
        return [await asyncio.to_thread(self.of_journal, digest) for digest in digests]

    def of_journal(self, digest: str) -> Media:
        """An image that the journal names. Raises DataError for a file that is gone."""
        return self._read(f"{self.folder}/{digest}.png", "An episode of the journal")

    def _read_all(self, sources: Sequence[object], place: str) -> list[Media]:
        return [
            source if isinstance(source, Media) else self._read(source, f"{place}: image {number}")
            for number, source in enumerate(sources)
        ]

    def _read(self, source: object, place: str) -> Media:
        if self.encoder is None:
            raise DataError(no_media("images", place))
        from verl.data.pictures import png, read_image

        if isinstance(source, np.ndarray):
            source = _picture(source, place)
        picture = read_image(source, place)
        media = self.encoder.encode([picture], place).media
        if self.folder is not None and not (file := self.folder / f"{media.digest}.png").exists():
            self.folder.mkdir(parents=True, exist_ok=True)
            temporary = file.with_suffix(f".{uuid.uuid4().hex}.tmp")  # others may write the same image
            with temporary.open("wb") as opened:
                opened.write(png(picture))
                opened.flush()
                os.fsync(opened.fileno())
            temporary.replace(file)
        return media


def _picture(values: np.ndarray, place: str) -> object:
    from PIL import Image

    if values.dtype != np.uint8 or values.ndim not in (2, 3):
        raise DataError(
            f"{place} is an array of {values.dtype} and shape {values.shape}; give uint8 [height, width, 3], or a picture."
        )
    return Image.fromarray(values)


def text_and_images(answer: Any) -> tuple[str, list[object]]:
    """The text of what a tool or an environment returned, and its images: of a ToolResponse, an object with text and image (or
    images), a list of parts, a picture or an array of pixels. Anything else is a text. Raises ValueError for a video."""
    if isinstance(answer, ToolResponse):
        if answer.video:
            raise ValueError("it returned videos, which are not supported in this version")
        return answer.text or "", listed(answer.image)
    if (
        isinstance(answer, Mapping)
        and answer.keys() & {"image", "images"}
        and answer.keys() <= {"text", "image", "images"}
    ):
        return str(answer.get("text") or ""), [*listed(answer.get("image")), *listed(answer.get("images"))]
    kinds = (
        {part.get("type") if isinstance(part, Mapping) else None for part in answer}
        if isinstance(answer, list)
        else set()
    )
    if kinds and kinds <= {"text", *IMAGE_PARTS}:
        texts = [str(part.get("text")) for part in answer if part["type"] == "text"]
        return "".join(texts), [part for part in answer if part["type"] != "text"]
    if hasattr(answer, "convert") or (isinstance(answer, np.ndarray) and answer.ndim == 3):
        return "", [answer]
    return str(answer), []


def message_content(text: str, num_images: int) -> str | list[dict[str, Any]]:
    """The content of a message: images, then the text."""
    if not num_images:
        return text
    return [*({"type": "image"} for _ in range(num_images)), *([{"type": "text", "text": text}] if text else [])]


def content_text(content: object) -> str:
    """A content as text, in which <image> stands for an image."""
    if not isinstance(content, list):
        return str(content or "")
    return "".join(str(part.get("text", "")) if part.get("type") == "text" else "<image>" for part in content)
