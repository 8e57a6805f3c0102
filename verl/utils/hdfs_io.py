"""Door: what data preparation scripts do with folders, for local and mounted ones.

makedirs(folder)                          # with those above it; one that is there is fine
copy(src="data/gsm8k", dst="/mnt/shared") # a file or a folder into a folder, or to a new name
"""

from __future__ import annotations

import os
import shutil
from typing import Any

from verl.errors import ConfigError


def makedirs(name: str, mode: int = 0o777, exist_ok: bool = True, **_other: Any) -> None:
    """Make folder `name`. Raises ConfigError for a place that is not in the file system."""
    os.makedirs(_local(name), mode=mode, exist_ok=exist_ok)


def exists(path: str, **_other: Any) -> bool:
    """Whether there is a file or folder at `path`. Raises ConfigError as above."""
    return os.path.exists(_local(path))


def copy(src: str, dst: str, **_other: Any) -> str:
    """Copy a file or folder `src` into the folder `dst`, or to the name `dst`; returns where it is. Raises as above."""
    src, dst = _local(src), _local(dst)
    if not os.path.isdir(src):
        return str(shutil.copy(src, dst))
    target = os.path.join(dst, os.path.basename(src.rstrip("/"))) if os.path.isdir(dst) else dst
    return str(shutil.copytree(src, target, dirs_exist_ok=True))


def _local(path: str) -> str:
    if "://" in path:
        raise ConfigError(f"{path} is not in the file system, and verl has no client for it. Give a mounted folder.")
    return os.path.expanduser(path)
