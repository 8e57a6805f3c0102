"""Images and videos as a model reads them, and their places among tokens. Here and elsewhere, images are both.

    prompt                          response
    5 [img] [img] 7   |   11 12   8 [img] [img] 9   13        Media in tokens 1-2, and in 2-5 of the response

Images of a data row are one object, shared by all samples of its prompt. An episode can have further ones, in its own prompt
and between its turns.
"""

from __future__ import annotations

from collections import UserDict
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from functools import cached_property
from typing import TYPE_CHECKING, Any, TypeAlias

if TYPE_CHECKING:
    import numpy as np
    import torch

SAMPLING = {"fps": 2.0, "nframes": 0, "min_frames": 4, "max_frames": 768}  # frames that are read of a video


@dataclass(frozen=True)
class VideoSource:
    """A video of a row: a file or a list of frames, or an object with it and its settings."""

    value: Any


@dataclass(frozen=True)
class Clip:
    """Frames of a video: PIL pictures of one size (in ImageFiles: PNG files), and their numbers among the `num_frames` frames
    of the video, with `fps` frames in a second. `limits` are pixels of a frame (min_pixels, max_pixels)."""

    frames: tuple[Any, ...]
    indices: tuple[int, ...]
    num_frames: int
    fps: float
    limits: dict[str, float]


@dataclass(frozen=True)
class ImageFiles:
    """The images themselves as PNG files and Clips of PNG files, for an engine that has an image processor, and `arguments` of
    that processor."""

    contents: tuple[bytes | Clip, ...] = ()
    arguments: dict[str, Any] = field(default_factory=dict)
    token_ids: tuple[int, ...] = ()  # of the prompt, with the tokens that the engine puts in the place of theirs


class StoredTensors(UserDict[str, "torch.Tensor"]):
    """Tensors that lie in a store of several processes under `reference`; `get` and `unpack` read them, when one is first
    read."""

    def __init__(
        self,
        reference: object,
        get: Callable[..., list[np.ndarray]],
        unpack: Callable[[list[np.ndarray]], dict[str, torch.Tensor]],
    ):
        self.reference, self._get, self._unpack = reference, get, unpack

    @cached_property
    def data(self) -> dict[str, torch.Tensor]:  # type: ignore[override]
        return self._unpack(self.stored())

    def stored(self) -> list[np.ndarray]:
        """The object in the store: a document and its buffers."""
        return self._get(self.reference)


@dataclass(frozen=True, eq=False)
class Media:
    """Images that stand together. `tensors` are inputs of the model's forward by name, such as pixel_values and image_grid_thw,
    as its family's processor made them. `digest` names images and settings of the processor: Media of one digest are equal.
    `texts` stand for each in rendered messages, `kinds` are image or video, `thumbnails` are small pictures of them as data
    URLs, for people. `files` are the images themselves, if the rollout engine reads them.

        Media("9f2c...", {"pixel_values": [64, 1176], "image_grid_thw": [1, 3]}, texts=("<|image_pad|>...",))
    """

    digest: str
    tensors: Mapping[str, torch.Tensor]
    thumbnails: tuple[str, ...] = ()
    texts: tuple[str, ...] = ()
    kinds: tuple[str, ...] = ()
    files: ImageFiles | None = None

    def store(self, put: Callable[[Mapping[str, torch.Tensor]], StoredTensors]) -> None:
        """Have the tensors in a store in place of this process, unless they are there."""
        if not isinstance(self.tensors, StoredTensors):
            object.__setattr__(self, "tensors", put(self.tensors))

    def __eq__(self, other: object) -> bool:
        return isinstance(other, Media) and self.digest == other.digest

    def __hash__(self) -> int:
        return hash(self.digest)


@dataclass(frozen=True)
class MediaSpan:
    """Images in `length` tokens from `start` on. In a batch, places count from the first token of the response: below 0 they
    are in the prompt. In a request, they count from its first token."""

    start: int
    length: int
    media: Media

    def moved(self, by: int) -> MediaSpan:
        """The span `by` tokens later."""
        return MediaSpan(self.start + by, self.length, self.media)


Spans: TypeAlias = tuple[MediaSpan, ...]
RowMedia: TypeAlias = Media | Spans | None  # of a row: images somewhere in its prompt, or at their places


def images_in(media: RowMedia) -> list[Media]:
    """The images of a row in the order of its tokens."""
    if isinstance(media, tuple):
        return [span.media for span in media]
    return [] if media is None else [media]


def texts_of(media: Sequence[Media]) -> list[str]:
    """The texts that stand for images in rendered messages."""
    return [text for images in media for text in images.texts]
