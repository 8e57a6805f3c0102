"""Videos of rows: files, which PyAV decodes, and lists of frames.

    {"prompt": [{"role": "user", "content": "<video>What happens?"}], "videos": [{"video": "fall.mp4", "fps": 1}]}
    {"prompt": [{"role": "user", "content": [{"type": "video", "video": ["0.png", "1.png"]}, ...]}]}

Of a file, frames at equal distances are read: `nframes` of them, or `fps` in a second, at least `min_frames` and at most
`max_frames`, as qwen-vl-utils 0.0.14 chooses them. A list has its frames already, `fps` of them in a second.
"""

from __future__ import annotations

import io
from collections.abc import Collection, Iterator, Mapping
from typing import TYPE_CHECKING, Any

import numpy as np

from verl.data.pictures import MAX_PIXELS, bytes_at, image_text, innermost_source, read_image
from verl.data.schema import SOURCES, at, number_in
from verl.data_proto.media import SAMPLING, Clip, VideoSource
from verl.errors import DataError, MissingExtraError, nearest
from verl.foreign_text import clean, quoted

if TYPE_CHECKING:
    from PIL import Image

LIMITS = ("min_pixels", "max_pixels")
MAX_BYTES = 1 << 30  # of a file
MAX_FRAMES = 1 << 18  # of a file: two hours of 30 frames a second
MAX_TOTAL_PIXELS = 1 << 29  # of the frames that are read
_SEQUENCE = "data:video/jpeg;base64,"  # frames with commas between them, as services of vLLM read them
# what the demuxers of these containers read is in the file itself; playlists name other files
_FORMATS = "mov,mp4,m4a,3gp,3g2,mj2,matroska,webm,avi,mpegts,mpeg,flv,ogg,gif,asf"


def read_clip(source: VideoSource, defaults: Mapping[str, Any], place: str, step: int) -> Clip:
    """Frames of a video, by its settings or `defaults` of SAMPLING; their number is a multiple of `step` where there are
    enough. With a step of 1 frames are images, which have no limits of pixels.

    Raises DataError, which begins with `place`, for an unknown source or setting, a file that is no video or is damaged, frames
    of several sizes, and a video beyond the limits of this module.
    """
    value, own = _settings(source, place, LIMITS if step > 1 else ())
    rule = {name: own.get(name, defaults.get(name, value)) for name, value in SAMPLING.items()}
    if "fps" in own:
        rule["nframes"] = 0  # of the defaults
    if isinstance(value, str) and value.startswith(_SEQUENCE):
        value = [_SEQUENCE.replace("video", "image") + frame for frame in value.removeprefix(_SEQUENCE).split(",")]
    if isinstance(value, list | tuple | np.ndarray):
        frames = [read_image(frame, f"{place}: frame {number}") for number, frame in enumerate(value)]
        numbers, num_frames, fps = list(range(len(frames))), len(frames), float(rule["fps"])
    else:
        frames, numbers, num_frames, fps = _decoded(bytes_at(value, place, MAX_BYTES), rule, step, place)
    if not frames:
        raise DataError(f"{place} has no frames. Give at least one.")
    if len(sizes := {frame.size for frame in frames}) > 1:
        raise DataError(f"{place} has frames of the sizes {sorted(sizes)}; give all of them one size.")
    _require_fits(len(frames), frames[0].width, frames[0].height, place)
    return Clip(tuple(frames), tuple(numbers), num_frames, fps, {name: own[name] for name in LIMITS if name in own})


def video_entry(source: VideoSource, place: str) -> dict[str, object]:
    """A video for a row in JSON: its path, URL or frames, or its bytes as a data URL, with its settings. Raises DataError."""
    value, settings = _settings(source, place, LIMITS)
    is_list = isinstance(value, list | tuple | np.ndarray)
    return {"video": [image_text(frame, place) for frame in value] if is_list else image_text(value, place), **settings}


def _settings(source: VideoSource, place: str, limits: Collection[str]) -> tuple[Any, dict[str, float]]:
    """The video, and the settings that stand next to it: of SAMPLING, and `limits`."""
    known, entries = {*SAMPLING, *limits}, source.value if isinstance(source.value, Mapping) else {}
    settings = {name: v for name, v in entries.items() if v is not None and name not in (*SOURCES, "type")}
    with at(place):
        for name in settings:
            if name not in known:
                hint = nearest(name, known) or f"; it can have {', '.join(sorted(known))}."
                raise DataError(f"a video has no setting {quoted(name)}{hint}")
            settings[name] = number_in(settings[name], name)
            if settings[name] <= 0:
                raise DataError(f"{name} of a video is {settings[name]:g}; it must be above 0.")
        if "fps" in settings and "nframes" in settings:
            raise DataError("a video has fps and nframes. Give one of them.")
    return innermost_source(source.value, place), settings


def _require_fits(num_frames: int, width: int, height: int, place: str) -> None:
    if width * height > MAX_PIXELS or num_frames * width * height > MAX_TOTAL_PIXELS:
        raise DataError(
            f"{place} has {num_frames} frames of {width} x {height} pixels, more than {MAX_TOTAL_PIXELS:,}. Set nframes, or "
            "make it smaller."
        )


def _decoded(
    content: bytes, rule: Mapping[str, float], step: int, place: str
) -> tuple[list[Image.Image], list[int], int, float]:
    """Frames of a file as PIL pictures, their numbers, and the number and rate of all frames."""
    try:
        import av
    except ImportError as error:
        raise MissingExtraError("Reading video files", "video", "av") from error
    # a file cannot name others that would be read
    options = {"format_whitelist": _FORMATS, "protocol_whitelist": ""}
    try:
        with av.open(io.BytesIO(content), options=options) as container:
            stream = container.streams.video[0]
            packets = [packet.is_corrupt for packet in container.demux(stream) if packet.size]
            num_frames = len(packets)
            fps = float(stream.average_rate or stream.guessed_rate or 0)
        if any(packets):
            raise DataError(f"{place} is damaged: it ends within frame {packets.index(True)}. Write it again.")
        if not 0 < num_frames <= MAX_FRAMES or not fps:
            raise DataError(f"{place} has {num_frames:,} frames, not between 1 and {MAX_FRAMES:,}. Cut it.")
        numbers = sampled(num_frames, fps, rule, step)
        with av.open(io.BytesIO(content), options=options) as container:
            frames = list(_frames_at(container, numbers, place))
    except DataError:
        raise
    except Exception as error:  # of a demuxer or codec, for bytes that it does not expect
        raise DataError(f"{place} is no video that can be read ({clean(error)}). Write it again.") from error
    if len(frames) < len(numbers):
        raise DataError(f"{place} is damaged: it ends before frame {numbers[-1]} of {num_frames}. Write it again.")
    return frames, numbers, num_frames, fps


def sampled(num_frames: int, fps: float, rule: Mapping[str, float], step: int) -> list[int]:
    """Numbers of the frames that are read of `num_frames`, of which a second has `fps`, by a rule of SAMPLING.

    (4 s of 25 frames, fps 2) -> 8 frames: 0, 14, 28, ... 99
    """
    if rule["nframes"]:
        count: float = max(1, round(rule["nframes"] / step)) * step
    else:
        count = max(rule["min_frames"], min(num_frames / fps * rule["fps"], rule["max_frames"]))
    whole = max(1, int(min(count, num_frames)) // step * step)
    numbers: list[int] = np.linspace(0, num_frames - 1, whole).round().astype(int).tolist()
    return numbers


def _frames_at(container: Any, numbers: Collection[int], place: str) -> Iterator[Image.Image]:
    chosen, last = set(numbers), max(numbers)
    for number, frame in enumerate(container.decode(video=0)):
        _require_fits(len(chosen), frame.width, frame.height, place)
        if number in chosen:
            yield frame.to_image().convert("RGB")
        if number == last:
            return
