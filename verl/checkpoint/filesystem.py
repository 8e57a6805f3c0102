"""Checks of a run folder's file system: the operations that a save needs, tried with small files, and the file system's type.

A save needs renames of folders and files, replacement of a file by rename, and reads that return the written bytes. Without
them the folder is rejected. Hard links are not needed. Durability of fsync, atomicity of renames and locks cannot be tried: the
type of the file system tells what to expect, and the digests in each manifest reveal an incomplete checkpoint anyway.
"""

import fcntl
import os
import re
import socket
from dataclasses import dataclass, field
from pathlib import Path

import psutil

from verl.checkpoint.files import remove_tree
from verl.errors import CheckpointError
from verl.regular_files import sync_file, sync_folder
from verl.tracking.files import NETWORK_FILE_SYSTEMS, file_system_of

_OBJECT_STORES = tuple("gcsfuse s3fs goofys mountpoint-s3 rclone blobfuse geesefs juicefs-s3".split())
_COHERENT = ("lustre",)  # every host sees what another has written, as POSIX says
_MEMORY = ("tmpfs", "ramfs", "devtmpfs")
_TEXT = b"what was written"


@dataclass(frozen=True)
class FolderReport:
    """`kind` is the type of the file system ("ext4", "nfs4", "fuse.gcsfuse"), "" if the operating system does not tell.
    `refusals` are reasons why no checkpoint can be kept there, `notices` are guarantees that do not hold there."""

    folder: Path
    kind: str
    refusals: list[str] = field(default_factory=list)
    notices: list[str] = field(default_factory=list)

    def require(self) -> None:
        """Raises CheckpointError when the folder cannot hold checkpoints."""
        if self.refusals:
            raise CheckpointError(
                f"The folder {self.folder} ({self.kind or 'unknown file system'}) cannot hold checkpoints: "
                f"{'; '.join(self.refusals)}. Set trainer.default_local_dir to a folder on another disk."
            )


def examine_folder(folder: Path) -> FolderReport:
    """Try the operations of a save in `folder`, or in its nearest existing parent, with files of a few bytes. All of them
    are removed again."""
    existing = next(p for p in (folder, *folder.absolute().parents) if p.is_dir())
    report = FolderReport(folder, file_system_of(existing))
    _judge_kind(report)
    # with the host's name: processes of other hosts that see the same folder cannot be looked up here
    prefix = f".probe-{_host()}-"
    probe = existing / f"{prefix}{os.getpid()}"
    try:
        for leftover in existing.glob(".probe-*"):
            process = leftover.name.removeprefix(prefix)
            if process.isdigit() and not psutil.pid_exists(int(process)):
                remove_tree(leftover)  # of a process that was killed in here
        remove_tree(probe)
        probe.mkdir()
    except OSError as error:
        report.refusals.append(f"a folder cannot be made in {existing} ({error.strerror})")
        return report
    try:
        for operation, trial in _TRIALS:
            try:
                trial(probe, report)
            except OSError as error:
                report.refusals.append(f"{operation} fails ({error.strerror})")
    finally:
        try:
            remove_tree(probe)
        except OSError as error:
            report.notices.append(f"{probe} could not be removed ({error.strerror})")
    return report


def _host() -> str:
    return re.sub(r"[^A-Za-z0-9_.-]", "_", socket.gethostname())[:64]


def _judge_kind(report: FolderReport) -> None:
    kind = report.kind
    bare = kind.removeprefix("fuse.")  # a file system that a user-space process serves
    if bare.startswith(_COHERENT):
        return  # its locks, if it has any, are tried below
    if bare.startswith(NETWORK_FILE_SYSTEMS):
        report.notices.append(
            f"{kind} is a network file system: if its locks do not work, two hosts may use one run folder; and the check "
            "after a save may read this host's cache"
        )
    elif bare.startswith(_OBJECT_STORES):
        report.notices.append(
            f"{kind} renames a folder file by file: a run killed in that moment loses the save in progress, and resumes "
            "from the one before"
        )
    elif kind in _MEMORY:
        report.notices.append(f"{kind} is in memory: checkpoints there are lost when the machine restarts")


def _reads_back(probe: Path, report: FolderReport) -> None:
    (probe / "file").write_bytes(_TEXT)
    sync_file(probe / "file")
    if (probe / "file").read_bytes() != _TEXT:
        report.refusals.append("a file does not hold what was written to it")


def _replaces(probe: Path, report: FolderReport) -> None:
    (probe / "new").write_bytes(_TEXT[::-1])
    os.replace(probe / "new", probe / "file")
    if (probe / "file").read_bytes() != _TEXT[::-1] or (probe / "new").exists():
        report.refusals.append("a file is not replaced when another is renamed over it")


def _renames_folder(probe: Path, report: FolderReport) -> None:
    (probe / "a").mkdir()
    (probe / "a" / "file").write_bytes(_TEXT)
    os.rename(probe / "a", probe / "b")
    if not (probe / "b" / "file").exists() or (probe / "a").exists():
        report.refusals.append("a folder does not move with its content")


def _locks(probe: Path, report: FolderReport) -> None:
    with (probe / "file").open() as file:
        try:
            fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except OSError as error:
            report.notices.append(
                f"files cannot be locked ({error.strerror}): two runs that are started at the same time may share the folder"
                + (". Mount it with -o flock" if report.kind.startswith(_COHERENT) else "")
            )


def _syncs_folder(probe: Path, report: FolderReport) -> None:
    if not sync_folder(probe):
        report.notices.append("folders cannot be synced: after a power cut the newest checkpoint may be missing")


_TRIALS = (
    ("syncing a file (fsync)", _reads_back),
    ("renaming a file over another", _replaces),
    ("renaming a folder", _renames_folder),
    ("locking a file", _locks),
    ("syncing a folder", _syncs_folder),
)
