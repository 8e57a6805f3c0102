"""Faults of a save: it is killed between any two operations, or the disk refuses one.

Nothing here knows the operations of a save. `DiskStates` looks at the folder around every call of C code that can touch a
file, in every thread, and keeps each content that the folder has had; `Refusals` stands in front of every function of the
operating system that a save was seen to call.
"""

import builtins
import errno
import io
import os
import shutil
import sys
import threading
from pathlib import Path

import pytest

from tests.checkpoint.states import make_roles, read_checkpoint
from verl.checkpoint.files import read_document
from verl.checkpoint.store import CheckpointStore
from verl.manifest import MANIFEST

State = dict[str, bytes | None]  # path -> content, None for a folder

_NO_FILES = {"getpid", "fspath", "getcwd", "urandom", "getppid", "_path_normpath"}
_READING = {
    "stat", "lstat", "scandir", "listdir", "access", "readlink", "statvfs", "close", "open for reading", "read", "preadv",
}  # fmt: skip


def state_of(root: Path) -> State:
    """The content of everything under `root`."""
    state: State = {}
    for folder, folders, files in os.walk(root):
        base = os.path.relpath(folder, root)
        for name in folders:
            state[os.path.normpath(os.path.join(base, name))] = None
        for name in files:
            with open(os.path.join(folder, name), "rb") as file:
                state[os.path.normpath(os.path.join(base, name))] = file.read()
    return state


def _outline(folder: str) -> list:
    """Names, sizes and times of everything under `folder`: what changes when a content does."""
    outline = []
    with os.scandir(folder) as entries:
        for entry in entries:
            status = entry.stat(follow_symlinks=False)
            outline.append((entry.path, status.st_ino, status.st_size, status.st_mtime_ns))
            if entry.is_dir(follow_symlinks=False):
                outline += _outline(entry.path)
    return outline


def put(state: State, root: Path) -> Path:
    """Make `root` hold exactly `state`."""
    shutil.rmtree(root, ignore_errors=True)
    root.mkdir(parents=True)
    for name in sorted(state):
        if state[name] is None:
            (root / name).mkdir(parents=True, exist_ok=True)
        else:
            (root / name).parent.mkdir(parents=True, exist_ok=True)
            (root / name).write_bytes(state[name])
    return root


class DiskStates:
    """While entered, collects in `states` every content of `root`, in order, each with the next call. A
    file that has grown is also seen half grown, as a kill inside the write leaves it."""

    def __init__(self, root: Path):
        self.root = root
        self.states: list[tuple[str, State]] = []
        self.calls: set[str] = set()
        self._outline: list = []
        self._lock = threading.Lock()

    def __enter__(self) -> "DiskStates":
        self.look("the beginning")
        threading.setprofile(self._event)
        sys.setprofile(self._event)
        return self

    def __exit__(self, *error) -> None:
        sys.setprofile(None)
        threading.setprofile(None)
        self.look("the end")

    def _event(self, frame, event, function) -> None:
        if event != "c_call":
            return
        owner = getattr(function, "__self__", None)
        module = getattr(function, "__module__", None) or type(owner).__module__
        if module in ("posix", "io", "_io"):
            name = function.__name__
            if module == "posix" and name not in _NO_FILES:
                self.calls.add(name)
            self.look(name)

    def look(self, call: str) -> None:
        with self._lock:
            try:
                outline = sorted(_outline(str(self.root)))
                if outline == self._outline:
                    return
                now = state_of(self.root)
            except FileNotFoundError:
                return  # another thread is removing a path that is read here; its next call shows the outcome
            old_inodes = {inode for _, inode, _, _ in self._outline}
            moved = {os.path.relpath(path, self.root) for path, inode, _, _ in outline if inode in old_inodes}
            self._outline = outline
            before = self.states[-1][1] if self.states else None
            if now == before:
                return
            for name, content in now.items() if before is not None else ():
                old = before.get(name) or b""
                was_here = name in before or name not in moved  # else it has been renamed, whole as it is
                if content is not None and was_here and len(content) > len(old) + 1 and content.startswith(old):
                    half = content[: (len(old) + len(content)) // 2]
                    self.states.append((f"inside {call}", {**now, name: half}))
            self.states.append((call, now))


class Refusals:
    """While entered, file operation number `at` fails with `code`; with `lasting`, so do all after it. `at=None` counts."""

    def __init__(self, calls: set[str], at: int | None, code: int = errno.EIO, *, lasting: bool = False):
        self.calls, self.at, self.code, self.lasting = calls, at, code, lasting
        self.names: list[str] = []
        self._patch = pytest.MonkeyPatch()

    def __enter__(self) -> "Refusals":
        for name, function in list(vars(os).items()):
            if name in self.calls or name == "fsync":  # tests have replaced these by quicker ones
                self._patch.setattr(os, name, self._wrapped(name, function))
        self._open = io.open
        self._patch.setattr(builtins, "open", self.open)
        self._patch.setattr(io, "open", self.open)
        return self

    def __exit__(self, *error) -> None:
        self._patch.undo()

    def meet(self, name: str) -> None:
        if self.code != errno.EIO and name in _READING:
            return  # a full disk can be read
        number = len(self.names)
        self.names.append(name)
        if self.at is not None and (number == self.at or (self.lasting and number > self.at)):
            raise OSError(self.code, os.strerror(self.code))

    def _wrapped(self, name, function):
        def call(*args, **kwargs):
            if name == "close":
                function(*args, **kwargs)  # closed all the same, or the test would run out of descriptors
                return self.meet(name)
            self.meet("open for reading" if name == "open" and args[1] & os.O_ACCMODE == os.O_RDONLY else name)
            return function(*args, **kwargs)

        return call

    def open(self, path, mode="r", *args, **kwargs):
        writes = bool(set(mode) & set("wxa+"))
        self.meet("open" if writes else "open for reading")
        return _File(self._open(path, mode, *args, **kwargs), self)


class _File:
    """A file with reads and writes that can be refused; a refused write has written half of its data."""

    def __init__(self, file, refusals):
        self._file, self._refusals = file, refusals

    def __getattr__(self, name):
        return getattr(self._file, name)

    def __enter__(self):
        return self

    def __exit__(self, *error):
        self._file.close()

    def __iter__(self):
        return iter(self._file)

    def read(self, *args):
        self._refusals.meet("read")
        return self._file.read(*args)

    def readinto(self, buffer):
        self._refusals.meet("read")
        return self._file.readinto(buffer)

    def write(self, data):
        try:
            self._refusals.meet("write")
        except OSError:
            self._file.write(data[: len(data) // 2])
            raise
        return self._file.write(data)


def identity(root: Path):
    """Trainer state and digests of all files of the checkpoint that a restarted run loads, verified by `find`."""
    store = CheckpointStore(root)
    path = store.find()
    if path is None:
        return None
    return read_checkpoint(path).trainer_state, read_document(path / MANIFEST)["files"]


def leftovers(root: Path) -> list[str]:
    return [path.name for path in root.iterdir() if path.name.startswith(".")]


def save(root: Path, step: int, seed: int | None = None, keep: int | None = None) -> None:
    CheckpointStore(root, keep=keep).save(
        step, make_roles(step if seed is None else seed), {"step": step, "seed": seed}
    )
