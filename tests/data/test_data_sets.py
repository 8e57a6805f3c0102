"""Names of data sets: Hub names from the cache of `datasets`, its builders, splits, slices and streams."""

import pytest

from tests.data.rows import config
from tests.json_lines import write_lines
from verl.data.dataset import RLHFDataset
from verl.data.files import read_rows
from verl.errors import DataError
from verl.models.tiny import make_tokenizer

datasets = pytest.importorskip("datasets")

ROWS = [{"prompt": f"What is {n} + 1?", "reward_model": {"ground_truth": str(n + 1)}} for n in range(12)]


@pytest.fixture(autouse=True)
def caches(tmp_path, monkeypatch):
    """The caches of this test, with the splits train and test of `org/sums`, as after a download."""
    monkeypatch.setattr(datasets.config, "HF_DATASETS_CACHE", tmp_path / "hub")
    monkeypatch.setattr(datasets.config, "HF_HUB_OFFLINE", True)
    monkeypatch.setenv("VERL_DATA_CACHE", str(tmp_path / "rows"))
    for folder in ("source", "hub/org"):
        (tmp_path / folder).mkdir(parents=True)
    for name, rows in (("train", ROWS), ("test", ROWS[:3])):
        write_lines(tmp_path / "source" / f"{name}.jsonl", rows)
    files = {name: str(tmp_path / "source" / f"{name}.jsonl") for name in ("train", "test")}
    builder = datasets.load_dataset_builder("json", data_files=files, cache_dir=str(tmp_path / "made"))
    builder.dataset_name, folder = "sums", tmp_path / "hub" / "org___sums" / "default" / "0.0.0" / "0123abcd"
    builder.download_and_prepare(str(folder))


def texts(name):
    rows = read_rows(name)
    assert [row["prompt"] for row in rows.batch(range(len(rows)))] == [row["prompt"] for row in rows]
    return [row["prompt"] for row in rows]


PROMPTS = [row["prompt"] for row in ROWS]


@pytest.mark.parametrize(
    ("name", "expected"),
    [
        ("org/sums:train", PROMPTS),
        ("org/sums@test", PROMPTS[:3]),
        ("org/sums/default:test", PROMPTS[:3]),
        ("org/sums:train[2:4]", PROMPTS[2:4]),
        ("org/sums:train[:25%]+test", PROMPTS[:3] + PROMPTS[:3]),
        ("stream:org/sums:train[:5]", PROMPTS[:5]),
        ("stream:org/sums:test", PROMPTS[:3]),
    ],
)
def test_names_of_the_hub(name, expected):
    assert texts(name) == expected


def test_builders_read_files(tmp_path):
    import pyarrow.parquet

    table = pyarrow.Table.from_pylist(ROWS)
    for part in (0, 1):
        pyarrow.parquet.write_table(table.slice(6 * part, 6), tmp_path / f"part-{part}.parquet")
    with pyarrow.ipc.new_stream(tmp_path / "rows.arrow", table.schema) as writer:
        writer.write_table(table)
    assert texts(f"parquet:{tmp_path}/part-*.parquet") == PROMPTS
    assert texts(f"arrow:{tmp_path}/rows.arrow") == PROMPTS
    assert texts(f"json:{tmp_path}/source/train.jsonl@train[:2]") == PROMPTS[:2]
    assert texts(f"stream:parquet:{tmp_path}/part-*.parquet:train[:8]") == PROMPTS[:8]


def test_a_stream_is_read_once_and_maps_its_rows(tmp_path, monkeypatch):
    rows = read_rows("stream:org/sums:train[:5]")
    monkeypatch.setattr(datasets.IterableDataset, "iter", lambda *_, **__: pytest.fail("it is streamed again"))
    again = read_rows("stream:org/sums:train[:5]")
    assert again.digest() == rows.digest() is not None
    assert list(again) == list(rows)
    assert again.place(1) == "data set stream:org/sums:train[:5], row 1 (counted from 0)"
    with pytest.raises(pytest.fail.Exception, match="streamed again"):
        read_rows("stream:org/sums:train[:6]")


@pytest.mark.parametrize(
    ("name", "words"),
    [
        ("org/sums", "several splits; write org/sums:SPLIT with one of train, test"),
        ("org/sums:dev", "org/sums:dev is neither a file nor a data set that can be loaded: .*dev"),
        ("org/absent:train", "org/absent:train is neither a file nor a data set that can be loaded"),
        ("stream:org/sums", "needs a split: write stream:org/sums:train"),
        ("stream:org/sums:train[5:]", "needs a split"),
        ("json:nowhere/*.jsonl", "json:nowhere/.* is neither a file nor a data set"),
        ("parquet:absent.parquet", "absent.parquet is neither a file nor a data set"),
    ],
)
def test_names_that_cannot_be_loaded(name, words):
    with pytest.raises(DataError, match=words):
        read_rows(name)


def test_a_data_set_is_scanned_and_sampled_like_a_file(tmp_path):
    tokenizer, settings = make_tokenizer(), config(max_prompt_length=64, filter_overlong_prompts=True)
    from_stream = RLHFDataset("stream:org/sums:train[:9]", tokenizer, settings, max_samples=4)
    from_file = RLHFDataset(str(write_lines(tmp_path / "nine.jsonl", ROWS[:9])), tokenizer, settings, max_samples=4)
    assert len(from_stream) == 4
    assert list(from_stream.dataframe) == list(from_file.dataframe)
