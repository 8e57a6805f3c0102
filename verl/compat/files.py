"""`verl.utils.fs`: model and data folders as recipes fetch them. Everything is on a mounted file system here."""

from __future__ import annotations

import hashlib
import logging
import os
import shutil
from pathlib import Path

from verl.errors import ConfigError

log = logging.getLogger(__name__)

SHARED_MEMORY = Path("/dev/shm")


def is_non_local(path: str) -> bool:
    """Whether `path` names a remote file system (`hdfs://...`, `s3://...`)."""
    return "://" in path and not path.startswith("file://")


def copy_to_local(
    src: str,
    cache_dir: str | None = None,
    filelock: str = ".file.lock",
    verbose: bool = False,
    always_recopy: bool = False,
    use_shm: bool = False,
) -> str:
    """The path under which `src` can be read on this machine: `src` itself, with `~` expanded, or a hub name as it is.

    With `use_shm` a folder or file is copied to shared memory once, and the path of that copy is returned; where it does not
    fit, `src` is returned with a warning. `always_recopy` makes that copy again. The other arguments belong to downloads, which
    there are none of. Raises ConfigError for a remote place.
    """
    if is_non_local(src):
        raise ConfigError(f"{src} is not in the file system, and verl has no client for it. Give a mounted folder.")
    path = os.path.expanduser(src.removeprefix("file://"))
    if use_shm and os.path.exists(path):
        return _copy_to_shared_memory(Path(path), always_recopy)
    return path if os.path.exists(path) else src.removeprefix("file://")


copy_local_path_from_hdfs = copy_to_local


def local_mkdir_safe(path: str) -> str:
    """Make the folder `path` with its parents, relative to the working directory; returns its absolute path. Several
    processes may do so at once."""
    path = os.path.abspath(os.path.expanduser(path))
    os.makedirs(path, exist_ok=True)
    return path


def _copy_to_shared_memory(source: Path, again: bool) -> str:
    """Written under another name and renamed, so that no process reads half a copy."""
    source = source.absolute()
    target = SHARED_MEMORY / f"verl-{os.getuid()}" / hashlib.sha256(str(source).encode()).hexdigest()[:16] / source.name
    if target.exists() and not again:
        return str(target)
    unfinished = target.with_name(f".{source.name}.{os.getpid()}")
    try:
        target.parent.mkdir(parents=True, exist_ok=True)
        if source.is_dir():
            shutil.copytree(source, unfinished)
        else:
            shutil.copy(source, unfinished)
        _replace(unfinished, target)
    except OSError as error:
        log.warning("%s could not be copied to shared memory (%s); it is read from where it is.", source, error)
        return str(source)
    finally:
        _remove(unfinished)
    return str(target)


def _replace(new: Path, target: Path) -> None:
    if target.is_dir():  # a folder cannot be renamed onto another
        _remove(target)
    os.replace(new, target)


def _remove(path: Path) -> None:
    if path.is_dir():
        shutil.rmtree(path, ignore_errors=True)
    elif path.exists():
        path.unlink()
