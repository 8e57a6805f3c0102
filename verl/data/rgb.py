"""The pixels of a picture as viewers show it, in RGB of 8 bits: upright, on white, greys of 16 bits scaled.

Colour profiles and gain maps are not applied, as in transformers and qwen-vl-utils, so models are trained without them.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import numpy as np

from verl.errors import DataError

if TYPE_CHECKING:
    from PIL import Image


ORIENTATION, _DEPTH, _PHOTOMETRIC = 0x0112, 0x0102, 0x0106  # tags of EXIF and TIFF
_TURNS = {  # orientation of EXIF -> PIL.Image.Transpose
    2: "FLIP_LEFT_RIGHT", 3: "ROTATE_180", 4: "FLIP_TOP_BOTTOM", 5: "TRANSPOSE", 6: "ROTATE_270", 7: "TRANSVERSE",
    8: "ROTATE_90",
}  # fmt: skip
_STRAIGHT = {"La": "LA", "RGBa": "RGBA"}  # colours that are multiplied by alpha -> colours that are not
_FACTORS = {"L;2": 85, "L;4": 17, "RGB;16B": 1 / 256}  # layout of a PNG -> factor of its transparent colour to 8 bits


def as_shown(picture: Image.Image, place: str) -> Image.Image:
    """A picture in RGB, without entries of its file. Raises DataError beginning with `place`, for values without a known
    white, and what a codec raises for a damaged file."""
    _scale_transparent_color(picture)
    picture.load()
    turned = upright(picture, _orientation(picture))
    if turned.mode.startswith("I;16") or (turned.mode == "I" and picture.format == "PNG"):  # a PNG for Pillow before 11
        turned = _grey(turned, getattr(picture, "tag_v2", {}))
    elif turned.mode in ("I", "F", "LAB"):
        raise DataError(
            f"{place} has pixels of Pillow's mode {turned.mode} (I: 32-bit integers, F: floats); their white is unknown. "
            "Write it in RGB of 8 bits."
        )
    elif turned.has_transparency_data:
        turned = _on_white(turned)
    turned = turned.convert("RGB")
    turned.info = {}  # a reader of the result must not turn it once more
    return turned


def upright(picture: Image.Image, orientation: int) -> Image.Image:
    """The picture turned and mirrored from an orientation of EXIF."""
    from PIL import Image

    return picture.transpose(Image.Transpose[_TURNS[orientation]]) if orientation in _TURNS else picture


def orientation_of(matrix: Any) -> int | None:
    """The orientation of EXIF of a video's display matrix [3, 3]; None for an angle that is no quarter of a turn.

    A pixel at (x, y) is shown at (x, y) @ matrix[:2, :2]."""
    corner = np.asarray(matrix, float)[:2, :2]
    unit = corner / max(np.abs(corner).max(), 1)
    signs = tuple(np.rint(unit).astype(int).ravel().tolist())
    near = np.abs(unit - np.rint(unit)).max() < 0.02  # one degree
    quarters = {
        (1, 0, 0, 1): 1, (-1, 0, 0, 1): 2, (-1, 0, 0, -1): 3, (1, 0, 0, -1): 4, (0, 1, 1, 0): 5, (0, 1, -1, 0): 6,
        (0, -1, -1, 0): 7, (0, -1, 1, 0): 8,
    }  # fmt: skip
    return quarters.get(signs) if near else None


def _orientation(picture: Image.Image) -> int:
    try:
        return int(picture.getexif().get(ORIENTATION, 1))
    except Exception:  # noqa: BLE001 - a damaged entry says nothing, and the pixels are there
        return 1


def _scale_transparent_color(picture: Image.Image) -> None:
    """Scale the transparent colour of a PNG that is not loaded to 8 bits, as Pillow scales its pixels."""
    layout = next((tile[3] for tile in getattr(picture, "tile", ())), None)
    factor, color = _FACTORS.get(layout) if isinstance(layout, str) else None, picture.info.get("transparency")
    if factor is not None and color is not None:
        scaled = [int(value * factor) for value in np.atleast_1d(color)]
        picture.info["transparency"] = tuple(scaled) if len(scaled) > 1 else scaled[0]


def _grey(picture: Image.Image, tags: Any) -> Image.Image:
    """The upper 8 bits of a grey picture, as Pillow reads 16 bits of colours; a TIFF names its bits and its white."""
    from PIL import Image

    values = np.asarray(picture)
    (num_bits,) = tags.get(_DEPTH) or (16,)
    grey = (values >> (num_bits - 8)).astype(np.uint8)
    if tags.get(_PHOTOMETRIC) == 0:
        grey = 255 - grey
    if (transparent := picture.info.get("transparency")) is not None:
        grey[values == transparent] = 255
    return Image.fromarray(grey)


def _on_white(picture: Image.Image) -> Image.Image:
    from PIL import Image

    colors = picture.convert(_STRAIGHT.get(picture.mode, "RGBA")).convert("RGBA")
    white = Image.new("RGB", colors.size, "white")
    white.paste(colors, mask=colors.getchannel("A"))
    return white
