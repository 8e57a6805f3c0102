"""Images in rows of the Python API: every way to write them gives the model the same prompt."""

import json

import pytest

import verl
from tests.api.functions import length
from verl.errors import DataError

Image = pytest.importorskip("PIL.Image")

SETTINGS = {"data.train_batch_size": 4, "data.max_response_length": 2, "trainer.total_training_steps": 1}
PARTS = [{"role": "user", "content": [{"type": "image"}, {"type": "text", "text": "Colour?"}]}]


@pytest.fixture
def picture(tmp_path):
    file = tmp_path / "red.png"
    Image.new("RGB", (32, 32), (255, 0, 0)).save(file)
    return file


def first_sample(folder):
    return json.loads((folder / "samples/train/step_000001.jsonl").read_text().splitlines()[0])


@pytest.mark.parametrize("way", ["path", "PIL", "column image", "own column", "datasets.Image"])
def test_the_model_reads_the_image(way, folder_of, picture, tmp_path):
    row = {"prompt": "<image>Colour?", "images": [str(picture)]}
    keys = {}
    if way == "PIL":
        row["images"] = [Image.open(picture)]
    elif way == "column image":
        row = {"prompt": PARTS, "image": Image.open(picture)}
    elif way == "own column":
        row, keys = {"prompt": row["prompt"], "photo": [Image.open(picture)]}, {"data.image_key": "photo"}
    rows = [row] * 4
    if way == "datasets.Image":
        datasets = pytest.importorskip("datasets")
        rows = datasets.Dataset.from_list(rows).cast_column("images", datasets.Sequence(datasets.Image()))
    run = verl.train(folder_of("qwen2_vl"), rows, length, output_dir=tmp_path / "run", config=SETTINGS | keys)
    sample = first_sample(run.folder)
    assert "<|vision_start|><|image_pad|><|vision_end|>Colour?" in sample["prompt"]
    assert len(sample["images"]) == 1


def test_an_image_without_a_place_in_the_prompt_is_refused(folder_of, picture, tmp_path):
    rows = [{"prompt": "Colour?", "image": Image.open(picture)}] * 4
    with pytest.raises(DataError, match="'images' has 1 images, and the messages have 0 places"):
        verl.train(folder_of("qwen2_vl"), rows, length, output_dir=tmp_path, config=SETTINGS)


def test_fine_tuning_reads_pictures_of_rows(folder_of, picture, tmp_path):
    reply = {"role": "assistant", "content": "red"}
    rows = [{"messages": [*PARTS, reply], "images": [Image.open(picture)]}] * 4
    run = verl.sft(folder_of("qwen2_vl"), rows, output_dir=tmp_path / "run", config={"data.train_batch_size": 4})
    assert len(first_sample(run.folder)["images"]) == 1
