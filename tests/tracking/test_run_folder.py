"""The run folder: one run at a time, nothing torn, nothing twice."""

import contextlib
import errno
import fcntl
import itertools
import json
import multiprocessing
import os
import shutil
import signal
import socket
import subprocess
import sys
import threading

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from verl.errors import CheckpointError, ConfigError, FolderLostError
from verl.regular_files import read_text
from verl.tracking import files, lock
from verl.tracking.files import append_rows, json_text, read_json_rows, read_metrics, replacing, write_atomically
from verl.tracking.heartbeat import read_beat
from verl.tracking.lock import holder_of
from verl.tracking.run_folder import RunFolder
from verl.tracking.timeline import read_timeline


def test_second_run_is_refused_and_names_the_holder(tmp_path):
    with RunFolder(tmp_path), pytest.raises(ConfigError, match=f"process {os.getpid()} on {socket.gethostname()}"):
        RunFolder(tmp_path).__enter__()
    with RunFolder(tmp_path):
        pass  # given back


def test_a_killed_run_is_waited_for(tmp_path, monkeypatch):
    """It has its locks until the machine has time for its end."""
    (killed := RunFolder(tmp_path)).__enter__()
    monkeypatch.setattr(lock, "is_ending", lambda pid: pid == os.getpid() and not killed.__exit__(None, None, None))
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


HERE = {"host": socket.gethostname(), "started": 0.0}


@pytest.mark.parametrize(
    "content",
    [
        b"",
        b"{",
        b"[]",
        b'{"pid": null}',
        b"\x00\x00",
        b"\xff\xfe\x00",
        b"[" * 100_000,
        b"x" * 10_000_000,
        *(json.dumps({"pid": pid, **HERE}).encode() for pid in (-1, 0, 1.5, 2**40, True)),
    ],
)
def test_damaged_lock_does_not_block(tmp_path, content):
    (tmp_path / "run.lock").write_bytes(content)
    assert holder_of(tmp_path) is None
    with RunFolder(tmp_path):
        assert str(os.getpid()) in holder_of(tmp_path)


@pytest.mark.parametrize("kind", ["/dev/zero", "pipe", "folder", "loop"])
def test_lock_that_is_no_file_is_a_sentence(tmp_path, kind):
    lock = tmp_path / "run.lock"
    if kind == "pipe":
        os.mkfifo(lock)
    elif kind == "folder":
        lock.mkdir()
    else:
        lock.symlink_to(lock if kind == "loop" else kind)
    with pytest.raises(ConfigError, match=r"run folder .* cannot be (written|used)|run\.lock"):
        RunFolder(tmp_path).__enter__()
    assert holder_of(tmp_path) is None


def test_deleting_the_lock_lets_no_second_run_in(tmp_path, caplog):
    with RunFolder(tmp_path) as first:
        (tmp_path / "run.lock").unlink()
        code = f"from verl.tracking.run_folder import RunFolder; RunFolder({str(tmp_path)!r}).__enter__()"
        second = subprocess.run([sys.executable, "-c", code], check=False, timeout=120, capture_output=True, text=True)
        assert "is in use by another process" in second.stderr
        assert first.lost() == ""
        assert "run.lock was deleted or changed" in caplog.text
        assert str(os.getpid()) in holder_of(tmp_path)
        (tmp_path / "run.lock").write_text("garbage")
        assert first.lost() == ""
    with RunFolder(tmp_path):
        pass


def test_without_locks_of_the_kernel_the_content_decides(tmp_path, monkeypatch):
    def no_locks(*_):
        raise OSError(errno.ENOLCK, "No locks available")

    monkeypatch.setattr(fcntl, "flock", no_locks)
    with RunFolder(tmp_path) as folder:
        with pytest.raises(ConfigError, match=f"process {os.getpid()}"):
            RunFolder(tmp_path).__enter__()
        (tmp_path / "run.lock").write_text(json.dumps({"pid": 1, "host": "elsewhere", "started": 0.0}))
        assert "process 1 on elsewhere" in folder.lost()


def test_a_forked_child_does_not_keep_the_folder(tmp_path):
    code = (
        "import os, sys, time; from verl.tracking.run_folder import RunFolder\n"
        f"RunFolder({str(tmp_path)!r}).__enter__()\n"
        "child = os.fork()\n"
        "if not child: os.close(1); time.sleep(60)\n"
        "print(child, flush=True); os._exit(9)"
    )
    done = subprocess.run([sys.executable, "-c", code], stdout=subprocess.PIPE, text=True, check=False, timeout=120)
    try:
        with RunFolder(tmp_path):
            pass
    finally:
        os.kill(int(done.stdout), signal.SIGKILL)


def replaced_by_a_link(root, elsewhere):
    shutil.rmtree(root)
    elsewhere.mkdir()
    root.symlink_to(elsewhere)


def replaced_by_a_copy(root, elsewhere):
    root.rename(elsewhere)
    shutil.copytree(elsewhere, root)


@pytest.mark.parametrize(
    ("change", "words"),
    [
        (lambda root, elsewhere: shutil.rmtree(root), "was removed"),
        (lambda root, elsewhere: root.rename(elsewhere), "was removed"),
        (replaced_by_a_link, "was replaced"),
        (replaced_by_a_copy, "was replaced"),
        (lambda root, elsewhere: (root.rename(elsewhere), root.symlink_to(elsewhere)), ""),
    ],
)
def test_a_folder_that_is_lost_is_noticed(tmp_path, change, words):
    root = tmp_path / "run"
    with RunFolder(root) as folder:
        assert folder.lost() == ""
        change(root, tmp_path / "elsewhere")
        assert words in folder.lost()
        assert bool(folder.lost()) == bool(words)


def test_a_file_system_without_lasting_inode_numbers(tmp_path, monkeypatch):
    monkeypatch.setattr(os.path, "samestat", lambda one, other: False)
    with RunFolder(tmp_path / "run") as folder:
        assert folder.lost() == ""
        replaced_by_a_copy(folder.root, tmp_path / "copy")
        assert "was replaced" in folder.lost()


def use(root, *works):
    with RunFolder(root) as folder:
        for work in works:
            work(folder)


def test_a_pipe_in_the_place_of_a_temporary_file_is_replaced(tmp_path):
    os.mkfifo(tmp_path / f".f.{os.getpid()}.tmp")
    write_atomically(tmp_path / "f", "text")
    assert [(p.name, p.read_text()) for p in tmp_path.iterdir()] == [("f", "text")]
    (tmp_path / f".f.{os.getpid()}.tmp").mkdir()
    with pytest.raises(OSError, match="directory"):
        write_atomically(tmp_path / "f", "other")


def test_two_threads_replace_one_file(tmp_path):
    """As two calls of `verl.train` that start in one folder."""
    with replacing(tmp_path / "f", "first"):
        other = threading.Thread(target=write_atomically, args=(tmp_path / "f", "second"))
        other.start()
        other.join()
        assert (tmp_path / "f").read_text() == "second"
    assert (tmp_path / "f").read_text() == "first"
    assert [file.name for file in tmp_path.iterdir()] == ["f"]


def test_errors_of_a_lost_folder_are_said_as_that(tmp_path):
    def remove(folder):
        shutil.rmtree(folder.root)

    with pytest.raises(FolderLostError, match="was removed"):
        use(tmp_path / "run", remove, lambda folder: append_rows(folder.metrics, [{"step": 1}]))
    with pytest.raises(CheckpointError, match=r"metrics\.jsonl cannot be read or written \(it is not a regular file\)"):
        use(tmp_path / "run", lambda folder: os.mkfifo(folder.metrics), lambda folder: folder.truncate_after(3))


def _try_lock(folder, results, barrier):
    barrier.wait(timeout=120)
    try:
        RunFolder(folder).__enter__()
        results.put(True)
        barrier.wait(timeout=120)  # hold it until all have tried
    except ConfigError:
        results.put(False)
        barrier.wait(timeout=120)


def test_only_one_of_many_starters_gets_a_stale_lock(tmp_path):
    (tmp_path / "run.lock").write_text(json.dumps({"pid": 2**22 - 1, "host": socket.gethostname(), "started": 0.0}))
    context = multiprocessing.get_context("fork")
    results, barrier = context.Queue(), context.Barrier(4)
    starters = [context.Process(target=_try_lock, args=(tmp_path, results, barrier)) for _ in range(4)]
    for starter in starters:
        starter.start()
    won = [results.get(timeout=120) for _ in starters]
    for starter in starters:
        starter.join(timeout=120)
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


@pytest.mark.parametrize("step", [2, 500, 990, 1000])
def test_the_end_of_a_long_file_is_cut(tmp_path, monkeypatch, caplog, step):
    """A resume after many steps reads the last bytes; an earlier checkpoint needs the whole file."""
    rows = [{"step": i // 2 + 1, "x": i} for i in range(2000)]
    append_rows(tmp_path / "rows.jsonl", rows)
    monkeypatch.setattr(files, "_CHECKED_BYTES", 1000)
    assert files.truncate_rows(tmp_path / "rows.jsonl", step, complete=True) == 2000 - 2 * step
    assert list(read_json_rows(tmp_path / "rows.jsonl")) == rows[: 2 * step]
    assert not caplog.records
    assert (tmp_path / "rows.jsonl").read_bytes().endswith(b"}\n")


def test_a_long_file_is_read_at_evenly_spaced_places(tmp_path):
    append_rows(tmp_path / "rows.jsonl", ({"step": i, "x": "y" * (i % 7)} for i in range(1, 5001)))
    steps = [row["step"] for row in read_json_rows(tmp_path / "rows.jsonl", limit=80_000)]
    assert (steps[0], steps[-1], sorted(set(steps))) == (1, 5000, steps)
    assert 300 < len(steps) < 1200
    assert max(later - step for step, later in itertools.pairwise(steps)) < 120


def test_a_truncated_row_takes_no_other_with_it(tmp_path):
    path = tmp_path / "rows.jsonl"
    append_rows(path, [{"step": 1}])
    path.write_bytes(path.read_bytes() + b'{"step": 2, "x"')
    append_rows(path, [{"step": 3}])
    assert [row["step"] for row in read_json_rows(path)] == [1, 3]


@pytest.mark.parametrize("lost", [0, 2, 3])
def test_lost_metrics_are_said(tmp_path, caplog, lost):
    with RunFolder(tmp_path) as folder:
        fill(folder, range(1, 4))
        lines = folder.metrics.read_text().splitlines()
        folder.metrics.write_text("\n".join(line[: -9 if i + 1 == lost else None] for i, line in enumerate(lines)))
        folder.truncate_after(3)
    assert ("1 steps before step 4 have no row" in caplog.text) == bool(lost)


@pytest.mark.parametrize("exists", [False, True])
def test_a_loop_that_logs_nothing_has_no_damaged_metrics(tmp_path, caplog, exists):
    """As a `fit` of the user's without Tracking."""
    with RunFolder(tmp_path) as folder:
        (folder.root / "global_step_2").mkdir()  # the run resumes from it
        folder.metrics.write_text("") if exists else folder.metrics.unlink(missing_ok=True)
        folder.truncate_after(2)
    assert "metrics.jsonl: 2 steps before step 3 have no row" in caplog.text
    assert "damaged" not in caplog.text


def test_rows_of_another_file_are_no_metrics(tmp_path, caplog):
    """Files that were exchanged: an event has a step too."""
    with RunFolder(tmp_path) as folder:
        fill(folder, range(1, 4))
        folder.metrics.unlink()
        append_rows(folder.metrics, [{"time": 5.0, "event": "restarted", "step": 3, "from": None}])
        folder.truncate_after(3)
        assert not list(read_metrics(folder.metrics))
    assert "1 lines are wrong, and 3 steps before step 4 have no row" in caplog.text


def test_a_full_disk_leaves_whole_rows(tmp_path, around):
    def full(write, descriptor, data):
        if len(data) < 20:
            raise OSError(errno.ENOSPC, "No space left on device")
        return write(descriptor, data[:20])

    append_rows(tmp_path / "rows.jsonl", [{"step": 1}])
    around(os, "write", full)
    with pytest.raises(OSError, match="No space") as caught:
        append_rows(tmp_path / "rows.jsonl", [{"step": 2, "text": "x" * 100}])
    assert caught.value.filename == str(tmp_path / "rows.jsonl")
    assert (tmp_path / "rows.jsonl").read_text() == '{"step": 1}\n'


def test_files_are_read_up_to_a_limit(tmp_path, monkeypatch):
    (tmp_path / "f").write_text("x" * 100)
    assert read_text(tmp_path / "f", 100) == "x" * 100
    with pytest.raises(ValueError, match="more than 99 bytes"):
        read_text(tmp_path / "f", 99)
    monkeypatch.setattr(files, "_MAX_ROW_BYTES", 50)
    (tmp_path / "rows").write_text('{"step": 1, "x": "' + "x" * 1000 + '"}\n{"step": 2}\n')
    assert [row["step"] for row in read_json_rows(tmp_path / "rows")] == [2]


def read_all(folder):
    """The outcome of each reader on the files of `folder`."""
    read_beat(folder.root)
    holder_of(folder.root)
    folder.read_config()
    curves = folder.read_curves()
    assert all(isinstance(label, str) for panel in curves.values() for label in panel.values())
    for row in read_metrics(folder.metrics):
        assert row["step"] >= 0
        assert all(abs(value) < float("inf") for value in row.values())
    for row in read_timeline(folder.timeline):
        assert sum(row["phases"].values()) < float("inf")


JSON_VALUES = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats() | st.text(max_size=5),
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(st.text(max_size=5), inner, max_size=3),
    max_leaves=6,
)
NAMES = ("run.lock", "heartbeat.json", "curves.json", "metrics.jsonl", "timeline.jsonl", "config.yaml")
LIKELY = st.fixed_dictionaries(
    {},
    optional=dict.fromkeys(
        "pid host started step phase since seconds phases roles communication of loss".split(), JSON_VALUES
    ),
)


@settings(max_examples=150, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(name=st.sampled_from(NAMES), content=st.one_of(st.binary(max_size=200), JSON_VALUES, LIKELY))
def test_readers_take_any_content(tmp_path, name, content):
    folder = RunFolder(tmp_path)
    text = content if isinstance(content, bytes) else json.dumps(content).encode()
    (tmp_path / name).write_bytes(text)
    read_all(folder)
    (tmp_path / name).unlink()


@settings(max_examples=100, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(st.text(st.characters(categories=None, exclude_categories=()), max_size=50))
def test_any_text_can_be_stored(tmp_path, text):
    append_rows(tmp_path / "rows.jsonl", [{"step": 1, "text": text, text: 2}])
    (row,) = read_json_rows(tmp_path / "rows.jsonl")
    with contextlib.suppress(UnicodeEncodeError):
        text.encode()
        assert row["text"] == text or text == "text"
    (tmp_path / "rows.jsonl").unlink()


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


def test_only_the_same_run_keeps_the_results_of_its_tools(tmp_path):
    record = tmp_path / "episodes" / "step_000001.rank0.jsonl"
    with RunFolder(tmp_path) as folder:
        record.parent.mkdir()
        record.write_text("{}\n")
        fill(folder, range(2))
        assert folder.truncate_after(0, same_run=True) == 2
        assert record.exists()
        folder.truncate_after(0)  # although there is no row of metrics, as after a kill in the first step
        assert not record.exists()
        assert len(list(tmp_path.glob("superseded_*/episodes/*"))) == 1


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
    parsed = json.loads(json_text(row), parse_constant=lambda name: pytest.fail(name))
    assert parsed["nan"] is None
    assert parsed["inf"] == [None, 1.5]
    assert parsed["np"] == 0.5
    assert parsed["array"] == [1.0, None]
    assert parsed["t"] == [1, 2]
    assert parsed["flag"] is True
    assert isinstance(parsed["odd"], str)


def test_log_goes_to_the_folder(tmp_path):
    import logging

    with RunFolder(tmp_path):
        logging.getLogger("verl.anything").info("a sentence")
    logging.getLogger("verl.anything").info("after the end")
    text = (tmp_path / "logs" / "rank_0.log").read_text()
    assert "INFO" in text
    assert "a sentence" in text
    assert "after the end" not in text
