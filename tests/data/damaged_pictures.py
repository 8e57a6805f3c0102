"""Pictures of every mode and format, whole and damaged, for the fuzzer: pixels or one sentence."""

import io
import warnings

import numpy as np
from PIL import Image

from verl.data.pictures import read_image
from verl.errors import DataError

FORMATS = {
    "PNG": ("1", "L", "LA", "P", "RGB", "RGBA", "I;16"),
    "JPEG": ("L", "RGB", "CMYK"),
    "WEBP": ("RGB", "RGBA"),
    "BMP": ("1", "L", "P", "RGB", "RGBA"),
    "GIF": ("1", "L", "P", "RGB", "RGBA"),
    "TIFF": ("1", "L", "LA", "P", "RGB", "RGBA", "CMYK", "LAB", "YCbCr", "I;16", "I", "F"),
    "MPO": ("RGB",),
}
WITHOUT_WHITE = ("I", "F", "LAB")
DAMAGE = ("whole", "cut", "bytes", "zeros")


def picture_of(mode, rng, size=(23, 17)):
    """A picture of noise."""
    noise = np.random.default_rng(rng.randrange(1 << 30)).integers(0, 256, (size[1], size[0], 4), dtype=np.uint8)
    if mode in ("I;16", "I", "F"):
        wide = noise[..., 0].astype({"I;16": np.uint16, "I": np.int32, "F": np.float32}[mode]) * 257
        return Image.fromarray(wide)
    if mode == "LAB":
        return Image.frombytes("LAB", size, noise[..., :3].tobytes())
    return Image.fromarray(noise).convert(mode)


def file_of(kind, mode, rng):
    """The bytes of a picture, at random with an orientation; an MPO and an animation have several."""
    picture, exif = picture_of(mode, rng), Image.Exif()
    exif[0x0112] = rng.randrange(12)
    settings = {"exif": exif} if kind in ("PNG", "JPEG", "WEBP", "TIFF") and rng.random() < 0.3 else {}
    if kind == "MPO" or (kind in ("GIF", "TIFF", "PNG", "WEBP") and rng.random() < 0.3):
        frames = [picture_of(mode, rng) for _ in range(rng.randrange(1, 4))]
        settings |= {"save_all": True, "append_images": frames}
    buffer = io.BytesIO()
    picture.save(buffer, kind, **settings)
    return buffer.getvalue()


def damaged(content, how, rng):
    if how == "cut":
        return content[: rng.randrange(len(content))]
    if how == "bytes":
        changed = bytearray(content)
        for _ in range(rng.randrange(1, 8)):
            changed[rng.randrange(len(changed))] = rng.randrange(256)
        return bytes(changed)
    if how == "zeros":
        start = rng.randrange(len(content))
        return content[:start] + bytes(min(rng.randrange(1, 40), len(content) - start)) + content[start + 40 :]
    return content


def cases(rng, count, folder):
    """Files of pictures: RGB without entries of the file, or a sentence."""
    warnings.simplefilter("ignore")  # of Pillow, about damage that it passes over
    for _ in range(count):
        kind, how = rng.choice(list(FORMATS)), rng.choice(DAMAGE)
        mode = rng.choice(FORMATS[kind])
        content = damaged(file_of(kind, mode, rng), how, rng)
        try:
            image = read_image(content, "row 0: image 0")
        except DataError as error:
            image, sentence = None, str(error)
        if image is None:
            assert sentence.startswith("row 0: image 0"), (kind, mode, how, sentence)
            assert "\n" not in sentence, (kind, mode, how, sentence)
        else:
            assert (image.mode, image.info) == ("RGB", {}), (kind, mode, how)
            assert how != "whole" or mode not in WITHOUT_WHITE, (kind, mode)
        yield f"{kind}, {how}", "refused" if image is None else "read"
