"""Rows with images: the forms that they are read in, and one sentence for each malformed row."""

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
from verl.data.pictures import read_image
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
