"""Questions about pictures: a handwritten digit to read, shapes to count, and circles to count among squares.

The digits are the 1,797 pictures of 8x8 pixels that scikit-learn's wheel carries (UCI, Alpaydin and Kaynak 1998). One row
serves both programs: supervised fine-tuning reads `messages`, reinforcement learning `prompt` and `reward_model.ground_truth`.
A third file has the questions of the test file with grey pictures: the blind control. It must stay at chance.
"""

from __future__ import annotations

import csv
import gzip
import io
import itertools
import random
import zipfile
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING, NamedTuple

from verl.data.files import write_parquet
from verl.errors import DataError, MissingExtraError

if TYPE_CHECKING:
    from PIL.Image import Image

DIGITS = "sklearn/datasets/data/digits.csv.gz"
SIDE = 64  # pixels of a picture
MAX_SHAPES = 5
QUESTIONS = {"digits": "Which digit?", "shapes": "How many shapes?", "circles": "How many circles?"}
TASKS = {"grpo": ("circles",), "sft": ("digits", "shapes")}
_CELL = SIDE // 4
_COLOURS = ("red", "blue", "green", "black", "purple")


class Picture(NamedTuple):
    """A picture and the numbers in it: the digit, or the counts of circles and squares."""

    image: Image
    digit: int | None = None
    circles: int = 0
    squares: int = 0

    def answer(self, task: str) -> int:
        return {"digits": self.digit or 0, "shapes": self.circles + self.squares, "circles": self.circles}[task]


def read_digits(wheel: Path) -> list[tuple[int, bytes]]:
    """(digit, 64 grey values of 8 rows) of every picture in scikit-learn's wheel. Raises DataError for another file."""
    try:
        with zipfile.ZipFile(wheel) as archive, gzip.open(io.BytesIO(archive.read(DIGITS)), "rt") as file:
            rows = [[int(float(cell)) for cell in line] for line in csv.reader(file)]
    except (OSError, KeyError, ValueError, zipfile.BadZipFile) as error:
        raise DataError(
            f"{wheel} is not scikit-learn's wheel ({type(error).__name__}). Get it with `pip download --no-deps scikit-learn`."
        ) from error
    return [(row[-1], bytes(255 - 15 * value for value in row[:-1])) for row in rows]


def picture_of(task: str, digits: Sequence[tuple[int, bytes]], rng: random.Random) -> Picture:
    """A picture for the question of `task`; the answer is uniform. `digits` are values of `read_digits`."""
    if task == "digits":
        return _digit(*rng.choice(digits), rng)
    total = rng.randint(1, MAX_SHAPES)
    if task == "shapes":
        circles = rng.choice((0, total))
        return _shapes(circles, total - circles, rng)
    return _shapes(total, rng.randint(1, MAX_SHAPES), rng)


def _digit(digit: int, values: bytes, rng: random.Random) -> Picture:
    from PIL import Image

    side = rng.randint(56, SIDE)
    small = Image.frombytes("L", (8, 8), values).resize((side, side), Image.Resampling.BILINEAR)
    image = Image.new("RGB", (SIDE, SIDE), "white")
    image.paste(small.convert("RGB"), (rng.randint(0, SIDE - side), rng.randint(0, SIDE - side)))
    return Picture(image, digit=digit)


def _shapes(circles: int, squares: int, rng: random.Random) -> Picture:
    """Circles and squares of random colours in cells of a grid, so that none covers another."""
    from PIL import Image, ImageDraw

    image = Image.new("RGB", (SIDE, SIDE), "white")
    pen = ImageDraw.Draw(image)
    cells = rng.sample([(x, y) for x in range(4) for y in range(4)], circles + squares)
    for number, (x, y) in enumerate(cells):
        size = rng.randint(9, 13)
        x0, y0 = _CELL * x + rng.randint(1, _CELL - size - 1), _CELL * y + rng.randint(1, _CELL - size - 1)
        shape = pen.ellipse if number < circles else pen.rectangle
        shape((x0, y0, x0 + size, y0 + size), fill=rng.choice(_COLOURS))
    return Picture(image, circles=circles, squares=squares)


def row_of(task: str, picture: Picture, split: str, index: int, *, blind: bool = False) -> dict[str, object]:
    """One row of the schema, with the answer in `messages`; `blind`: the picture is grey."""
    from PIL import Image

    image = Image.new("RGB", (SIDE, SIDE), "grey") if blind else picture.image
    file = io.BytesIO()
    image.save(file, "PNG")
    prompt = [{"role": "user", "content": f"<image>{QUESTIONS[task]}"}]
    answer = str(picture.answer(task))
    return {
        "data_source": f"{task}_blind" if blind else task,
        "prompt": prompt,
        "messages": [*prompt, {"role": "assistant", "content": answer}],
        "images": [{"bytes": file.getvalue()}],
        "reward_model": {"style": "rule", "ground_truth": answer},
        "extra_info": {"split": split, "index": index},
    }


def prepare(source: Path, output: Path, *, num_train: int, num_test: int, seed: int) -> list[str]:
    """Write `output`/{sft,grpo}_{train,test,blind}.parquet; returns a line per file. A tenth of the digits appears only in test
    files. Raises DataError for a `source` that is not scikit-learn's wheel."""
    try:
        import PIL as _  # noqa: F401
    except ImportError as error:
        raise MissingExtraError("Pictures of shapes", "pillow", "pillow") from error
    digits = read_digits(source)
    random.Random(seed).shuffle(digits)
    held_out = len(digits) // 10
    lines = []
    for split, part, count in (("test", digits[:held_out], num_test), ("train", digits[held_out:], num_train)):
        for program, tasks in TASKS.items():
            rng = random.Random(f"{seed} {split} {program}")
            pictures = [
                (task, picture_of(task, part, rng))
                for task, _ in zip(itertools.cycle(tasks), range(count), strict=False)
            ]
            for name, blind in ((split, False), ("blind", True))[: 2 if split == "test" else 1]:
                rows = [row_of(task, p, split, index, blind=blind) for index, (task, p) in enumerate(pictures)]
                file = output / f"{program}_{name}.parquet"
                write_parquet(file, rows)
                lines.append(f"{file}: {len(rows)} rows")
    return lines
