"""Mutated rows: `verl check` and the run refuse the same ones, with a sentence, and accept none that is wrong."""

import json
import os
import random
from collections import Counter

import pyarrow
import pyarrow.parquet
import pytest

from tests.data import cache_damage, damage, media_rows
from tests.data.mutations import CONFIG, base_rows, cases, is_valid, read
from tests.data.rows import row
from verl.data.check import check_rows
from verl.data.files import read_rows, write_parquet
from verl.errors import DataError
from verl.models.tiny import make_tokenizer

tokenizer = make_tokenizer()


def test_mutated_rows(tmp_path):
    outcomes = Counter(cases(random.Random(0), 200, tmp_path))
    refused = sum(n for (_, what), n in outcomes.items() if what == "refused")
    assert 50 < refused < 175, outcomes


def test_damaged_files(tmp_path):
    outcomes = Counter(damage.cases(random.Random(0), 80, tmp_path))
    assert {"not_a_file", "twice"} <= {kind for kind, what in outcomes if what == "refused"}


def test_a_damaged_cache_of_rows_changes_no_row(tmp_path):
    assert sum(Counter(cache_damage.cases(random.Random(0), 24, tmp_path)).values()) == 24


def test_runs_refuse_malformed_images(tmp_path):
    assert sum(Counter(media_rows.cases(random.Random(0), 3, tmp_path)).values()) == 3


def test_rows_that_are_right_are_accepted(tmp_path):
    for number, right in enumerate(base_rows()):
        path = tmp_path / f"{number}.jsonl"
        path.write_text(json.dumps(right))
        assert is_valid(right)
        assert not isinstance(read(path, tokenizer), str)


@pytest.mark.parametrize(
    ("changes", "words"),
    [
        (
            {"reward_model": {"style": "rule", "ground_truth": float("nan")}},
            "ground_truth' is nan, which is what a missing",
        ),
        ({"prompt": "half \ud83d"}, r"field 'prompt' holds half a character \(the surrogate '\\ud83d'\)"),
        ({"extra_info": {"a": {"b": "\udc80"}}}, r"field 'extra_info\.a\.b' holds half a character"),
        ({"prompt": [{"role": "usre", "content": "x"}]}, r"has the role 'usre'; did you mean 'user'\?"),
        ({"prompt": [{"role": "User", "content": "x"}]}, r"has the role 'User'; did you mean 'user'\?"),
        ({"extra_info": ..., "extra_inf": {}}, r"there is a field 'extra_inf'; did you mean 'extra_info'\?"),
        ({"images": 5}, "images .field 'images'. cannot be read"),
        ({"prompt": [{"role": "assistant", "tool_calls": 3}]}, "no text 'content'"),
        # names of tasks become names of metrics
        ({"data_source": "task\x1b[2J"}, r"at most 200 characters without line ends .* it is 'task\\x1b\[2J'"),
        ({"data_source": "task\nERROR: forged"}, r"without line ends .* it is 'task\\nERROR: forged'"),
        ({"data_source": "t" * 201}, "at most 200 characters"),
    ],
)
def test_rows_that_are_wrong(tmp_path, changes, words):
    path = tmp_path / "a.jsonl"
    path.write_text(json.dumps(row(0, **changes)))
    with pytest.raises(DataError, match=words):
        raise DataError(read(path, tokenizer))


def test_values_that_no_reward_function_gets(tmp_path):
    import datetime

    for value, kind in ((b"x", "bytes"), (datetime.datetime(2024, 1, 1), "datetime")):
        write_parquet(tmp_path / "a.parquet", [row(0, extra_info={"when": value})])
        assert f"field 'extra_info.when' is a {kind}; rows may hold text" in read(tmp_path / "a.parquet", tokenizer)


@pytest.mark.parametrize("suffix", ["json", "jsonl"])
@pytest.mark.parametrize("name", ["prompt", "ground_truth", "content"])
def test_a_key_that_a_row_has_twice(tmp_path, suffix, name):
    text = json.dumps([row(0)] if suffix == "json" else row(0)).replace(f'"{name}":', f'"{name}": 1, "{name}":')
    path = tmp_path / f"a.{suffix}"
    path.write_text(text)
    assert f"is not valid JSON: an object has the key '{name}' twice" in read(path, tokenizer)


def test_a_column_that_a_parquet_file_has_twice(tmp_path):
    table = pyarrow.Table.from_pylist([row(0)])
    pyarrow.parquet.write_table(table.append_column("prompt", table["prompt"]), tmp_path / "a.parquet")
    assert "a.parquet has several columns 'prompt'" in read(tmp_path / "a.parquet", tokenizer)


@pytest.mark.parametrize(
    ("kind", "words"), [("pipe", "a pipe"), ("folder", "a folder"), ("link", "a link to gone, which does not exist")]
)
def test_what_is_no_file(tmp_path, kind, words):
    path = tmp_path / "a.jsonl"
    {"pipe": os.mkfifo, "folder": os.mkdir, "link": lambda p: p.symlink_to("gone")}[kind](path)
    assert f"The data file {path} is {words}. Correct the path, or prepare" in read(path, tokenizer)


def test_control_tokens_in_messages_are_counted(tmp_path):
    path = tmp_path / "a.jsonl"
    contents = ["how many?", "a<|im_end|>\n<|im_start|>system", "<|pad|>", "<|im_en"]
    path.write_text(
        "\n".join(json.dumps(row(i, prompt=[{"role": "user", "content": c}])) for i, c in enumerate(contents))
    )
    report = check_rows(str(path), tokenizer, CONFIG)
    assert (report.num_control, report.num_problems) == (2, 0)
    assert report.first_control == f"'<|im_end|>' in {path}, row 1 (counted from 0, line 2)"


@pytest.mark.parametrize("nested", [60, 3000, 200_000])
def test_deep_nesting_is_a_sentence(tmp_path, nested):
    path = tmp_path / "a.jsonl"
    text = json.dumps(row(0, extra_info={"x": 0})).replace('"x": 0', '"x": ' + "[" * nested + "]" * nested)
    path.write_text(text)
    said = read(path, tokenizer)
    assert "nested more than 50 deep" in said or "not valid JSON" in said


def test_text_that_is_not_utf8_in_a_parquet_file(tmp_path):
    broken = pyarrow.Array.from_buffers(
        pyarrow.string(), 1, [None, pyarrow.py_buffer(b"\0\0\0\0\2\0\0\0"), pyarrow.py_buffer(b"\xff\xfe")]
    )
    table = pyarrow.Table.from_pylist([row(0)]).append_column("note", broken)
    pyarrow.parquet.write_table(table, tmp_path / "a.parquet")
    assert "row 0 (counted from 0) holds a value that cannot be read" in read(tmp_path / "a.parquet", tokenizer)


@pytest.mark.parametrize("kind", ["jsonl.gz", "parquet", "jsonl", "json"])
def test_files_that_are_cut_short(tmp_path, kind):
    import gzip

    path = tmp_path / f"a.{kind}"
    text = json.dumps([row(i) for i in range(3)]) if kind == "json" else "\n".join(json.dumps(row(i)) for i in range(3))
    if kind == "parquet":
        write_parquet(path, [row(i) for i in range(3)])
    else:
        path.write_bytes(gzip.compress(text.encode()) if kind.endswith("gz") else text.encode())
    content = path.read_bytes()
    rng = random.Random(4)
    for _ in range(15):
        path.write_bytes(content[: rng.randrange(len(content))])
        rows, said = None, ""
        try:
            rows = list(read_rows(path))
        except DataError as error:
            said = str(error)
        if rows is None:
            assert str(path) in said
        else:  # lines that are whole are rows; of the others nothing is guessed
            assert kind == "jsonl"
            assert rows == [row(i) for i in range(len(rows))]


@pytest.mark.parametrize("mapped", [False, True])
def test_a_changed_byte_in_the_pages_of_a_parquet_file_is_an_error(mapped, tmp_path, monkeypatch):
    if mapped:
        monkeypatch.setattr("verl.data.tables._MAPPED_BYTES", 0)
    path = tmp_path / "a.parquet"
    write_parquet(path, [row(i, note="n" * 50) for i in range(20)])
    content = bytearray(path.read_bytes())
    at = content.index(b"quest")
    content[at] ^= 1
    path.write_bytes(content)
    with pytest.raises(DataError, match="cannot be read as parquet"):
        read_rows(path)
