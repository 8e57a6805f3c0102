import gzip
import json

import pytest

from verl.data.files import files_behind, names_builder, read_rows, write_parquet
from verl.errors import DataError

ROWS = [{"prompt": [{"role": "user", "content": f"q{i}"}], "extra_info": {"index": i}} for i in range(3)]


def write(path, kind):
    if kind == "parquet":
        write_parquet(path, ROWS)
    elif kind == "json":
        path.write_text(json.dumps(ROWS))
    elif kind == "jsonl":
        path.write_text("\n".join(json.dumps(r) for r in ROWS) + "\n")
    elif kind == "json.gz":
        path.write_bytes(gzip.compress(json.dumps(ROWS).encode()))
    elif kind == "jsonl.gz":
        path.write_bytes(gzip.compress("\n".join(json.dumps(r) for r in ROWS).encode()))
    return path


@pytest.mark.parametrize("kind", ["parquet", "json", "jsonl", "json.gz", "jsonl.gz"])
def test_every_kind_of_file_gives_the_same_rows(tmp_path, kind):
    rows = read_rows(str(write(tmp_path / f"data.{kind}", kind)))
    assert list(rows) == ROWS
    assert str(tmp_path / f"data.{kind}") in rows.place(2)
    assert "row 2 (counted from 0" in rows.place(2)


def test_several_files_follow_each_other_and_rows_keep_their_place(tmp_path):
    files = [write(tmp_path / "a.jsonl", "jsonl"), write(tmp_path / "b.parquet", "parquet")]
    rows = read_rows(files)
    assert len(rows) == 6
    assert rows.place(4) == f"{tmp_path / 'b.parquet'}, row 1 (counted from 0)"
    chosen = rows.select([4, 0])
    assert chosen.place(0) == rows.place(4)
    assert [r["extra_info"]["index"] for r in (chosen[0], chosen[1])] == [1, 0]


def test_the_home_folder_is_replaced_and_a_dollar_sign_is_one(tmp_path, monkeypatch):
    """Variables are replaced by the config; `$$` names a folder with a dollar sign."""
    (tmp_path / "$HOME").mkdir()
    write(tmp_path / "$HOME" / "a.json", "json")
    monkeypatch.setenv("HOME", str(tmp_path))
    assert len(read_rows(["~/$HOME/a.json", f"{tmp_path}/$HOME/a.json"])) == 6


def test_json_lines_name_row_and_line(tmp_path):
    path = tmp_path / "a.jsonl"
    path.write_text('{"a": 1}\n\n{"a": "line\u2028separator"}\n{"a": oops}\n', encoding="utf-8")
    with pytest.raises(DataError, match=r"row 2 \(counted from 0, line 4\) is not valid JSON"):
        read_rows(path)
    path.write_text('{"a": 1}\n\n{"a": "line\u2028separator"}\n', encoding="utf-8")
    rows = read_rows(path)
    assert len(rows) == 2
    assert rows.place(1).endswith("row 1 (counted from 0, line 3)")


@pytest.mark.parametrize(
    ("name", "content", "words"),
    [
        ("a.json", b"[1, 2", "not valid JSON"),
        ("a.json", b"[{}, 3]", r"row 1 \(counted from 0\) is a int"),
        ("a.jsonl", b"\xff\xfe", "cannot be read as text: .* Save it as UTF-8"),
        ("a.jsonl.gz", b"not gzip", "cannot be read as text"),
        ("a.parquet", b"not parquet", "cannot be read as parquet"),
        ("a.csv", b"a,b", r"unknown kind; use one of .parquet"),
        ("a.jsonl", b"\n", "has no rows"),
    ],
)
def test_bad_files_are_named(tmp_path, name, content, words):
    (tmp_path / name).write_bytes(content)
    with pytest.raises(DataError, match=words) as error:
        read_rows(tmp_path / name)
    assert name in str(error.value)


def test_a_byte_order_mark_is_no_text(tmp_path):
    (tmp_path / "a.jsonl").write_bytes(b'\xef\xbb\xbf{"a": 1}\r\n{"a": 2}\r\n')
    assert [row["a"] for row in read_rows(tmp_path / "a.jsonl")] == [1, 2]


def test_missing_files_and_empty_lists(tmp_path):
    with pytest.raises(DataError, match="none.parquet does not exist"):
        read_rows(tmp_path / "none.parquet")
    with pytest.raises(DataError, match="list of data files is empty"):
        read_rows([])


def test_saved_datasets(tmp_path):
    datasets = pytest.importorskip("datasets")
    single = datasets.Dataset.from_list(ROWS)
    single.save_to_disk(tmp_path / "single")
    rows = read_rows(tmp_path / "single")
    assert rows[1]["prompt"] == ROWS[1]["prompt"]
    assert "row 1 (counted from 0)" in rows.place(1)

    datasets.DatasetDict({"train": single, "test": single.select([2])}).save_to_disk(tmp_path / "both")
    assert len(read_rows(f"{tmp_path}/both@test")) == 1
    with pytest.raises(DataError, match="several splits; write .*both:SPLIT with one of train, test"):
        read_rows(tmp_path / "both")
    with pytest.raises(DataError, match="no split 'dev'"):
        read_rows(f"{tmp_path}/both@dev")
    with pytest.raises(DataError, match="neither a file nor a data set"):
        read_rows(tmp_path / "nowhere")


def test_parquet_folders_named_like_partitions_add_no_column(tmp_path):
    path = tmp_path / "split=train" / "a.parquet"
    write_parquet(path, ROWS)
    assert set(read_rows(path)[0]) == {"prompt", "extra_info"}


def test_a_write_that_fails_leaves_nothing(tmp_path):
    for rows in ([{"a": 1}, {"a": "text"}], [{"a": {}}]):
        with pytest.raises(DataError, match=r"a.parquet cannot be written as parquet.*Write .jsonl"):
            write_parquet(tmp_path / "a.parquet", rows)
    assert list(tmp_path.iterdir()) == []


def test_a_folder_may_have_a_line_end_in_its_name(tmp_path):
    file = tmp_path / "a\nb" / "rows.jsonl"
    file.parent.mkdir()
    file.write_text("{}\n")
    assert files_behind(str(file)) == [file]
    assert not names_builder(str(file))
