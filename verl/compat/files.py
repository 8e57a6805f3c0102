"""Files, folders and checkpoints of scripts, all on mounted file systems: `verl.utils.fs`, `verl.utils.hdfs_io`,
`verl.utils.checkpoint.checkpoint_manager`."""

import hashlib
import logging
import os
import shutil
import time
from pathlib import Path

from verl.errors import ConfigError

log = logging.getLogger(__name__)

SHARED_MEMORY = Path("/dev/shm")

# environment variables with the end of a reserved machine's time, in seconds since 1970
_EXPIRATIONS = (
    "MLP_CURRENT_CAPACITY_BLOCK_EXPIRATION_TIMESTAMP",
    "SAGEMAKER_CURRENT_CAPACITY_BLOCK_EXPIRATION_TIMESTAMP",
)


def is_non_local(path: str) -> bool:
    """Whether `path` names a remote file system (`hdfs://...`, `s3://...`)."""
    return "://" in path and not path.startswith("file://")


def _local(path: str) -> str:
    """`path` without `file://`. Raises ConfigError for a remote path."""
    if is_non_local(path):
        raise ConfigError(f"{path} is not in the file system, and verl has no client for it. Give a mounted folder.")
    return path.removeprefix("file://")


# -- verl.utils.fs -----------------------------------------------------------------------------------------------------------


def copy_to_local(
    src: str,
    cache_dir: str | None = None,
    filelock: str = ".file.lock",
    verbose: bool = False,
    always_recopy: bool = False,
    use_shm: bool = False,
) -> str:
    """The local path of `src`: `src` itself with `~` expanded, or a hub name unchanged. With `use_shm` its copy in shared
    memory, made once or with `always_recopy` again; `src` if it does not fit. Other arguments concern downloads. Raises
    ConfigError for a remote path."""
    src = _local(src)
    path = os.path.expanduser(src)
    if use_shm and os.path.exists(path):
        return _copy_to_shared_memory(Path(path), always_recopy)
    return path if os.path.exists(path) else src


copy_local_path_from_hdfs = copy_to_local


def local_mkdir_safe(path: str) -> str:
    """Make the folder `path` with its parents; returns its absolute path. Several processes may do so at once."""
    path = os.path.abspath(os.path.expanduser(path))
    os.makedirs(path, exist_ok=True)
    return path


def _copy_to_shared_memory(source: Path, again: bool) -> str:
    """Copy under another name and rename, so that no process reads half a copy."""
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
        if target.is_dir():  # a folder cannot be renamed onto another
            _remove(target)
        os.replace(unfinished, target)
    except OSError as error:
        log.warning("Copying %s to shared memory failed (%s); the original is used.", source, error)
        return str(source)
    finally:
        _remove(unfinished)
    return str(target)


def _remove(path: Path) -> None:
    if path.is_dir():
        shutil.rmtree(path, ignore_errors=True)
    elif path.exists():
        path.unlink()


# -- verl.utils.hdfs_io ------------------------------------------------------------------------------------------------------


def makedirs(name: str, mode: int = 0o777, exist_ok: bool = True, **_other: object) -> None:
    """Make folder `name` with its parents. Raises ConfigError for a remote path."""
    os.makedirs(os.path.expanduser(_local(name)), mode=mode, exist_ok=exist_ok)


def exists(path: str, **_other: object) -> bool:
    """Whether there is a file or folder at `path`. Raises ConfigError for a remote path."""
    return os.path.exists(os.path.expanduser(_local(path)))


def copy(src: str, dst: str, **_other: object) -> str:
    """Copy a file or folder into the folder `dst`, or to the name `dst`; returns the new path. Raises ConfigError if remote."""
    src, dst = os.path.expanduser(_local(src)), os.path.expanduser(_local(dst))
    if not os.path.isdir(src):
        return str(shutil.copy(src, dst))
    target = os.path.join(dst, os.path.basename(src.rstrip("/"))) if os.path.isdir(dst) else dst
    return str(shutil.copytree(src, target, dirs_exist_ok=True))


# -- verl.utils.checkpoint.checkpoint_manager ----------------------------------------------------------------------------


def get_checkpoint_tracker_filename(root_path: str) -> str:
    """Path of the file that names the newest checkpoint of a run folder."""
    from verl.checkpoint.retention import LATEST

    return os.path.join(root_path, LATEST)


def find_latest_ckpt_path(path: str | None, directory_format: str = "global_step_{}") -> str | None:
    """The folder of the newest checkpoint of the run folder `path`; None without one."""
    if path is None:
        return None
    tracker = get_checkpoint_tracker_filename(path)
    if not os.path.exists(tracker):
        log.info("There is no checkpoint in %s.", path)
        return None
    checkpoint = os.path.join(path, directory_format.format(int(Path(tracker).read_text(encoding="utf-8"))))
    if not os.path.isdir(checkpoint):
        log.warning("%s names the checkpoint %s, which does not exist.", tracker, checkpoint)
        return None
    return checkpoint


def should_save_ckpt_esi(max_steps_duration: float, save_ckpt_duration: float = 60, redundant_time: float = 0) -> bool:
    """Whether the reserved time of this machine ends before another step and another save fit, all in seconds. False
    if the environment names no end, and before the first step (`max_steps_duration` 0)."""
    for name in _EXPIRATIONS:
        try:
            remaining = float(os.environ.get(name, "")) - time.time()
        except ValueError:
            continue
        needed = max_steps_duration + save_ckpt_duration + redundant_time
        return max_steps_duration > 0 and 0 < remaining <= needed
    return False
