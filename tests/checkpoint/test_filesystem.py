"""Trials of a run folder's file system, and what follows from them."""

import errno
import os
from pathlib import Path
from types import SimpleNamespace

import pytest

from tests.checkpoint.states import make_roles
from verl.checkpoint import filesystem
from verl.checkpoint.filesystem import examine_folder
from verl.checkpoint.store import CheckpointStore
from verl.errors import CheckpointError
from verl.tracking.files import file_system_of

pytestmark = pytest.mark.seed("F1")

MOUNTS = (
    ("/", "ext4"),
    ("/mnt/my data", "nfs4"),
    ("/mnt/bucket", "fuse.gcsfuse"),
    ("/mnt/over", "ext4"),
    ("/mnt/over", "cifs"),
)


def refuse(code):
    def call(*args, **kwargs):
        raise OSError(code, os.strerror(code))

    return call


def test_a_good_folder(tmp_path):
    report = examine_folder(tmp_path / "not" / "there" / "yet")
    report.require()
    assert report.refusals == []
    assert list(tmp_path.iterdir()) == []


@pytest.mark.parametrize(
    ("path", "kind"),
    [
        ("/mnt/my data/run", "nfs4"),
        ("/mnt/bucket", "fuse.gcsfuse"),
        ("/mnt/over/a", "cifs"),
        ("/mnt/bucketful", "ext4"),
    ],
)
def test_kinds_come_from_the_table_of_mounts(monkeypatch, path, kind):
    mounts = [SimpleNamespace(mountpoint=place, fstype=name) for place, name in MOUNTS]
    monkeypatch.setattr("psutil.disk_partitions", lambda all: mounts)
    assert file_system_of(Path(path)) == kind


@pytest.mark.parametrize(
    ("kind", "words"),
    [
        ("nfs4", "network file system"),
        ("fuse.sshfs", "network file system"),
        ("fuse.gcsfuse", "file by file"),
        ("tmpfs", "in memory"),
        ("ext4", ""),
        ("lustre", ""),
    ],
)
def test_kinds_that_need_a_word(monkeypatch, tmp_path, kind, words):
    monkeypatch.setattr(filesystem, "file_system_of", lambda path: kind)
    report = examine_folder(tmp_path)
    assert report.refusals == []
    assert len(report.notices) == bool(words)
    assert words in "".join(report.notices)


@pytest.mark.parametrize(
    ("name", "code", "words"),
    [
        ("rename", errno.ENOSYS, "renaming a folder fails"),
        ("replace", errno.EEXIST, "renaming a file over another fails"),
        ("mkdir", errno.EROFS, "a folder cannot be made in"),
        ("fsync", errno.EIO, "fsync"),
    ],
)
def test_folders_that_cannot_hold_checkpoints_are_refused(monkeypatch, tmp_path, name, code, words):
    monkeypatch.setattr(os, name, refuse(code))
    report = examine_folder(tmp_path)
    monkeypatch.undo()
    assert words in "; ".join(report.refusals)
    with pytest.raises(CheckpointError, match=rf"{tmp_path}.*cannot hold checkpoints.*trainer\.default_local_dir"):
        report.require()
    assert list(tmp_path.iterdir()) == []


def test_a_replacement_that_does_not_happen_is_an_error(monkeypatch, tmp_path):
    monkeypatch.setattr(os, "replace", lambda source, target: None)
    assert "not replaced" in examine_folder(tmp_path).refusals[0]


@pytest.fixture
def no_folder_sync(monkeypatch):
    def fsync(descriptor):
        if os.path.isdir(f"/proc/self/fd/{descriptor}"):
            raise OSError(errno.EINVAL, "Invalid argument")

    monkeypatch.setattr(os, "fsync", fsync)


def test_folders_that_cannot_be_synced_are_saved_to(no_folder_sync, tmp_path):
    assert "cannot be synced" in examine_folder(tmp_path).notices[-1]
    store = CheckpointStore(tmp_path)
    assert store.save(1, make_roles(1), {}) == store.find()


def test_folders_without_locks_are_named(monkeypatch, tmp_path):
    monkeypatch.setattr("fcntl.flock", refuse(errno.ENOLCK))
    report = examine_folder(tmp_path)
    assert report.refusals == []
    assert "files cannot be locked (No locks available)" in report.notices[-1]


@pytest.mark.seed("G5")
def test_lustre_keeps_checkpoints_and_needs_its_locks(monkeypatch, tmp_path):
    monkeypatch.setattr(filesystem, "file_system_of", lambda path: "lustre")
    monkeypatch.setattr("fcntl.flock", refuse(errno.ENOSYS))
    (notice,) = examine_folder(tmp_path).notices
    assert notice.startswith("files cannot be locked (Function not implemented)")
    assert notice.endswith("Mount it with -o flock")


@pytest.mark.seed("G5")
def test_a_save_needs_no_hard_links(monkeypatch, tmp_path):
    monkeypatch.setattr(os, "link", refuse(errno.EPERM))
    assert examine_folder(tmp_path).refusals == []
    store = CheckpointStore(tmp_path, keep=1)
    for step in (1, 2):
        assert store.save(step, make_roles(step), {}) == store.find()


def test_a_rename_whose_answer_was_lost_has_happened(around, tmp_path):
    """A network file system asks again, and the server finds nothing to rename."""

    def rename(original, source, target):
        original(source, target)
        raise FileNotFoundError(errno.ENOENT, "No such file or directory")

    around(os, "rename", rename)
    store = CheckpointStore(tmp_path, keep=1)
    for step in (1, 2):
        assert store.save(step, make_roles(step), {}) == store.find()
    assert store.candidates() == [2]


def test_what_a_killed_examination_left_is_removed(tmp_path):
    stale, elsewhere = (tmp_path / f".probe-{host}-999999999" for host in (filesystem._host(), "another"))
    for folder in (stale, elsewhere):
        folder.mkdir()
        (folder / "file").write_text("x")
    assert examine_folder(tmp_path).refusals == []
    assert list(tmp_path.iterdir()) == [elsewhere]  # of a process that cannot be looked up here
