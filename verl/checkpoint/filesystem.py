"""What the file system of a run folder can do of what a save relies on: found out by trying, and by its kind.

A save needs that a folder and a file can be renamed, that a file can be replaced by renaming another over it, and that what
was written is read back. Without that there are no checkpoints, and the folder is refused. Whether data are on the disk when
fsync returns, whether a rename happens at once, and whether locks hold cannot be tried; there the kind of the file system
says what to expect, and the digests in each manifest tell a half-made checkpoint from a whole one anyway.
"""

from __future__ import annotations

import fcntl
import os
import re
import socket
from dataclasses import dataclass, field
from pathlib import Path

import psutil

from verl.checkpoint.files import remove_tree, sync_file, sync_folder
from verl.errors import CheckpointError

_NETWORK = (
    "nfs",
    "nfs4",
    "cifs",
    "smb3",
    "smbfs",
    "9p",
    "afs",
    "ceph",
    "ceph-fuse",
    "lustre",
    "gpfs",
    "beegfs",
    "glusterfs",
    "sshfs",
)
_OBJECT_STORES = (
    "gcsfuse",
    "s3fs",
    "goofys",
    "mountpoint-s3",
    "rclone",
    "blobfuse",
    "blobfuse2",
    "geesefs",
    "juicefs-s3",
)
_MEMORY = ("tmpfs", "ramfs", "devtmpfs")
_TEXT = b"what was written"


@dataclass(frozen=True)
class FolderReport:
    """`kind` is the file system's name ("ext4", "nfs4", "fuse.gcsfuse"), None where the operating system does not say.
    `refusals` are sentences on why no checkpoint can be kept there, `notices` on what does not hold there."""

    folder: Path
    kind: str | None
    refusals: list[str] = field(default_factory=list)
    notices: list[str] = field(default_factory=list)

    def require(self) -> None:
        """Raises CheckpointError when the folder cannot hold checkpoints."""
        if self.refusals:
            raise CheckpointError(
                f"The folder {self.folder} ({self.kind or 'unknown file system'}) cannot hold checkpoints: "
                f"{'; '.join(self.refusals)}. Set trainer.default_local_dir to a folder on another disk."
            )


def examine(folder: Path) -> FolderReport:
    """Try what a save does in `folder` (or, where it does not exist yet, in the nearest folder above it), with files of a
    few bytes that are gone afterwards."""
    there = next(p for p in (folder, *folder.absolute().parents) if p.is_dir())
    report = FolderReport(folder, kind_of(there))
    _by_kind(report)
    # of this host: processes of others, which may see the same folder, cannot be looked up here
    prefix = f".probe-{_host()}-"
    probe = there / f"{prefix}{os.getpid()}"
    try:
        for left in there.glob(".probe-*"):
            process = left.name.removeprefix(prefix)
            if process.isdigit() and not psutil.pid_exists(int(process)):
                remove_tree(left)  # of a process that was killed in here
        remove_tree(probe)
        probe.mkdir()
    except OSError as error:
        report.refusals.append(f"a folder cannot be made in {there} ({error.strerror})")
        return report
    try:
        for what, trial in _TRIALS:
            try:
                trial(probe, report)
            except OSError as error:
                report.refusals.append(f"{what} fails ({error.strerror})")
    finally:
        try:
            remove_tree(probe)
        except OSError as error:
            report.notices.append(f"{probe} could not be removed ({error.strerror})")
    return report


def _host() -> str:
    return re.sub(r"[^A-Za-z0-9_.-]", "_", socket.gethostname())[:64]


def kind_of(path: Path) -> str | None:
    """The file system that `path` lies on, from the table of mounts; None where there is none to read (macOS)."""
    try:
        lines = Path("/proc/self/mountinfo").read_text(encoding="utf-8").splitlines()
    except OSError:
        return None
    wanted = os.path.realpath(path)
    best, kind = -1, None
    for line in lines:
        before, _, after = line.partition(" - ")
        if not after:
            continue
        place = re.sub(r"\\([0-7]{3})", lambda match: chr(int(match[1], 8)), before.split()[4])  # a space is \040
        inside = wanted == place or wanted.startswith(place.rstrip("/") + "/")
        if inside and len(place) >= best:  # of two mounts on one place the later one is seen
            best, kind = len(place), after.split()[0]
    return kind


def _by_kind(report: FolderReport) -> None:
    kind = report.kind or ""
    bare = kind.removeprefix("fuse.")  # what a process in user space serves
    if bare in _NETWORK:
        report.notices.append(
            f"{kind} is a network file system: two hosts are not kept from using one run folder if its locks do not work, "
            "and what is read back after a save may come from this host's memory"
        )
    elif bare in _OBJECT_STORES:
        report.notices.append(
            f"{kind} renames a folder file by file: a run killed in that moment loses the save it was making, and goes on "
            "from the one before"
        )
    elif kind in _MEMORY:
        report.notices.append(f"{kind} lies in memory: checkpoints there are gone when the machine restarts")


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
        report.refusals.append("a folder does not move with what is in it")


def _locks(probe: Path, report: FolderReport) -> None:
    with (probe / "file").open() as file:
        try:
            fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except OSError as error:
            report.notices.append(
                f"files cannot be locked ({error.strerror}): two runs that are started at the same time may share the folder"
            )


def _syncs_folder(probe: Path, report: FolderReport) -> None:
    if not sync_folder(probe):
        report.notices.append("folders cannot be synced: after a power cut the newest checkpoint may be missing")


_TRIALS = (
    ("writing a file onto the disk (fsync)", _reads_back),
    ("renaming a file over another", _replaces),
    ("renaming a folder", _renames_folder),
    ("locking a file", _locks),
    ("syncing a folder", _syncs_folder),
)
