"""Files of a run that survive a kill at any moment: synced appends, atomic replacement; and the type of a file system."""

from __future__ import annotations

import json
import math
import os
from collections.abc import Iterable, Iterator, Mapping
from pathlib import Path
from typing import Any

import psutil

from verl.config.secrets import hide

# prefixes of the names that the operating system gives to file systems which several machines share
NETWORK_FILE_SYSTEMS = tuple("nfs cifs smb 9p afs ceph lustre gpfs beegfs glusterfs sshfs".split())


def json_text(value: Any, indent: int | None = None) -> str:
    """`value` as strict JSON: NaN and infinities become null, numpy and torch values become plain ones, others text. Known
    secrets are masked."""
    try:
        return hide(json.dumps(value, ensure_ascii=False, allow_nan=False, indent=indent, default=_plain))
    except ValueError:
        return hide(json.dumps(_finite(value), ensure_ascii=False, allow_nan=False, indent=indent))


def _plain(value: Any) -> Any:
    if hasattr(value, "tolist"):  # numpy and torch, scalars and arrays
        return value.tolist()
    return list(value) if isinstance(value, set | frozenset) else str(value)


def _finite(value: Any) -> Any:
    if isinstance(value, float):
        return value if math.isfinite(value) else None
    if isinstance(value, Mapping):
        return {str(k): _finite(v) for k, v in value.items()}
    if isinstance(value, list | tuple):
        return [_finite(v) for v in value]
    return value if value is None or isinstance(value, str | int) else _finite(_plain(value))


def append_rows(path: Path, rows: Iterable[Mapping[str, Any]]) -> None:
    """Append one line per row and sync, so that a later checkpoint is never ahead of the rows."""
    with path.open("a", encoding="utf-8") as file:
        file.write("".join(json_text(row) + "\n" for row in rows))
        file.flush()
        os.fsync(file.fileno())


def read_json_rows(path: Path) -> Iterator[dict[str, Any]]:
    """The rows of a file of `append_rows`; none when it is missing. A truncated line is left out."""
    if not path.exists():
        return
    with path.open(encoding="utf-8", errors="replace") as file:
        for line in file:
            try:
                row = json.loads(line)
            except ValueError:
                continue
            if isinstance(row, dict):
                yield row


def truncate_rows(path: Path, step: int) -> int:
    """Leave only the rows up to `step` in a file of `append_rows`, if there is one; returns the number of removed rows."""
    if not path.exists():
        return 0
    # a line that a kill cut short is left out, so the file is always rewritten
    rows = list(read_json_rows(path))
    kept = [row for row in rows if row.get("step", -1) <= step]
    write_atomically(path, "".join(json_text(row) + "\n" for row in kept))
    return len(rows) - len(kept)


def write_atomically(path: Path, text: str) -> None:
    """Replace `path` atomically: a reader sees the old document or the new one."""
    temporary = path.with_name(f".{path.name}.{os.getpid()}.tmp")
    try:
        with temporary.open("w", encoding="utf-8") as file:
            file.write(text)
            file.flush()
            os.fsync(file.fileno())
        os.replace(temporary, path)
    finally:
        temporary.unlink(missing_ok=True)


def file_system_of(path: Path) -> str:
    """The type of the file system that holds `path` ("ext4", "nfs4", "fuse.gcsfuse"); "" where the system does not tell."""
    where = path.resolve()
    mounts = [mount for mount in psutil.disk_partitions(all=True) if where.is_relative_to(mount.mountpoint)]
    # of two mounts on one folder the later one is seen
    nearest = max(enumerate(mounts), key=lambda item: (len(item[1].mountpoint), item[0]), default=None)
    return nearest[1].fstype if nearest is not None else ""
