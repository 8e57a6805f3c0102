"""Saves during training: the copy is saved, failures are raised, every wait has a deadline."""

import errno
import threading

import pytest
import torch

from tests.checkpoint.states import Background, assert_same_state, make_roles, make_state, read_checkpoint, write_config
from tests.processes import wait_until
from verl.checkpoint import background
from verl.checkpoint.background import BackgroundStore, write_and_report
from verl.checkpoint.role import RoleCheckpoint
from verl.checkpoint.store import CheckpointStore
from verl.engines.api import AdapterState, Deferred, EngineState
from verl.errors import CheckpointError, DeadlineError


class Role(Background):
    """A role that saves on a thread; writing waits for `gate`."""

    def __init__(self, state, gate=None, failure=None):
        self.gate, self.failure = gate or threading.Event(), failure
        if gate is None:
            self.gate.set()
        super().__init__(RoleCheckpoint(state, self.hf_files))

    def hf_files(self, folder):
        assert self.gate.wait(120)
        if self.failure is not None:
            raise self.failure
        write_config(folder)


class Plain:
    """A part that is written at once."""

    def num_bytes(self):
        return 2

    def write(self, folder):
        folder.mkdir()
        return {"queue.json": background.write_json(folder / "queue.json", [1], "queue")}


@pytest.fixture
def store(tmp_path):
    return BackgroundStore(CheckpointStore(tmp_path / "run", keep=1), timeout_s=10)


def test_what_was_copied_is_saved_while_training_changes_it(store):
    gate, state = threading.Event(), make_state(1)
    trainer_state = {"step": 1, "list": [1]}
    path = store.save(
        1, {"actor": Role(state, gate), "critic": Role(make_state(2), gate), "queue": Plain()}, trainer_state
    )
    for tensor in (*state.model.values(), *state.optimizer.values()):
        tensor.zero_()
    state.extra["num_lr_steps"] = 99
    trainer_state["list"].append(2)
    store.check()
    assert not path.exists()
    gate.set()
    store.finish()
    loaded = read_checkpoint(store.find())
    assert loaded.trainer_state == {"step": 1, "list": [1]}
    assert_same_state(loaded.roles["actor"], make_state(1))
    assert_same_state(loaded.roles["critic"], make_state(2))
    assert sorted(p.name for p in store.root.iterdir()) == ["global_step_1", "latest_checkpointed_iteration.txt"]
    assert (path / "queue" / "queue.json").exists()


def test_the_files_match_a_plain_save(store, tmp_path):
    store.save(1, {"actor": Role(make_state(1))}, {"step": 1})
    store.finish()
    plain = CheckpointStore(tmp_path / "plain").save(1, make_roles(1), {"step": 1})
    files = sorted(p.relative_to(plain) for p in plain.rglob("*") if p.is_file())
    assert files == sorted(p.relative_to(store.find()) for p in store.find().rglob("*") if p.is_file())
    assert all((plain / f).read_bytes() == (store.find() / f).read_bytes() for f in files)


@pytest.mark.parametrize("lora_only", [False, True])
def test_copies_put_together_what_is_in_parts(tmp_path, lora_only):
    built = []

    def build():
        built.append(1)
        return torch.arange(6.0).reshape(2, 3)

    adapter = AdapterState({"a": torch.ones(2)}, {"r": 1})
    model = {"z": Deferred((2, 3), torch.float32, build), "b": torch.zeros(2)}
    role = RoleCheckpoint(EngineState(model, {}, {}, adapter), write_config, ("model",), lora_only=lora_only)
    copied = role.copied()
    assert len(built) == (0 if lora_only else 1)
    assert list(copied.state.model) == ([] if lora_only else ["z", "b"])
    plain, other = tmp_path / "plain", tmp_path / "other"
    assert role.write(plain) == copied.write(other)


@pytest.mark.parametrize(
    ("failure", "words"),
    [
        (
            OSError(errno.ENOSPC, "No space left on device"),
            r"Checkpoint 2 could not be saved under .*No space left.*needs 0\.07 GB",
        ),
        (ValueError("odd"), "Saving the actor failed: ValueError: odd"),
    ],
)
def test_a_failure_is_heard_at_the_next_step_and_the_one_before_stays(store, failure, words):
    store.save(1, {"actor": Role(make_state(1))}, {"step": 1})
    store.save(2, {"actor": Role(make_state(2), failure=failure), "critic": Role(make_state(3))}, {"step": 2})
    assert wait_until(lambda: store._error is not None)
    with pytest.raises(CheckpointError, match=words):
        store.check()
    store.check()
    assert store.find() == store.store.path(1)
    assert not [p for p in store.root.iterdir() if p.name.startswith(".")]
    store.save(3, {"actor": Role(make_state(3))}, {"step": 3})
    store.finish()
    assert store.find() == store.store.path(3)


def test_the_next_save_waits_for_the_one_before(store):
    gate = threading.Event()
    store.save(1, {"actor": Role(make_state(1), gate)}, {"step": 1})
    threading.Timer(0.1, gate.set).start()
    store.save(2, {"actor": Role(make_state(2))}, {"step": 2})
    assert store.store.path(1).exists()
    store.finish()
    assert store.find() == store.store.path(2)


def test_waiting_has_a_deadline(tmp_path):
    store, gate = BackgroundStore(CheckpointStore(tmp_path), timeout_s=0.1), threading.Event()
    store.save(1, {"actor": Role(make_state(1), gate)}, {"step": 1})
    with pytest.raises(DeadlineError, match=r"Writing .*actor has not ended within 0\.1 s\. Check the disk"):
        store.finish()
    assert wait_until(lambda: not store._thread.is_alive())
    with pytest.raises(CheckpointError, match=r"has not finished within 0\.1 s \(trainer\.call_timeout_s\)"):
        store.finish()
    gate.set()


def test_no_room_is_said_at_once(store, monkeypatch):
    monkeypatch.setattr("shutil.disk_usage", lambda path: type("usage", (), {"free": 10})())
    with pytest.raises(CheckpointError, match="nothing was written"):
        store.save(1, {"actor": Role(make_state(1))}, {})
    store.finish()
    with pytest.raises(CheckpointError, match="state cannot be saved as JSON"):
        store.save(1, {"actor": Role(make_state(1))}, {"x": object()})


def test_a_run_that_ends_by_an_error_finishes_its_save(store):
    gate = threading.Event()
    store.save(1, {"actor": Role(make_state(1), gate)}, {"step": 1})
    threading.Timer(0.1, gate.set).start()
    store.close()
    assert store.store.path(1).exists()


def test_a_save_without_progress_is_abandoned_at_the_end(store, monkeypatch, caplog):
    monkeypatch.setattr(background, "_STALLED_S", 0.1)
    gate = threading.Event()
    store.save(1, {"actor": Role(make_state(1), gate)}, {"step": 1})
    store.close()
    assert "Checkpoint 1 is abandoned" in caplog.text
    gate.set()


def test_a_role_without_copies_is_written_at_once(store):
    class Direct(Role):
        def begin(self, folder):
            write_and_report(self.role, folder)

        def end(self, timeout_s):
            pass

    store.save(1, {"actor": Direct(make_state(1))}, {})
    store.finish()
    assert_same_state(read_checkpoint(store.find()).roles["actor"], make_state(1))
