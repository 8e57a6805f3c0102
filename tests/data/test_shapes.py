"""Pictures of the task shapes: their answers, splits and blind copies, from a wheel with a few digits."""

import gzip
import io
import random
import zipfile

import pytest

from verl.data import prepare
from verl.data.files import read_rows
from verl.data.tasks import shapes
from verl.errors import DataError

pytest.importorskip("PIL")
COLOURS = {(255, 0, 0), (0, 0, 255), (0, 128, 0), (0, 0, 0), (128, 0, 128)}


@pytest.fixture
def wheel(tmp_path):
    """A wheel with 40 pictures; picture i has i as its first grey value."""
    lines = "".join(",".join([str(i % 16), *["0"] * 63, str(i % 10)]) + "\n" for i in range(40))
    with zipfile.ZipFile(tmp_path / "scikit_learn.whl", "w") as archive:
        archive.writestr(shapes.DIGITS, gzip.compress(lines.encode()))
    return tmp_path / "scikit_learn.whl"


def rows_of(folder, name):
    rows = read_rows(folder / f"{name}.parquet")
    return [rows[i] for i in range(len(rows))]


def test_every_test_question_comes_again_with_a_grey_picture(wheel, tmp_path, capsys):
    from PIL import Image

    assert (
        prepare.main(["shapes", "--source", str(wheel), "--output", str(tmp_path), "--train", "12", "--test", "6"]) == 0
    )
    assert len(capsys.readouterr().out.splitlines()) == 6
    for program, tasks in shapes.TASKS.items():
        train, test, blind_rows = (rows_of(tmp_path, f"{program}_{name}") for name in ("train", "test", "blind"))
        assert (len(train), len(test)) == (12, 6)
        assert {row["data_source"] for row in train} == set(tasks)
        for row, blind in zip(test, blind_rows, strict=True):
            assert blind["data_source"] == f"{row['data_source']}_blind"
            assert blind["messages"] == row["messages"]
            assert row["messages"][1]["content"] == row["reward_model"]["ground_truth"]
            image = Image.open(io.BytesIO(blind["images"][0]["bytes"]))
            assert image.getcolors() == [(shapes.SIDE**2, (128, 128, 128))]


@pytest.mark.parametrize("task", ["shapes", "circles"])
def test_the_answer_is_the_number_of_parts_in_the_picture(task):
    rng = random.Random(0)
    for _ in range(50):
        picture = shapes.picture_of(task, [], rng)
        assert picture.answer(task) in range(1, shapes.MAX_SHAPES + 1)
        pixels = picture.image.load()
        # no shape crosses a cell, and a square fills its bounds
        cells = [
            [pixels[x, y] for x in range(16 * i, 16 * i + 16) for y in range(16 * j, 16 * j + 16)]
            for i in range(4)
            for j in range(4)
        ]
        filled = [sum(value in COLOURS for value in cell) for cell in cells if set(cell) != {(255, 255, 255)}]
        assert len(filled) == picture.circles + picture.squares


def test_digits_are_read_from_the_wheel(wheel):
    digits = shapes.read_digits(wheel)
    assert [digit for digit, _ in digits] == [i % 10 for i in range(40)]
    assert digits[3][1][0] == 255 - 15 * 3
    assert digits[3][1][1] == 255


def test_another_file_is_named(tmp_path):
    (tmp_path / "other.whl").write_bytes(b"no archive")
    with pytest.raises(DataError, match="is not scikit-learn's wheel.*pip download"):
        shapes.prepare(tmp_path / "other.whl", tmp_path, num_train=1, num_test=1, seed=1)
