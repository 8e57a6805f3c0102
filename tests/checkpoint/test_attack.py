"""A save killed at any moment, or refused any operation: the newest complete checkpoint always loads.

pytest -m slow tests/checkpoint/test_attack.py     every operation of every scene, and kills of real processes
"""

import errno
import os
import shutil
import signal
import sys
import threading

import pytest

from tests.checkpoint.attack import DiskStates, Refusals, identity, leftovers, put, save, state_of
from tests.checkpoint.states import Background, make_roles
from verl import manifest
from verl.checkpoint.background import BackgroundStore
from verl.checkpoint.store import CheckpointStore
from verl.errors import CheckpointError
from verl.manifest import find_damage


def nothing_yet(root):
    root.mkdir()


def after_others(root):
    """Two older ones; the save removes one of them."""
    save(root, 1)
    save(root, 2)


def over_a_damaged_one(root):
    """The step that is saved has a damaged folder in its place."""
    save(root, 2, seed=42)
    save(root, 3, seed=43)
    (root / "global_step_3" / "trainer_state.json").write_text("broken")


def over_a_good_one(root):
    """The step that is saved is there already."""
    save(root, 3, seed=77)


def before_a_later_one(root):
    """A run that was started again from step 1 saves step 3; the earlier run has left step 10."""
    save(root, 1)
    save(root, 10)


SCENES = {f.__name__: f for f in (nothing_yet, after_others, over_a_damaged_one, over_a_good_one, before_a_later_one)}


def attacked_save(root):
    CheckpointStore(root, keep=1).save(3, make_roles(3), {"step": 3})


def attacked_background_save(root):
    store = BackgroundStore(CheckpointStore(root, keep=1), timeout_s=30)
    store.save(3, {name: Background(role) for name, role in make_roles(3).items()}, {"step": 3})
    store.finish()


def expected(scene, tmp_path):
    """(state of the folder before the save; identities of the checkpoint to resume from before it, once an earlier run's later
    checkpoint is set aside, and after it)."""
    root = tmp_path / "expected"
    SCENES[scene](root)
    content, phases = state_of(root), [identity(root)]
    if scene == "before_a_later_one":  # then the run resumes from the checkpoint it started from
        save(tmp_path / "started", 1)
        phases.append(identity(tmp_path / "started"))
    attacked_save(root)
    return content, [*phases, identity(root)]


ALL = [(action, scene) for action in (attacked_save, attacked_background_save) for scene in SCENES]
BY_DEFAULT = [(attacked_save, "after_others"), (attacked_save, "before_a_later_one"), (attacked_save, "over_a_good_one"),
              (attacked_background_save, "over_a_damaged_one")]  # fmt: skip


@pytest.mark.parametrize(
    ("action", "scene"), [pytest.param(*case, marks=[] if case in BY_DEFAULT else pytest.mark.slow) for case in ALL]
)
def test_killed_at_any_moment(scene, action, tmp_path):
    """Every state that the disk passes through; all scenes: pytest -m "slow or not slow" -k any_moment"""
    content, phases = expected(scene, tmp_path)
    root = put(content, tmp_path / "run")
    with DiskStates(root) as disk:
        action(root)
    assert identity(root) == phases[-1]
    assert not leftovers(root)
    assert len(disk.states) > 30
    reached = []
    for call, state in disk.states:
        put(state, root)
        reached.append(phases.index(identity(root)))
        assert not leftovers(root), call
        if len(reached) % 10 == 0:  # it continues to save
            save(root, 4)
            assert identity(root)[0]["step"] == 4, call
    assert reached == sorted(reached), "what counted once does not count any more"
    assert (reached[0], reached[-1]) == (0, phases.index(phases[-1]))


def test_killed_while_it_cleans_up(tmp_path):
    """A start after a kill is killed too."""
    save(tmp_path / "run", 1)
    save(tmp_path / "run", 2)
    before = identity(tmp_path / "run")
    content = state_of(tmp_path / "run")
    moved = {
        name.replace("global_step_2", place): data
        for place in (".global_step_2.old-17", ".global_step_9.tmp-17", ".global_step_1.removed-17")
        for name, data in content.items()
        if name.startswith("global_step_2")
    }
    remaining = {name: data for name, data in content.items() if not name.startswith("global_step_2")}
    root = put({**remaining, **moved, ".latest_checkpointed_iteration.txt.17.tmp": b"2"}, tmp_path / "again")
    with DiskStates(root) as disk:
        CheckpointStore(root)
    assert len(disk.states) > 20
    for call, state in disk.states:
        put(state, root)
        assert identity(root) == before, call
        assert not leftovers(root), call


REFUSALS = [(errno.ENOSPC, False), (errno.ENOSPC, True), (errno.EIO, False), (errno.EIO, True)]


def refuse_each(scene, code, lasting, tmp_path, every):
    """The save with each of its operations refused in turn, or each `every`-th; returns how many there are."""
    content, phases = expected(scene, tmp_path)
    root = put(content, tmp_path / "run")
    with DiskStates(root) as disk:
        attacked_save(root)
    root = put(content, tmp_path / "run")
    with Refusals(disk.calls, None, code) as counted:
        attacked_save(root)
    assert identity(root) == phases[-1]
    assert {"open", "write", "mkdir", "rename", "replace", "fsync"} <= set(counted.names)
    for at in range(code % every, len(counted.names), every):
        put(content, root)
        refused = Refusals(disk.calls, at, code, lasting=lasting)
        place = f"operation {at} of {len(counted.names)}, {counted.names[at]}"
        error = None
        try:
            with refused:
                attacked_save(root)
        except CheckpointError as caught:  # and nothing else
            error = caught
        reached = identity(root)
        assert reached in phases, place
        assert not leftovers(root), place
        if error is None:
            assert reached == phases[-1], place
        else:
            said = str(error)
            assert "Checkpoint 3" in said or "No checkpoint" in said, place
            assert (os.strerror(code) in said and str(root) in said) or "read" in said, (place, said)
    return len(counted.names)


@pytest.mark.parametrize(("code", "lasting", "every"), [(errno.ENOSPC, True, 9), (errno.EIO, False, 23)])
def test_the_disk_refuses(code, lasting, every, tmp_path):
    assert refuse_each("after_others", code, lasting, tmp_path, every) > 60


@pytest.mark.slow
@pytest.mark.parametrize(("code", "lasting"), REFUSALS, ids=["full once", "full", "error once", "error"])
@pytest.mark.parametrize("scene", SCENES)
def test_the_disk_refuses_every_operation(scene, code, lasting, tmp_path):
    """pytest -m slow tests/checkpoint/test_attack.py -k every_operation"""
    refuse_each(scene, code, lasting, tmp_path, every=1)


def test_a_full_disk_is_a_sentence(tmp_path, monkeypatch):
    save(tmp_path, 1)
    monkeypatch.setattr(manifest, "write_manifest", lambda *args: raise_full())
    with pytest.raises(CheckpointError) as caught:
        save(tmp_path, 2)
    said = str(caught.value)
    assert said.startswith(
        f"Checkpoint 2 could not be saved under {tmp_path}: No space left on device (it needs 0.07 GB, and "
    )
    assert "The newest beside it is global_step_1. Free some space" in said


def raise_full():
    raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))


def test_everything_is_on_the_disk_before_the_checkpoint_counts(tmp_path, monkeypatch, around):
    """A power cut leaves only synced data: all files and folders are synced before they are renamed."""
    save(tmp_path, 1)
    synced, checked = {}, []

    def fsync(descriptor):
        path = os.readlink(f"/proc/self/fd/{descriptor}")
        synced[path] = content(path)

    def content(path):
        if os.path.isdir(path):
            return sorted(os.listdir(path))
        with open(path, "rb") as file:
            return file.read()

    def rename(original, source, target):
        if ".tmp-" in str(source) and os.path.basename(target).startswith("global_step_"):
            for folder, _, files in os.walk(source):
                for path in (folder, *(os.path.join(folder, file) for file in files)):
                    assert synced.get(path) == content(path), path
                    checked.append(path)
        original(source, target)

    monkeypatch.setattr(os, "fsync", fsync)
    around(os, "rename", rename)
    save(tmp_path, 2)
    assert len(checked) > 8
    assert synced[str(tmp_path)] == content(tmp_path)  # and so is its final name


@pytest.mark.parametrize("keep", [1, 2])
def test_retention_counts_what_can_be_read(tmp_path, caplog, keep):
    """The newer ones rot on the disk, without a change of size: the last good one stays."""
    for step in (1, 2, 3):
        save(tmp_path, step)
    for step in (2, 3):
        file = tmp_path / f"global_step_{step}" / "actor" / "optimizer.safetensors"
        content = bytearray(file.read_bytes())
        content[-1] ^= 1
        file.write_bytes(content)
    save(tmp_path, 4, keep=keep)
    intact = [s for s in CheckpointStore(tmp_path).candidates() if find_damage(tmp_path / f"global_step_{s}") is None]
    assert intact == ([4] if keep == 1 else [4, 1])
    assert ("global_step_3 is damaged and does not count as kept" in caplog.text) == (keep == 2)
    shutil.rmtree(tmp_path / "global_step_4")
    if keep == 2:
        assert identity(tmp_path)[0]["step"] == 1


def test_a_checkpoint_that_was_taken_away_is_missed(tmp_path, caplog):
    save(tmp_path, 1)
    save(tmp_path, 2)
    (tmp_path / "global_step_2").rename(tmp_path / "global_step_2_backup")
    assert identity(tmp_path)[0]["step"] == 1
    assert "names step 2, and there is no global_step_2" in caplog.text
    shutil.rmtree(tmp_path / "global_step_1")
    with pytest.raises(CheckpointError, match=r"there is no global_step_2\)\. To start over"):
        CheckpointStore(tmp_path).find()


def killed_at(action, root, number):
    """Run `action` in a child that kills itself at the `number`-th call that can touch a file; return whether it did."""
    child = os.fork()
    if child == 0:
        count = 0
        lock = threading.Lock()

        def event(frame, kind, function):
            nonlocal count
            if kind != "c_call" or (getattr(function, "__module__", "") or "") not in ("posix", "io", "_io"):
                return
            with lock:
                count += 1
                if count > number:
                    os.kill(os.getpid(), signal.SIGKILL)

        try:
            threading.setprofile(event)
            sys.setprofile(event)
            action(root)
        finally:
            os._exit(0)
    _, status = os.waitpid(child, 0)
    return os.WIFSIGNALED(status)


def kill_processes(scene, action, tmp_path, every):
    content, phases = expected(scene, tmp_path)
    root, kills = tmp_path / "run", 0
    while killed_at(action, put(content, root), kills * every):
        assert identity(root) in phases
        assert not leftovers(root), kills * every
        kills += 1
    assert identity(root) == phases[-1]
    assert not leftovers(root)
    return kills


def test_processes_killed_while_they_save(tmp_path):
    assert kill_processes("after_others", attacked_save, tmp_path, every=40) >= 5


@pytest.mark.slow
@pytest.mark.parametrize("scene", SCENES)
@pytest.mark.parametrize("action", [attacked_save, attacked_background_save], ids=["plain", "background"])
def test_processes_killed_at_every_call(scene, action, tmp_path):
    """pytest -m slow tests/checkpoint/test_attack.py -k every_call"""
    assert kill_processes(scene, action, tmp_path, every=1) > 100
