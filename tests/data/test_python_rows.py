"""Rows of Python objects: values reach reward functions as they are, or the row is refused before work."""

import json

import numpy as np
import pytest
from PIL import Image

from verl.data.python_rows import listed_rows, prompt_row, row_as_json
from verl.errors import DataError

PICTURE = Image.new("RGB", (4, 4))
PLACES = {
    "answer": {"answer": b"5"},
    "answer.value": {"answer": {"value": b"5"}},
    "answer[1].a": {"answer": ["x", {"a": b"5"}]},
    "shown": {"shown": PICTURE},
    "extra_info.shown": {"extra_info": {"shown": PICTURE}},
    "reward_model.ground_truth": {"reward_model": {"ground_truth": b"5"}},
    "answer[0]": {"answer": np.array([b"5"], dtype=object)},
    "raw": {"raw": bytearray(b"5")},
    "texts[0]": {"texts": np.array([b"5"])},
    "prompt[0].name": {"prompt": [{"role": "user", "content": "x", "name": b"5"}]},
}


@pytest.mark.parametrize("place", PLACES)
def test_bytes_and_pictures_outside_of_the_media_columns_are_refused(place):
    with pytest.raises(DataError, match=r"Row 3 of the data has a picture or bytes in '") as error:
        prompt_row({"prompt": "p", **PLACES[place]}, 3)
    assert f"{place!r}" in str(error.value)


def test_a_row_without_the_named_prompt_names_the_key():
    with pytest.raises(
        DataError, match="no 'question', a text or messages; it has q. Rename a column, or name it by data.prompt_key"
    ):
        prompt_row({"q": "p"}, 0, names=("question", "task"))
    assert prompt_row({"prompt": "p"}, 0, names=("question", "task"))["question"] == "p"


@pytest.mark.parametrize("kind", [PICTURE, {"bytes": b"5", "path": None}, b"5"])
def test_pictures_in_media_columns_and_messages_are_written(kind):
    content = [{"type": "image", "image": kind}, {"type": "image_url", "image_url": {"url": kind}}]
    for row in ({"prompt": "p", "images": [kind]}, {"prompt": [{"role": "user", "content": content}]}):
        assert "data:;base64," in row_as_json(prompt_row(row, 0), 0)


def test_the_picture_of_a_column_image_is_no_column_of_reward_functions():
    row = prompt_row({"prompt": "p", "image": PICTURE}, 0)
    assert row["images"] == [PICTURE]
    assert "image" not in row["extra_info"]


def test_a_column_that_is_in_extra_info_with_another_value_is_refused():
    row = {"prompt": "p", "answer": "5", "extra_info": {"answer": "6"}}
    with pytest.raises(
        DataError, match="Row 0 of the data has 'answer' twice, as a column and in extra_info. Keep one"
    ):
        prompt_row(row, 0)
    for same in ("5", np.array([1, 2])):
        assert prompt_row({**row, "answer": same, "extra_info": {"answer": same}}, 0)["extra_info"]["answer"] is same
    assert prompt_row({"prompt": "p", "extra_info": {"prompt": "q"}}, 0)["extra_info"]["prompt"] == "q"


def test_a_data_frame_with_two_columns_of_one_name_is_refused():
    pandas = pytest.importorskip("pandas")
    frame = pandas.DataFrame([["p", "5", "6"]], columns=["prompt", "answer", "answer"])
    with pytest.raises(DataError, match="The train data have several columns 'answer'; keep one of them"):
        listed_rows("train", frame)


def test_a_row_without_an_end_is_one_sentence():
    row = {"prompt": "p", "answer": []}
    row["answer"].append(row["answer"])
    with pytest.raises(DataError, match="Row 0 of the data"):
        row_as_json(prompt_row(row, 0), 0)
    assert json.loads(row_as_json(prompt_row({"prompt": "p", "answer": 5}, 0), 0))["extra_info"]["answer"] == 5
