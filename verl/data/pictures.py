"""Pictures and videos of rows: from objects, paths, file URLs and data URLs, up to a size.

    {"prompt": [{"role": "user", "content": "<video>What happens?"}], "videos": [{"video": "fall.mp4", "fps": 1}]}

PyAV decodes video files. Frames at equal distances are read: `nframes` of them, or `fps` in a second, at least
`min_frames` and at most `max_frames`, as qwen-vl-utils 0.0.14 chooses them. A list of frames has `fps` of them in a second.
"""

from __future__ import annotations

import base64
import binascii
import hashlib
import io
from collections.abc import Collection, Iterator, Mapping
from contextlib import contextmanager
from contextvars import ContextVar
from typing import TYPE_CHECKING, Any, cast
from urllib.parse import unquote, urlparse

import numpy as np

from verl.data.rgb import as_shown, orientation_of, upright
from verl.data.schema import SOURCES, at, number_in
from verl.data_proto.media import SAMPLING, Clip, VideoSource
from verl.errors import DataError, MissingExtraError, nearest
from verl.foreign_text import clean, quoted
from verl.models.content import digest_of_text
from verl.regular_files import require_regular

if TYPE_CHECKING:
    from PIL import Image


MAX_BYTES = 64 << 20  # of an image file
MAX_PIXELS = 1 << 26  # 8192 x 8192
_FORMATS = ("PNG", "JPEG", "WEBP", "BMP", "GIF", "TIFF")

_read: ContextVar[dict[str, str] | None] = ContextVar("read", default=None)


@contextmanager
def pictures_noted(inputs: dict[str, str], key: str) -> Iterator[None]:
    """Add to `inputs` the digest of files and PIL pictures that the block reads, each once, under their number and `key`."""
    token = _read.set(pictures := dict[str, str]())
    try:
        yield
    finally:
        _read.reset(token)
    if pictures:
        inputs[f"{len(pictures)} pictures of {key}"] = digest_of_text(*pictures.values())


def _note(content: bytes, name: str = "") -> None:
    if (pictures := _read.get()) is not None:
        digest = hashlib.sha256(content).hexdigest()
        pictures[name or digest] = digest


def read_image(source: object, place: str) -> Image.Image:
    """The picture at `source`, also an array, as a PIL image in RGB (verl/data/rgb.py). Raises DataError beginning with
    `place`, for an unknown source, a file that is no image or is damaged, and a size beyond MAX_BYTES and MAX_PIXELS."""
    try:
        from PIL import Image
    except ImportError as error:
        raise MissingExtraError("Reading images", "pillow", "pillow") from error
    if isinstance(source, np.ndarray):
        channels = source.shape[2:]
        if source.dtype != np.uint8 or source.ndim not in (2, 3) or channels not in ((), (3,), (4,)):
            raise DataError(
                f"{place} is an array of {source.dtype} and shape {source.shape}; give uint8 [height, width, 3], with a fourth "
                "channel for alpha, [height, width] for grey, or a picture."
            )
        picture: Image.Image = Image.fromarray(source)
    elif isinstance(source, Image.Image):
        picture = source
        _note(picture.tobytes())
    else:
        content = bytes_at(source, place, MAX_BYTES)
        try:
            picture = Image.open(io.BytesIO(content), formats=_FORMATS)
        except Image.DecompressionBombError as error:
            raise DataError(f"{place} has more than {MAX_PIXELS:,} pixels; make it smaller.") from error
        except Exception as error:  # of a codec, for bytes that it does not expect
            raise DataError(f"{place} is no image that can be read ({', '.join(_FORMATS)}). Write it again.") from error
    if not 0 < picture.width * picture.height <= MAX_PIXELS:
        raise DataError(
            f"{place} has {picture.width} x {picture.height} pixels, not between 1 and {MAX_PIXELS:,}; change its size."
        )
    try:
        # the pictures behind the first of an MPO, as phones write them, are its previews, depths and gain maps
        num_frames = 1 if picture.format == "MPO" else getattr(picture, "n_frames", 1)
        if num_frames > 1:
            raise DataError(f"{place} has {num_frames} frames; give one picture.")
        return as_shown(picture, place)
    except DataError:
        raise
    except Exception as error:  # of a codec, for a file that ends early or is damaged
        raise DataError(f"{place} is damaged ({type(error).__name__}: {clean(error)}). Write it again.") from error


def image_text(source: object, place: str) -> str:
    """The path or URL of an image, or its bytes as a data URL, for a row in JSON. Raises DataError as read_image."""
    source = innermost_source(source, place)
    if isinstance(source, str):
        return source
    if hasattr(source, "save") or isinstance(source, np.ndarray):
        source = png(read_image(source, place))
    return "data:;base64," + base64.b64encode(bytes_at(source, place, MAX_BYTES)).decode()


def png(picture: Image.Image) -> bytes:
    file = io.BytesIO()
    picture.save(file, "PNG", compress_level=1)
    return file.getvalue()


def innermost_source(source: object, place: str) -> object:
    """The innermost value of an object: a path, URL, bytes, picture or list. Raises DataError beginning with `place`."""
    while isinstance(source, Mapping):
        entries = {name: source[name] for name in SOURCES if source.get(name) is not None}
        if not entries:
            raise DataError(f"{place} is an object without image, video, bytes, path or url; give one of them.")
        source = entries.get("bytes", next(iter(entries.values())))
    return source


def bytes_at(source: object, place: str, max_bytes: int) -> bytes:
    """The bytes of a file. Raises DataError beginning with `place`, also for more than `max_bytes`."""
    source = innermost_source(source, place)
    if isinstance(source, str):
        return _named(source, place, max_bytes)
    if not isinstance(source, bytes | bytearray | memoryview):
        raise DataError(
            f"{place} is {quoted(source, 40)}, a {type(source).__name__}; give a picture, bytes, a path, or a file or data URL."
        )
    return _limited(bytes(source), place, max_bytes)


def _named(name: str, place: str, max_bytes: int) -> bytes:
    kind, _, rest = name.partition(":")
    if kind == "data":
        return _data_url(rest, place, max_bytes)
    if kind in ("http", "https", "s3", "gs", "hdfs"):
        raise DataError(f"{place} is at {quoted(name, 80)}, and nothing is downloaded. Save it, and give its path.")
    path = unquote(urlparse(name).path) if kind == "file" else name
    file = require_regular(path, f"{place}: the file", DataError, "Give the path of an image or a video.")
    with file.open("rb") as opened:
        content = _limited(opened.read(max_bytes + 1), place, max_bytes)
    _note(content, name)
    return content


def _data_url(rest: str, place: str, max_bytes: int) -> bytes:
    head, comma, text = rest.partition(",")
    if not comma or not head.endswith(";base64"):
        raise DataError(f"{place} is a data URL without base64; write data:image/png;base64, and the bytes.")
    try:
        # lines of 76 characters, as mail and many tools write base64
        return _limited(base64.b64decode("".join(text.split()), validate=True), place, max_bytes)
    except (binascii.Error, ValueError) as error:
        raise DataError(f"{place} is a data URL whose base64 is damaged ({clean(error)}). Encode it again.") from error


def _limited(content: bytes, place: str, max_bytes: int) -> bytes:
    if not content:
        raise DataError(f"{place} is empty. Give the bytes of an image or a video.")
    if len(content) > max_bytes:
        raise DataError(f"{place} has more than {max_bytes:,} bytes. Store it smaller.")
    return content


LIMITS = ("min_pixels", "max_pixels")
MAX_VIDEO_BYTES = 1 << 30  # of a file
MAX_FRAMES = 1 << 18  # of a file: two hours of 30 frames a second
MAX_TOTAL_PIXELS = 1 << 29  # of the frames that are read
_SEQUENCE = "data:video/jpeg;base64,"  # frames with commas between them, as services of vLLM read them
# what the demuxers of these containers read is in the file itself; playlists name other files
_VIDEO_FORMATS = "mov,mp4,m4a,3gp,3g2,mj2,matroska,webm,avi,mpegts,mpeg,flv,ogg,gif,asf"


def read_clip(source: VideoSource, defaults: Mapping[str, Any], place: str, step: int) -> Clip:
    """Frames of a video, by its settings or `defaults` of SAMPLING; their number is a multiple of `step` if there are
    enough. With a step of 1 frames are images without limits of pixels. Raises DataError beginning with `place`."""
    value, settings = _settings(source, place, LIMITS if step > 1 else ())
    rule = {name: settings.get(name, defaults.get(name, value)) for name, value in SAMPLING.items()}
    if "fps" in settings:
        rule["nframes"] = 0  # of the defaults
    if isinstance(value, str) and value.startswith(_SEQUENCE):
        value = [_SEQUENCE.replace("video", "image") + frame for frame in value.removeprefix(_SEQUENCE).split(",")]
    if isinstance(value, list | tuple | np.ndarray):
        frames = [read_image(frame, f"{place}: frame {number}") for number, frame in enumerate(value)]
        numbers, num_frames, fps = list(range(len(frames))), len(frames), float(rule["fps"])
    else:
        frames, numbers, num_frames, fps = _decoded(bytes_at(value, place, MAX_VIDEO_BYTES), rule, step, place)
    if not frames:
        raise DataError(f"{place} has no frames. Give at least one.")
    if len(sizes := {frame.size for frame in frames}) > 1:
        raise DataError(f"{place} has frames of the sizes {sorted(sizes)}; give all of them one size.")
    _require_fits(len(frames), frames[0].width, frames[0].height, place)
    return Clip(
        tuple(frames), tuple(numbers), num_frames, fps, {name: settings[name] for name in LIMITS if name in settings}
    )


def video_entry(source: VideoSource, place: str) -> dict[str, object]:
    """A video for a row in JSON: its path, URL or frames, or its bytes as a data URL, with its settings. Raises DataError."""
    value, settings = _settings(source, place, LIMITS)
    is_list = isinstance(value, list | tuple | np.ndarray)
    return {"video": [image_text(frame, place) for frame in value] if is_list else image_text(value, place), **settings}


def _settings(source: VideoSource, place: str, limits: Collection[str]) -> tuple[Any, dict[str, float]]:
    """The video, and the settings that stand next to it: of SAMPLING, and `limits`."""
    names, entries = {*SAMPLING, *limits}, source.value if isinstance(source.value, Mapping) else {}
    settings = {name: v for name, v in entries.items() if v is not None and name not in (*SOURCES, "type")}
    with at(place):
        for name in settings:
            if name not in names:
                hint = nearest(name, names) or f"; it can have {', '.join(sorted(names))}."
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
    # a file cannot have other files read by naming them
    options = {"format_whitelist": _VIDEO_FORMATS, "protocol_whitelist": ""}
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
    """Numbers of the frames to read of a video with `num_frames` frames, `fps` in a second, by a rule of SAMPLING.

    Of 4 s of 25 frames with fps 2 the frames 0, 14, 28, ... 99."""
    if rule["nframes"]:
        count: float = max(1, round(rule["nframes"] / step)) * step
    else:
        count = max(rule["min_frames"], min(num_frames / fps * rule["fps"], rule["max_frames"]))
    num_chosen = max(1, int(min(count, num_frames)) // step * step)
    return cast("list[int]", np.linspace(0, num_frames - 1, num_chosen).round().astype(int).tolist())


def _frames_at(container: Any, numbers: Collection[int], place: str) -> Iterator[Image.Image]:
    chosen, last = set(numbers), max(numbers)
    for number, frame in enumerate(container.decode(video=0)):
        _require_fits(len(chosen), frame.width, frame.height, place)
        if number in chosen:
            yield _shown_frame(frame, place)
        if number == last:
            return


def _shown_frame(frame: Any, place: str) -> Image.Image:
    """A frame of PyAV as players show it: on white if it has alpha, turned and mirrored by its display matrix."""
    from PIL import Image

    has_alpha = any(component.is_alpha for component in frame.format.components)
    picture = Image.fromarray(frame.to_ndarray(format="rgba")) if has_alpha else frame.to_image()
    matrix = next(
        (np.frombuffer(data, np.int32) for data in frame.side_data if data.type.name == "DISPLAYMATRIX"), None
    )
    orientation = 1 if matrix is None else orientation_of(matrix.reshape(3, 3))
    if orientation is None:
        raise DataError(f"{place} is turned by an angle that is no quarter of a turn. Write it upright.")
    return upright(as_shown(picture, place), orientation)
