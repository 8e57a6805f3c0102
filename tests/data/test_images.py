"""Rows with images and video files: the forms that they are read in, which frames are read, and one sentence for each malformed
row and each file that cannot be read."""

import numpy as np
import pytest

from tests.data.media_rows import (
    MALFORMED,
    SFT_MALFORMED,
    UNREADABLE,
    data_url,
    encoded,
    picture,
    row,
    sft_row,
    written,
)
from tests.vision_families import IMAGE
from verl.config import DataConfig
from verl.config.sections.data import PreferenceDataConfig, SFTDataConfig
from verl.data import pictures
from verl.data.conversations.dataset import load_conversations
from verl.data.dataset import load_dataset
from verl.data.images import image_messages
from verl.data.loader import PromptLoader
from verl.data.order import PromptOrder
from verl.data.pictures import SAMPLING, VideoSource, read_clip, read_image, sampled, video_entry
from verl.data.preferences.dataset import load_preferences
from verl.data.prompts import PromptEncoder
from verl.errors import ConfigError, DataError
from verl.models.load import load_tokenizer


@pytest.fixture(scope="module")
def tokenizer(folder_of):
    return load_tokenizer(folder_of("qwen2_vl"))


FORMS = {
    "picture": lambda path: picture(),
    "bytes": lambda path: encoded(),
    "object of bytes": lambda path: {"bytes": encoded(), "path": None},
    "object of a path": lambda path: {"path": str(path)},
    "object of an image": lambda path: {"image": str(path)},
    "nested objects": lambda path: {"image_url": {"url": data_url(encoded())}},
    "path": str,
    "file URL": lambda path: path.as_uri(),
    "data URL": lambda path: data_url(encoded()),
    "other format": lambda path: encoded(kind="BMP"),
    "palette": lambda path: encoded(picture().quantize(4)),
    "alpha": lambda path: encoded(picture().convert("RGBA")),
}


@pytest.mark.parametrize("form", FORMS)
def test_every_form_gives_the_same_pixels(form, tmp_path):
    file = tmp_path / "a picture.png"
    file.write_bytes(encoded())
    image = read_image(FORMS[form](file), "row 0: image 0")
    assert image.mode == "RGB"
    assert np.array_equal(np.asarray(image), np.asarray(picture()))


@pytest.mark.parametrize("name", UNREADABLE)
def test_an_image_that_cannot_be_read_is_one_sentence(name, tmp_path):
    make, words = UNREADABLE[name]
    with pytest.raises(DataError, match=words) as caught:
        read_image(make(tmp_path), "train.jsonl, row 3: image 1")
    assert str(caught.value).startswith("train.jsonl, row 3: image 1")
    assert "\n" not in str(caught.value)


def test_a_file_beyond_the_limit_of_bytes_is_refused(tmp_path, monkeypatch):
    monkeypatch.setattr(pictures, "MAX_BYTES", 100)
    file = tmp_path / "large.png"
    file.write_bytes(encoded(picture(300, 300)))
    for source in (str(file), file.read_bytes()):
        with pytest.raises(DataError, match="more than 100 bytes"):
            read_image(source, "row 0: image 0")


@pytest.mark.parametrize("name", MALFORMED)
def test_a_malformed_row_is_one_sentence_before_training(name, tokenizer, tmp_path):
    bad, words = MALFORMED[name]
    with pytest.raises(DataError, match=words) as caught:
        load_dataset(written(tmp_path, row("Plain?"), bad), tokenizer, DataConfig())
    assert "rows.jsonl, row 1" in str(caught.value)
    assert "\n" not in str(caught.value)


def test_images_for_a_text_model_are_refused(tmp_path, tiny_llama):
    file = written(tmp_path, row(images=[data_url(encoded())]))
    with pytest.raises(DataError, match="images .field 'images'. cannot be read"):
        load_dataset(file, load_tokenizer(tiny_llama), DataConfig())


def test_placeholders_and_parts_say_the_same(tokenizer, tmp_path):
    one, other = encoded(), encoded(picture(80, 30))
    rows = [
        row("<image>A<image>B", images=[data_url(one), data_url(other)]),
        row(
            [{"type": "image", "image": data_url(one)}, {"type": "text", "text": "A<image>B"}], images=[data_url(other)]
        ),
        row(
            [
                {"type": "image_url", "image_url": {"url": data_url(one)}},
                {"type": "text", "text": "A"},
                {"type": "image", "image": data_url(other)},
                {"type": "text", "text": "B"},
            ]
        ),
    ]
    data = load_dataset(written(tmp_path, *rows), tokenizer, DataConfig())
    batch = PromptLoader(data, PromptEncoder(tokenizer, DataConfig()), PromptOrder(3, 0, False), 3).take(0, 3)
    ids, media = batch.non_tensor_batch["prompt_token_ids"], batch.non_tensor_batch["media"]
    assert ids[0] == ids[1] == ids[2]
    assert media[0] == media[1] == media[2]
    assert media[0].tensors["image_grid_thw"].tolist() == [[1, 2, 2], [1, 2, 6]]
    assert ids[0].count(IMAGE) == 1 + 3
    assert "images" not in batch.non_tensor_batch


def test_samples_of_a_prompt_share_one_object(tokenizer, tmp_path):
    data = load_dataset(written(tmp_path, row(images=[data_url(encoded())])), tokenizer, DataConfig())
    batch = PromptLoader(data, PromptEncoder(tokenizer, DataConfig()), PromptOrder(1, 0, False), 1).take(0, 1)
    media = batch.repeat(8, interleave=True).non_tensor_batch["media"]
    assert len(media) == 8
    assert len({id(item) for item in media}) == 1


def test_rows_with_images_are_read_at_each_start(tokenizer, tmp_path, monkeypatch):
    """The key of the cache has no content of image files."""
    monkeypatch.setattr("verl.data.scan.NUM_AT_ONCE", 1)
    monkeypatch.setenv("VERL_DATA_CACHE", str(tmp_path / "cache"))
    image = tmp_path / "dots.png"
    image.write_bytes(encoded())
    file = written(tmp_path, row("Plain?"), row("Plain?"), row(images=[str(image)]))
    for settings in (DataConfig(check="all"), DataConfig(filter_overlong_prompts=True)):
        assert load_dataset(file, tokenizer, settings).has_images
    image.write_bytes(b"damaged")
    for settings in (DataConfig(check="all"), DataConfig(filter_overlong_prompts=True)):
        with pytest.raises(DataError, match="row 2.*no image that can be read"):
            load_dataset(file, tokenizer, settings)


def test_a_text_row_has_no_media(tokenizer, tmp_path):
    data = load_dataset(written(tmp_path, row("Plain?")), tokenizer, DataConfig())
    batch = PromptLoader(data, PromptEncoder(tokenizer, DataConfig()), PromptOrder(1, 0, False), 1).take(0, 1)
    assert batch.non_tensor_batch["media"][0] is None


def test_settings_of_the_processor_change_images_and_their_digest(tokenizer):
    config = DataConfig(mm_processor_kwargs={"max_pixels": 28 * 28})
    messages, sources = image_messages(row()["prompt"], {"images": [picture(200, 200)]}, config)
    small = PromptEncoder(tokenizer, config).encode_row(messages, "row 0", sources)
    large = PromptEncoder(tokenizer, DataConfig()).encode_row(messages, "row 0", sources)
    assert small.ids.count(IMAGE) == 1 < large.ids.count(IMAGE)
    assert small.media != large.media


def test_an_unknown_argument_of_the_processor_is_named(tokenizer):
    with pytest.raises(ConfigError, match="'max_pixel'.*did you mean 'max_pixels'"):
        PromptEncoder(tokenizer, DataConfig(mm_processor_kwargs={"max_pixel": 784}))


def test_long_prompts_with_images_are_left_out_but_never_cut(tokenizer, tmp_path):
    rows = [row(images=[data_url(encoded())]), row("<image>" + "x" * 600, images=[data_url(encoded())])]
    file = written(tmp_path, *rows)
    assert len(load_dataset(file, tokenizer, DataConfig(filter_overlong_prompts=True))) == 1
    with pytest.raises(DataError, match="make its images smaller"):
        load_dataset(file, tokenizer, DataConfig(truncation="left"))


def test_rows_of_fine_tuning_have_their_images_before_the_answer(tokenizer, tmp_path):
    images = [data_url(encoded()), data_url(encoded(picture(80, 30)))]
    rows = [sft_row("<image>A<image>?", "4", images=images), sft_row("Plain?", "5")]
    batch = load_conversations(written(tmp_path, *rows), tokenizer, SFTDataConfig()).batch([0, 1])
    media = batch.non_tensor_batch["media"]
    assert media[0].tensors["image_grid_thw"].tolist() == [[1, 2, 2], [1, 2, 6]]
    assert media[1] is None
    assert int((batch.batch["prompts"][0] == IMAGE).sum()) == 4
    assert not (batch.batch["responses"] == IMAGE).any()


@pytest.mark.parametrize("name", SFT_MALFORMED)
def test_a_malformed_row_of_fine_tuning_is_one_sentence(name, tokenizer, tmp_path):
    bad, words = SFT_MALFORMED[name]
    with pytest.raises(DataError, match=words) as caught:
        load_conversations(written(tmp_path, bad), tokenizer, SFTDataConfig(truncation="right"))
    assert "rows.jsonl, row 0" in str(caught.value)


@pytest.mark.parametrize(
    ("content", "words"),
    [
        ("<image><image>A?", "'images' has 1 images, and .* 2 places"),
        ([{"type": "image", "image": "a.png"}], "a.png does not exist"),
    ],
)
def test_a_malformed_preference_is_one_sentence(content, words, tokenizer, tmp_path):
    bad = {"prompt": [{"role": "user", "content": content}], "chosen": "a", "rejected": "b"}
    images = {"images": [data_url(encoded())]} if isinstance(content, str) else {}
    with pytest.raises(DataError, match=words) as caught:
        load_preferences(written(tmp_path, bad | images), tokenizer, PreferenceDataConfig())
    assert "rows.jsonl, row 0" in str(caught.value)


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
    content, indexed = video().read_bytes(), video(movflags="faststart").read_bytes()
    cases = [*((text, "no video that can be read") for text in (b"hello", content[:2000], *PLAYLISTS))]
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
