"""Images and videos that tools, environments and agents add to an episode: read within the limits of rows, and stored for a
repetition.

An image is a file `episodes/images/DIGEST.png` of the run folder, a video DIGEST.clip. The journal has the digest, so a step
that is taken again has the same pixels.
"""

import asyncio
import os
from collections.abc import Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np

from verl.data.images import ImageEncoder, as_file, listed
from verl.data.pictures import read_image
from verl.data.schema import IMAGE_PARTS, MEDIA_PARTS, VIDEO_PARTS, no_media
from verl.data_proto.media import Clip, Media, VideoSource
from verl.errors import DataError
from verl.regular_files import whole_file
from verl.tools.schemas import ToolResponse

FOLDER = "images"  # within the folder of the journal
_FIELDS = {"image", "images", "video", "videos"}


class EpisodeImages:
    """Reads images with `encoder` (None: the model or the engine reads none) and stores them in `folder` (None: nowhere)."""

    def __init__(self, encoder: ImageEncoder | None, folder: Path | None):
        from verl.parallel import serialize  # it imports torch, without use in processes of tools

        self.encoder, self.folder = encoder, None if folder is None else folder / FOLDER
        self._serialize = serialize

    @property
    def tokens(self) -> tuple[str, ...]:
        """The texts that stand for an image and for a video in rendered messages."""
        return () if self.encoder is None else self.encoder.processor.tokens

    @property
    def marks(self) -> dict[str, int]:
        """Text -> id of the tokens that stand for parts of images."""
        return {} if self.encoder is None else self.encoder.processor.marks

    async def read(self, sources: Sequence[Any], place: str) -> list[Media]:
        """Media of each image, read on a thread; Media stay as they are. Raises DataError beginning with `place`."""
        if all(isinstance(source, Media) for source in sources):
            return list(sources)
        return await asyncio.to_thread(self._read_all, sources, place)

    async def stored(self, digests: Sequence[str]) -> list[Media]:
        """Images that the journal names. Raises DataError for a file that is gone."""
        return [await asyncio.to_thread(self.of_journal, digest) for digest in digests]

    def of_journal(self, digest: str) -> Media:
        """An image that the journal names. Raises DataError for a file that is gone."""
        place, clip = "An episode of the journal", Path(f"{self.folder}/{digest}.clip")
        if not clip.exists():
            return self._read(f"{self.folder}/{digest}.png", place, 0)
        stored: Clip = self._serialize.from_bytes(clip.read_bytes())
        return self._read(replace(stored, frames=tuple(read_image(frame, place) for frame in stored.frames)), place, 0)

    def _read_all(self, sources: Sequence[object], place: str) -> list[Media]:
        return [
            source if isinstance(source, Media) else self._read(source, place, number)
            for number, source in enumerate(sources)
        ]

    def _read(self, source: object, place: str, number: int) -> Media:
        if self.encoder is None:
            raise DataError(no_media("images", f"{place}: image {number}"))
        item = source if isinstance(source, Clip) else self.encoder.opened(source, place, number)
        media = self.encoder.encode([item], place).media
        ending = "clip" if isinstance(item, Clip) else "png"
        if self.folder is not None and not (file := self.folder / f"{media.digest}.{ending}").exists():
            self.folder.mkdir(parents=True, exist_ok=True)
            content = as_file(item)
            # another process may write the same image
            with whole_file(file) as temporary, temporary.open("wb") as opened:
                opened.write(self._serialize.to_bytes(content) if isinstance(content, Clip) else content)
                opened.flush()
                os.fsync(opened.fileno())
        return media


def text_and_images(answer: Any) -> tuple[str, list[object]]:
    """The text of what a tool or an environment returned, and its images, then its videos: of a ToolResponse, an object with
    text and image, images, video or videos, a list of parts, a picture, or an array of pixels. Anything else is a text."""
    if isinstance(answer, ToolResponse):
        return answer.text or "", [*listed(answer.image), *map(VideoSource, listed(answer.video))]
    if isinstance(answer, Mapping) and answer.keys() & _FIELDS and answer.keys() <= {"text", *_FIELDS}:
        images = [*listed(answer.get("image")), *listed(answer.get("images"))]
        videos = [video for video in (answer.get("video"), *listed(answer.get("videos"))) if video is not None]
        return str(answer.get("text") or ""), [*images, *map(VideoSource, videos)]
    parts = answer if isinstance(answer, list) else []
    kinds = {part.get("type") if isinstance(part, Mapping) else None for part in parts}
    if kinds and kinds <= {"text", *MEDIA_PARTS}:
        texts = [str(part.get("text")) for part in answer if part["type"] == "text"]
        videos = [VideoSource(part) for part in answer if part["type"] in VIDEO_PARTS]
        return "".join(texts), [*(part for part in answer if part["type"] in IMAGE_PARTS), *videos]
    if isinstance(answer, np.ndarray) and answer.ndim == 4:
        return "", [VideoSource(answer)]
    if hasattr(answer, "convert") or (isinstance(answer, np.ndarray) and answer.ndim == 3):
        return "", [answer]
    return str(answer), []


def message_content(text: str, media: Sequence[Media]) -> str | list[dict[str, Any]]:
    """The content of a message: images, then the text."""
    if not media:
        return text
    parts = [{"type": kind} for images in media for kind in images.kinds]
    return [*parts, *([{"type": "text", "text": text}] if text else [])]


def content_text(content: object) -> str:
    """A content as text, with <image> in place of an image, and <video> in place of a video."""
    if not isinstance(content, list):
        return str(content or "")
    marks = {"text": "", **dict.fromkeys(VIDEO_PARTS, "<video>")}
    return "".join(marks.get(part.get("type"), "<image>") or str(part.get("text", "")) for part in content)
