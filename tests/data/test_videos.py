"""Video files: which frames are read, and one sentence for each file that cannot be."""

import numpy as np
import pytest

from tests.data.media_rows import data_url
from verl.data import pictures
from verl.data.pictures import SAMPLING, VideoSource, read_clip, sampled, video_entry
from verl.errors import DataError

PLAYLISTS = (
    b"#EXTM3U\n#EXTINF:1,\nfile:///etc/passwd\n#EXT-X-ENDLIST\n",
    b"ffconcat version 1.0\nfile '/etc/passwd'\n",
)


@pytest.fixture
def video(tmp_path):
    av = pytest.importorskip("av")

    def write(container="mp4", **options):
        """A file of 50 frames of noise, 25 a second."""
        noise = np.random.default_rng(0)
        with av.open(str(tmp_path / "video"), "w", format=container, options=options) as output:
            stream = output.add_stream("mpeg4", rate=25)
            stream.width, stream.height = 64, 48
            for _ in range(50):
                pixels = noise.integers(0, 256, (48, 64, 3), dtype=np.uint8)
                output.mux(stream.encode(av.VideoFrame.from_ndarray(pixels, format="rgb24")))
            output.mux(stream.encode())
        return tmp_path / "video"

    return write


def clip_of(source, defaults=None):
    return read_clip(VideoSource(source), defaults or {}, "row 0: video 0", 2)


@pytest.mark.parametrize(
    ("num_frames", "rule", "expected"),
    [
        (100, {}, [0, 14, 28, 42, 57, 71, 85, 99]),  # 4 s, 2 a second
        (100, {"nframes": 4}, [0, 33, 66, 99]),
        (100, {"nframes": 7}, [0, 14, 28, 42, 57, 71, 85, 99]),
        (25, {}, [0, 8, 16, 24]),  # min_frames
        (1000, {"max_frames": 6}, [0, 200, 400, 599, 799, 999]),
        (3, {}, [0, 2]),
        (1, {}, [0]),
    ],
)
def test_frames_are_chosen_as_qwen_vl_utils_does(num_frames, rule, expected):
    assert sampled(num_frames, 25.0, {**SAMPLING, **rule}, 2) == expected


@pytest.mark.parametrize("container", ["mp4", "matroska", "avi", "mpegts"])
def test_the_chosen_frames_of_a_file_are_read(container, video):
    import av

    file = video(container)
    with av.open(str(file)) as opened:
        frames = [frame.to_ndarray(format="rgb24") for frame in opened.decode(video=0)]
    for source in (str(file), file.read_bytes(), {"video": file.as_uri(), "fps": 2.0}, data_url(file.read_bytes())):
        clip = clip_of(source)
        assert (clip.indices, clip.num_frames, clip.fps) == ((0, 16, 33, 49), 50, 25.0)
        assert all(np.array_equal(np.asarray(f), frames[n]) for n, f in zip(clip.indices, clip.frames, strict=True))


def test_settings_of_a_row_come_before_defaults(video):
    clip = clip_of({"video": str(video()), "fps": 4, "min_frames": 2, "max_pixels": 784}, {"nframes": 2, "fps": 1})
    assert (len(clip.frames), clip.limits) == (8, {"max_pixels": 784})
    assert len(clip_of(str(video()), {"nframes": 2}).frames) == 2
    assert video_entry(VideoSource({"video": "a.mp4", "fps": 2}), "row") == {"video": "a.mp4", "fps": 2.0}


def test_a_file_that_cannot_be_read_is_one_sentence(video):
    whole, indexed = video().read_bytes(), video(movflags="faststart").read_bytes()
    cases = [*((text, "no video that can be read") for text in (b"hello", whole[:2000], *PLAYLISTS))]
    for source, words in [*cases, (b"", "is empty"), (7, "is 7, a int"), (indexed[:-20000], "it ends within frame 17")]:
        with pytest.raises(DataError, match=rf"^row 0: video 0.*{words}") as caught:
            clip_of(source)
        assert "\n" not in str(caught.value)


@pytest.mark.parametrize(
    ("limit", "value", "words"),
    [
        ("MAX_VIDEO_BYTES", 100, "more than 100 bytes"),
        ("MAX_FRAMES", 10, "50 frames, not between 1 and 10"),
        ("MAX_TOTAL_PIXELS", 9999, "4 frames of 64 x 48 pixels"),
    ],
)
def test_a_video_beyond_a_limit_is_refused(limit, value, words, monkeypatch, video):
    monkeypatch.setattr(pictures, limit, value)
    with pytest.raises(DataError, match=words):
        clip_of(str(video()))
