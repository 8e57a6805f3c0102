"""Pictures and frames of videos have the pixels that a viewer shows: turned, on white, with greys of 16 bits scaled."""

import io
import random
import struct
import zlib

import numpy as np
import pytest
from PIL import Image

from tests.data.damaged_pictures import cases, picture_of
from tests.data.media_rows import encoded, picture
from verl.data.pictures import VideoSource, read_clip, read_image
from verl.data.rgb import ORIENTATION, orientation_of
from verl.errors import DataError

PLACE = "train.jsonl, row 3: image 1"
LINES = np.full((8, 8, 4), (0, 0, 0, 0), np.uint8)  # black lines on transparent black, as paint programs write them
LINES[2] = (0, 0, 0, 255)
ON_WHITE = np.where(LINES[..., 3:] == 255, LINES[..., :3], 255)
CORNER = Image.fromarray(np.arange(0, 240, 10, dtype=np.uint8).reshape(4, 6))  # each turn of it is another picture
TURNS = {  # orientation -> the pixels as they are shown
    1: lambda a: a, 2: np.fliplr, 3: lambda a: np.rot90(a, 2), 4: np.flipud, 5: lambda a: a.T,
    6: lambda a: np.rot90(a, -1), 7: lambda a: np.rot90(a, 2).T, 8: np.rot90,
}  # fmt: skip


def shown(source):
    return np.asarray(read_image(source, PLACE))


def palette_lines():
    """`LINES` as a palette with a transparent colour."""
    image = Image.fromarray((LINES[..., 3] // 255).astype(np.uint8), "L").convert("P")
    image.putpalette([0, 0, 0, 0, 0, 0])
    return encoded(image, transparency=0)


def png_of(depth, color, row, width, *chunks):
    """A PNG of one row of bytes in a layout that Pillow does not write."""

    def chunk(name, data):
        return struct.pack(">I", len(data)) + name + data + struct.pack(">I", zlib.crc32(name + data))

    header = chunk(b"IHDR", struct.pack(">IIBBBBB", width, 1, depth, color, 0, 0, 0))
    body = b"".join(chunk(*entry) for entry in (*chunks, (b"IDAT", zlib.compress(b"\0" + row)), (b"IEND", b"")))
    return b"\x89PNG\r\n\x1a\n" + header + body


@pytest.mark.parametrize(
    "make",
    [
        lambda: encoded(Image.fromarray(LINES)),
        lambda: encoded(Image.fromarray(LINES).convert("LA")),
        palette_lines,
        lambda: encoded(Image.fromarray(LINES), "WEBP", lossless=True, exact=True),
        lambda: encoded(Image.fromarray(LINES), "TIFF"),
        lambda: encoded(Image.fromarray(LINES), "GIF"),
        lambda: LINES,
        lambda: Image.fromarray(LINES),
        lambda: Image.fromarray(LINES).convert("RGBa"),
        lambda: Image.fromarray(LINES).convert("LA").convert("La"),
    ],
    ids=["RGBA", "LA", "palette", "WebP", "TIFF", "GIF", "array", "picture", "premultiplied", "premultiplied grey"],
)
def test_transparent_pixels_are_white(make):
    assert np.array_equal(shown(make()), ON_WHITE)


def test_half_transparent_pixels_are_mixed_with_white():
    assert shown(np.full((1, 1, 4), (100, 0, 255, 128), np.uint8)).tolist() == [[[177, 127, 255]]]


@pytest.mark.parametrize(
    ("file", "expected"),
    [
        (png_of(2, 0, bytes([0b00011011]), 4, (b"tRNS", struct.pack(">H", 0))), [255, 85, 170, 255]),
        (png_of(2, 0, bytes([0b00011011]), 4, (b"tRNS", struct.pack(">H", 2))), [0, 85, 255, 255]),
        (png_of(4, 0, bytes([0x0C]), 2, (b"tRNS", struct.pack(">H", 12))), [0, 255]),
        (png_of(16, 0, bytes([0x12, 0x34, 0x99, 0]), 2, (b"tRNS", struct.pack(">H", 0x1234))), [255, 0x99]),
        (png_of(16, 2, bytes([0x12, 0x34] * 3), 1, (b"tRNS", struct.pack(">HHH", *[0x1234] * 3))), [255]),
        (png_of(16, 4, bytes([0, 0, 0, 0, 0x12, 0x34, 0xFF, 0xFF]), 2), [255, 0x12]),
    ],
)
def test_transparent_colors_of_other_depths_are_white(file, expected):
    assert shown(file)[0, :, 0].tolist() == expected


@pytest.mark.parametrize("kind", ["PNG", "TIFF"])
def test_greys_of_16_bits_have_their_upper_8(kind):
    ramp = np.arange(65536, dtype=np.uint16).reshape(256, 256)
    expected = np.repeat((ramp >> 8).astype(np.uint8)[..., None], 3, axis=2)
    assert np.array_equal(shown(encoded(Image.fromarray(ramp), kind)), expected)
    assert np.array_equal(shown(Image.fromarray(ramp)), expected)


def test_white_of_a_tiff_is_what_it_says():
    greys = Image.fromarray(np.array([[0, 65535, 0x1200]], np.uint16))
    file = encoded(greys, "TIFF").replace(
        struct.pack("<HHIHH", 262, 3, 1, 1, 0), struct.pack("<HHIHH", 262, 3, 1, 0, 0)
    )
    assert shown(file)[0, :, 0].tolist() == [255, 0, 0xFF - 0x12]


@pytest.mark.parametrize("mode", ["I", "F", "LAB"])
def test_pixels_without_a_known_white_are_refused(mode):
    image = picture_of(mode, random.Random(0))
    for source in (image, encoded(image, "TIFF")):
        with pytest.raises(
            DataError, match=rf"^{PLACE} has pixels of Pillow's mode {mode} .*Write it in RGB of 8 bits"
        ):
            read_image(source, PLACE)


@pytest.mark.parametrize("kind", ["JPEG", "PNG", "WEBP", "TIFF"])
@pytest.mark.parametrize("orientation", TURNS)
def test_a_picture_is_turned_as_its_file_says(orientation, kind):
    exif = Image.Exif()
    exif[ORIENTATION] = orientation
    exact = {"JPEG": {"quality": 100}, "WEBP": {"lossless": True}}.get(kind, {})
    file = encoded(CORNER.convert("RGB"), kind, exif=exif, **exact)
    opened = Image.open(io.BytesIO(file))
    expected = TURNS[orientation](np.asarray(CORNER)).astype(int)
    for source in (file, opened, read_image(file, PLACE)):
        pixels = shown(source)
        assert pixels.shape[:2] == expected.shape
        assert np.abs(pixels[..., 0] - expected).max() <= (2 if kind == "JPEG" else 0)


def test_a_damaged_orientation_leaves_the_picture():
    file = encoded(picture(), "JPEG", exif=b"Exif\0\0damage")
    assert shown(file).shape == (30, 40, 3)


def test_of_several_pictures_of_a_phone_the_first_is_read():
    first = picture(color=(10, 200, 30))
    file = encoded(first, "MPO", save_all=True, append_images=[picture(color=(0, 0, 0))])
    assert np.abs(shown(file).astype(int) - np.asarray(first)).max() < 5


@pytest.mark.parametrize("shape", [(3, 8, 8), (8, 8, 5), (8, 8, 1), (8, 8, 2), (0,), (8,), (2, 2, 2, 3)])
def test_an_array_of_another_shape_is_one_sentence(shape):
    with pytest.raises(DataError, match=rf"^{PLACE} is an array of uint8 and shape .*give uint8 .height, width, 3"):
        read_image(np.zeros(shape, np.uint8), PLACE)


@pytest.mark.parametrize("shape", [(0, 4, 3), (4, 0), (0, 0, 4)])
def test_a_picture_without_pixels_is_one_sentence(shape):
    for source in (np.zeros(shape, np.uint8), Image.new("RGB", shape[1::-1])):
        with pytest.raises(DataError, match=rf"^{PLACE} has \d x \d pixels"):
            read_image(source, PLACE)


@pytest.mark.parametrize("kind", ["GIF", "TIFF"])
def test_an_animation_that_ends_early_is_one_sentence(kind):
    frames = [picture_of("RGB", random.Random(n)) for n in range(5)]
    file = encoded(frames[0], kind, save_all=True, append_images=frames[1:])
    for end in range(8, len(file), 97):
        with pytest.raises(DataError, match=rf"^{PLACE} ") as caught:
            read_image(file[:end], PLACE)
        assert "\n" not in str(caught.value)


def test_base64_may_have_lines():
    import base64

    url = "data:image/png;base64," + base64.encodebytes(encoded()).decode().replace("\n", "\r\n")
    assert np.array_equal(shown(url), np.asarray(picture()))


def test_random_damage_gives_pixels_or_one_sentence(tmp_path):
    outcomes = {outcome for _, outcome in cases(random.Random(0), 300, tmp_path)}
    assert outcomes == {"read", "refused"}


@pytest.mark.parametrize(
    ("matrix", "expected"),
    [
        ([[1, 0], [0, 1]], 1), ([[-1, 0], [0, 1]], 2), ([[-1, 0], [0, -1]], 3), ([[1, 0], [0, -1]], 4),
        ([[0, 1], [1, 0]], 5), ([[0, 1], [-1, 0]], 6), ([[0, -1], [-1, 0]], 7), ([[0, -1], [1, 0]], 8),
        ([[0.7, 0.7], [-0.7, 0.7]], None), ([[0, 0], [0, 0]], None),
    ],
)  # fmt: skip
def test_the_orientation_of_a_display_matrix(matrix, expected):
    full = np.zeros((3, 3), np.int32)
    full[:2, :2] = np.array(matrix) * 65536
    assert orientation_of(full) == expected
    if expected is not None:  # the place of each corner of a picture
        values, shape = np.arange(6).reshape(2, 3), np.array([3, 2]) @ np.abs(np.array(matrix))
        placed = np.zeros(shape[::-1], int)
        for (y, x), value in np.ndenumerate(values):
            to = np.array([2 * x - 2, 2 * y - 1]) @ np.array(matrix)  # twice the distance from the middle
            placed[tuple((to[::-1] + shape[::-1] - 1) // 2)] = value
        assert np.array_equal(placed, TURNS[expected](values))


def encoded_clip(pixels, codec, pixel_format, container, change=lambda content: content):
    av = pytest.importorskip("av")
    file = io.BytesIO()
    with av.open(file, "w", format=container) as output:
        stream = output.add_stream(codec, rate=25)
        stream.height, stream.width = pixels.shape[:2]
        stream.pix_fmt = pixel_format
        for _ in range(4):
            frame = av.VideoFrame.from_ndarray(pixels, format="rgba" if pixels.shape[2] == 4 else "rgb24")
            output.mux(stream.encode(frame))
        output.mux(stream.encode())
    return read_clip(VideoSource(change(file.getvalue())), {}, "row 0: video 0", 2)


def rotated(*corner):
    """A change of the display matrix of an MP4 file's track."""
    straight = struct.pack(">9i", 1 << 16, 0, 0, 0, 1 << 16, 0, 0, 0, 1 << 30)
    matrix = [corner[0] << 16, corner[1] << 16, 0, corner[2] << 16, corner[3] << 16, 0, 0, 0, 1 << 30]

    def change(content):
        at = content.rindex(straight)  # the first is of the whole film
        return content[:at] + struct.pack(">9i", *matrix) + content[at + 36 :]

    return change


@pytest.mark.parametrize(("corner", "orientation"), [((0, 1, -1, 0), 6), ((-1, 0, 0, -1), 3), ((0, 1, 1, 0), 5)])
def test_frames_of_a_phone_are_turned(corner, orientation):
    pixels = np.repeat(np.kron(np.arange(6).reshape(2, 3) * 40, np.ones((16, 16)))[..., None], 3, 2).astype(np.uint8)
    clip = encoded_clip(pixels, "mpeg4", "yuv420p", "mp4", rotated(*corner))
    expected = TURNS[orientation](pixels[..., 0]).astype(int)
    assert clip.frames[0].size == expected.shape[::-1]
    assert np.abs(np.asarray(clip.frames[0])[..., 0] - expected).mean() < 8
    with pytest.raises(DataError, match="row 0: video 0 is turned by an angle that is no quarter"):
        encoded_clip(pixels, "mpeg4", "yuv420p", "mp4", rotated(1, 1, -1, 1))


@pytest.mark.parametrize(
    ("codec", "pixel_format", "container"), [("qtrle", "argb", "mov"), ("ffv1", "bgra", "matroska")]
)
def test_frames_with_alpha_lie_on_white(codec, pixel_format, container):
    clip = encoded_clip(np.tile(LINES, (4, 4, 1)), codec, pixel_format, container)
    assert np.array_equal(np.asarray(clip.frames[0]), np.tile(ON_WHITE, (4, 4, 1)))
