"""The run folder: one run at a time, nothing torn, nothing twice."""

import json
import multiprocessing
import os
import socket
import subprocess
import sys

import pytest

from verl.errors import CheckpointError, ConfigError
from verl.tracking.files import append_rows, json_text, read_json_rows, write_atomically
from verl.tracking.run_folder import RunFolder


def test_second_run_is_refused_and_names_the_holder(tmp_path):
    with RunFolder(tmp_path), pytest.raises(ConfigError, match=f"process {os.getpid()} on {socket.gethostname()}"):
        RunFolder(tmp_path).__enter__()
    with RunFolder(tmp_path):
        pass  # given back


def test_lock_of_a_dead_process_is_taken_over(tmp_path):
    child = subprocess.Popen([sys.executable, "-c", ""])
    child.wait(timeout=30)
    holder = {"pid": child.pid, "host": socket.gethostname(), "started": 0.0}
    (tmp_path / "run.lock").write_text(json.dumps(holder))
    with RunFolder(tmp_path):
        assert json.loads((tmp_path / "run.lock").read_text())["pid"] == os.getpid()


def test_lock_of_a_killed_run_is_taken_over(tmp_path):
    code = f"from verl.tracking.run_folder import RunFolder; import os; RunFolder({str(tmp_path)!r}).__enter__(); os._exit(9)"
    assert subprocess.run([sys.executable, "-c", code], check=False, timeout=60).returncode == 9
    assert (tmp_path / "run.lock").read_text()
    with RunFolder(tmp_path):
        pass


def test_reused_process_id_is_not_the_holder(tmp_path):
    # this process has the id, but started at another time than the holder
    holder = {"pid": os.getpid(), "host": socket.gethostname(), "started": 12.0}
    (tmp_path / "run.lock").write_text(json.dumps(holder))
    with RunFolder(tmp_path):
        pass


def test_lock_of_another_host_stays(tmp_path):
    (tmp_path / "run.lock").write_text(json.dumps({"pid": 1, "host": "elsewhere", "started": 0.0}))
    with pytest.raises(ConfigError, match=r"elsewhere.*delete .*run\.lock"):
        RunFolder(tmp_path).__enter__()


@pytest.mark.parametrize("content", ["", "{", "[]", '{"pid": null}', "\x00\x00"])
def test_torn_lock_does_not_block(tmp_path, content):
    (tmp_path / "run.lock").write_text(content)
    with RunFolder(tmp_path):
        pass


def _try_lock(folder, results, barrier):
    barrier.wait(timeout=30)
    try:
        RunFolder(folder).__enter__()
        results.put(True)
        barrier.wait(timeout=30)  # hold it until all have tried
    except ConfigError:
        results.put(False)
        barrier.wait(timeout=30)


def test_only_one_of_many_starters_gets_a_stale_lock(tmp_path):
    (tmp_path / "run.lock").write_text(json.dumps({"pid": 2**22 - 1, "host": socket.gethostname(), "started": 0.0}))
    context = multiprocessing.get_context("fork")
    results, barrier = context.Queue(), context.Barrier(4)
    starters = [context.Process(target=_try_lock, args=(tmp_path, results, barrier)) for _ in range(4)]
    for starter in starters:
        starter.start()
    won = [results.get(timeout=30) for _ in starters]
    for starter in starters:
        starter.join(timeout=30)
    assert sorted(won) == [False, False, False, True]


def test_unwritable_folder_is_a_sentence(tmp_path):
    (tmp_path / "file").write_text("")
    with pytest.raises(ConfigError, match=r"trainer\.default_local_dir"):
        RunFolder(tmp_path / "file" / "run").__enter__()


def test_free_space(tmp_path):
    with RunFolder(tmp_path) as folder:
        folder.require_free_gb(1e-6)
        with pytest.raises(CheckpointError, match=r"min_free_disk_gb=1e\+09"):
            folder.require_free_gb(1e9)


def fill(folder, steps):
    for step in steps:
        append_rows(folder.metrics, [{"step": step, "x": step / 3}])
        append_rows(folder.spans, [{"step": step, "name": "gen"}, {"step": step, "name": "adv"}])
        for split in ("train", "val"):
            file = folder.sample_file(split, step)
            file.parent.mkdir(exist_ok=True)
            write_atomically(file, "{}\n")


def test_truncate_after_removes_what_will_be_taken_again(tmp_path):
    with RunFolder(tmp_path) as folder:
        fill(folder, range(6))
        with folder.metrics.open("a") as file:
            file.write('{"step": 6, "x": 0.')  # a kill in the middle of a row
        assert folder.truncate_after(3) == 2
        assert [row["step"] for row in read_json_rows(folder.metrics)] == [0, 1, 2, 3]
        assert next(iter(read_json_rows(folder.metrics))) == {"step": 0, "x": 0.0}
        assert [row["step"] for row in read_json_rows(folder.spans)] == [0, 0, 1, 1, 2, 2, 3, 3]
        assert sorted(f.name for f in folder.samples.glob("val/*")) == [f"step_{i:06d}.jsonl" for i in range(4)]
        append_rows(folder.metrics, [{"step": 4}])
        assert [row["step"] for row in read_json_rows(folder.metrics)] == [0, 1, 2, 3, 4]
        assert folder.truncate_after(4) == 0


def test_fresh_start_sets_earlier_records_aside(tmp_path):
    with RunFolder(tmp_path) as folder:
        assert folder.truncate_after(0) == 0
        assert not list(tmp_path.glob("superseded_*"))
        fill(folder, range(3))
        assert folder.truncate_after(0) == 3
        assert not folder.metrics.exists()
        assert folder.samples.is_dir()
        assert not list(folder.samples.glob("*/*"))
        (aside,) = tmp_path.glob("superseded_*")
        assert [row["step"] for row in read_json_rows(aside / "metrics.jsonl")] == [0, 1, 2]
        assert len(list(aside.glob("samples/*/*"))) == 6


def test_json_is_strict():
    numpy = pytest.importorskip("numpy")
    torch = pytest.importorskip("torch")
    row = {
        "nan": float("nan"),
        "inf": [float("-inf"), 1.5],
        "np": numpy.float32(0.5),
        "array": numpy.array([1.0, numpy.nan]),
        "t": torch.tensor([1, 2]),
        "odd": object,
        "none": None,
        "flag": True,
    }
    found = json.loads(json_text(row), parse_constant=lambda name: pytest.fail(name))
    assert found["nan"] is None
    assert found["inf"] == [None, 1.5]
    assert found["np"] == 0.5
    assert found["array"] == [1.0, None]
    assert found["t"] == [1, 2]
    assert found["flag"] is True
    assert isinstance(found["odd"], str)


def test_log_goes_to_the_folder(tmp_path):
    import logging

    with RunFolder(tmp_path):
        logging.getLogger("verl.anything").info("a sentence")
    logging.getLogger("verl.anything").info("after the end")
    text = (tmp_path / "logs" / "rank_0.log").read_text()
    assert "INFO" in text
    assert "a sentence" in text
    assert "after the end" not in text
