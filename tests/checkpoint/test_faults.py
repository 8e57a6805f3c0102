"""A save stopped or refused at every single file operation: the newest complete checkpoint always loads."""

import builtins
import errno
import io
import os

import pytest

from tests.checkpoint.states import assert_same_state, make_roles, make_state
from verl.checkpoint.store import CheckpointStore
from verl.errors import CheckpointError

OPERATIONS = ("mkdir", "rename", "replace", "unlink", "remove", "rmdir", "fsync", "open")


class Killed(BaseException):
    """The process is dead from here on: nothing catches this, and no later operation happens."""


class Faults:
    """Counts file operations; the one numbered `at` fails. `fatal`: so do all after it, as if the process were gone. A
    write that fails leaves half of its bytes."""

    def __init__(self, at: int | None, fatal: bool, code: int = errno.ENOSPC):
        self.at, self.fatal, self.code = at, fatal, code
        self.count = 0
        self.names: list[str] = []

    def hit(self, name: str) -> bool:
        self.names.append(name)
        number, self.count = self.count, self.count + 1
        return self.at is not None and (number == self.at or (self.fatal and number > self.at))

    def fail(self):
        raise Killed if self.fatal else OSError(self.code, os.strerror(self.code))

    def wrap(self, name, function):
        def call(*args, **kwargs):
            if self.hit(name):
                self.fail()
            return None if name == "fsync" else function(*args, **kwargs)

        return call

    def open(self, path, mode="r", *args, **kwargs):
        writes = set(mode) & set("wxa+")
        if writes and self.hit("open for writing"):
            self.fail()
        file = REAL_OPEN(path, mode, *args, **kwargs)
        return Writer(file, self) if writes else file


class Writer:
    def __init__(self, file, faults):
        self._file, self._faults = file, faults

    def __getattr__(self, name):
        return getattr(self._file, name)

    def __enter__(self):
        return self

    def __exit__(self, *error):
        self._file.close()

    def write(self, data):
        if self._faults.hit("write"):
            if not self._faults.fatal or self._faults.count == self._faults.at + 1:
                self._file.write(data[: len(data) // 2])
            self._faults.fail()
        return self._file.write(data)


REAL_OPEN = io.open


def run_with(faults: Faults, action) -> BaseException | None:
    """Run `action` under `faults`; what it raised."""
    with pytest.MonkeyPatch.context() as patch:
        for name in OPERATIONS:
            patch.setattr(os, name, faults.wrap(name, getattr(os, name)))
        patch.setattr(builtins, "open", faults.open)
        patch.setattr(io, "open", faults.open)
        try:
            action()
        except (Killed, CheckpointError, OSError) as error:
            return error
    return None


def first_save(root):
    """Nothing there yet."""
    return None, 3


def after_another(root):
    """Two older ones, of which the save removes one."""
    for step in (1, 2):
        CheckpointStore(root).save(step, make_roles(step), {"step": step})
    return 2, 3


def over_a_damaged_one(root):
    """The step that is saved has a damaged folder in its place."""
    for step in (2, 3):
        CheckpointStore(root).save(step, make_roles(step + 40), {"step": step})
    (root / "global_step_3" / "trainer_state.json").write_text("broken")
    return 2, 3


def over_a_good_one(root):
    """The step that is saved is there already."""
    CheckpointStore(root).save(3, make_roles(77), {"step": "older 3"})
    return 3, 3


SCENES = {f.__name__: f for f in (first_save, after_another, over_a_damaged_one, over_a_good_one)}


def snapshot(root):
    """(trainer state, actor state) of the newest complete checkpoint, as a restarted run finds it; None when there is
    none."""
    store = CheckpointStore(root)
    found = store.find()
    if found is None:
        return None
    loaded = store.load(found)
    return loaded.trainer_state, loaded.roles["actor"]


def same(a, b):
    if a is None or b is None:
        return a is b
    try:
        assert a[0] == b[0]
        assert_same_state(a[1], b[1])
    except AssertionError:
        return False
    return True


@pytest.mark.parametrize("fatal", [True, False], ids=["killed", "no space"])
@pytest.mark.parametrize("scene", SCENES)
def test_every_operation_can_fail(scene, fatal, tmp_path, monkeypatch):
    monkeypatch.setattr(os, "fsync", lambda descriptor: None)
    new = ({"step": 3}, make_state(3))
    at, total = 0, 1
    while at < total:
        root = tmp_path / str(at)
        root.mkdir()
        SCENES[scene](root)
        before = snapshot(root)
        store = CheckpointStore(root, keep=1)
        faults = Faults(at, fatal)
        error = run_with(faults, lambda: store.save(3, make_roles(3), {"step": 3}))
        if at == 0:
            counted = Faults(None, fatal)
            other = tmp_path / "counted"
            other.mkdir()
            SCENES[scene](other)
            run_with(counted, lambda: CheckpointStore(other, keep=1).save(3, make_roles(3), {"step": 3}))
            total = counted.count
            assert same(snapshot(other), new)
            assert {"write", "rename", "fsync"} <= set(counted.names)
        after = snapshot(root)
        place = f"operation {at} of {total}: {faults.names[at]}"
        assert same(after, new) or same(after, before), place
        if error is None:
            assert same(after, new), place
        elif not fatal:
            assert isinstance(error, CheckpointError), place
        # a restarted run leaves nothing of the failed one behind
        assert not [p.name for p in root.iterdir() if p.name.startswith(".global_step")], place
        # and goes on saving
        CheckpointStore(root, keep=1).save(4, make_roles(4), {"step": 4})
        assert same(snapshot(root), ({"step": 4}, make_state(4))), place
        at += 1
    assert total > 20


def test_error_of_the_disk_is_a_sentence(tmp_path, monkeypatch):
    monkeypatch.setattr(os, "fsync", lambda descriptor: None)
    store = CheckpointStore(tmp_path)
    store.save(1, make_roles(1), {"step": 1})
    error = run_with(Faults(12, fatal=False), lambda: store.save(2, make_roles(2), {"step": 2}))
    assert "Checkpoint 2 could not be saved" in str(error)
    assert "No space left on device" in str(error)
    assert "global_step_1" in str(error)


def test_start_can_be_killed_while_it_cleans_up(tmp_path, monkeypatch):
    monkeypatch.setattr(os, "fsync", lambda descriptor: None)
    for at in range(8):
        root = tmp_path / str(at)
        CheckpointStore(root).save(1, make_roles(1), {"step": 1})
        CheckpointStore(root).save(2, make_roles(2), {"step": 2})
        os.rename(root / "global_step_2", root / ".global_step_2.old-17")
        CheckpointStore(tmp_path / "other").save(3, make_roles(3), {"step": 3})
        os.rename(tmp_path / "other" / "global_step_3", root / ".global_step_3.tmp-17")
        run_with(Faults(at, fatal=True), lambda: CheckpointStore(root))
        assert same(snapshot(root), ({"step": 2}, make_state(2)))
        assert not [p for p in root.iterdir() if p.name.startswith(".")]
