"""Files of a run: synced appends and atomic replacement, safe against a kill at any moment; the one reader of them, with a
limit of size and a schema; and the type of a file system.

A schema is a check of a value, built from the checks below:

    has(step=is_count, phases=each(is_number), of=maybe(is_count))
"""

import contextlib
import json
import logging
import os
import sys
import threading
from collections.abc import Callable, Iterable, Iterator, Mapping
from math import isfinite
from pathlib import Path
from typing import Any, BinaryIO

import psutil

from verl.config.secrets import hide
from verl.foreign_text import valid_utf8
from verl.regular_files import MAX_BYTES, open_regular, read_text, sync_folder

log = logging.getLogger(__name__)

_MAX_ROW_BYTES = 16 << 20
_NUM_SEGMENTS = 64
SHOWN_BYTES = 16 << 20  # of a longer file, people see rows at evenly spaced places
_CHECKED_BYTES = 32 << 20  # of a longer file the end, so that a resume after a million steps takes seconds
LARGEST = 1e308  # the mean of larger numbers is not finite
_NUMBERS = {int, float, type(None)}
_MAX_WHOLE = 1 << 53  # above, JSON readers that count in float64 lose digits
Check = Callable[[Any], bool]
Row = dict[str, Any]  # of JSON
Json = Mapping[str, Any]

# prefixes of the system's names for file systems of several machines
NETWORK_FILE_SYSTEMS = tuple("nfs cifs smb 9p afs ceph lustre gpfs beegfs glusterfs sshfs".split())


def json_text(value: object, indent: int | None = None) -> str:
    """`value` as strict JSON in valid UTF-8: NaN and infinities become null, numpy and torch values become plain values,
    further values text. Known secrets are masked."""
    try:
        text = json.dumps(value, ensure_ascii=False, allow_nan=False, indent=indent, default=_plain)
    except ValueError:
        text = json.dumps(_finite(value), ensure_ascii=False, allow_nan=False, indent=indent)
    return valid_utf8(hide(text))


def _plain(value: object) -> Any:
    if hasattr(value, "tolist"):  # numpy and torch, scalars and arrays
        return value.tolist()
    return list(value) if isinstance(value, set | frozenset) else str(value)


def _finite(value: object) -> object:
    if isinstance(value, float):
        return value if isfinite(value) else None
    if isinstance(value, Mapping):
        return {str(k): _finite(v) for k, v in value.items()}
    if isinstance(value, list | tuple):
        return [_finite(v) for v in value]
    return value if value is None or isinstance(value, str | int) else _finite(_plain(value))


def append_rows(path: Path, rows: Iterable[Mapping[str, object]]) -> None:
    """Append one line per row and sync, so that a later checkpoint is never ahead of the rows. All rows or none are written,
    unless the process is killed; a line that a kill cut short is ended first."""
    lines = "".join(json_text(row) + "\n" for row in rows).encode()
    descriptor = open_regular(path, os.O_RDWR | os.O_APPEND | os.O_CREAT)
    size = os.fstat(descriptor).st_size
    try:
        unwritten = memoryview(b"\n" + lines if size and os.pread(descriptor, 1, size - 1) != b"\n" else lines)
        while unwritten:
            unwritten = unwritten[os.write(descriptor, unwritten) :]
        os.fsync(descriptor)
        if not size:  # a new file
            sync_folder(path.parent)
    except OSError as error:
        with contextlib.suppress(OSError):
            os.ftruncate(descriptor, size)
        error.filename = str(path)
        raise
    finally:
        os.close(descriptor)


def read_json(path: Path, check: Check, max_bytes: int = MAX_BYTES) -> Any:
    """The JSON value in a regular file. Raises OSError, and ValueError for content that is not JSON or fails `check`."""
    return _checked(read_text(path, max_bytes), check)


def read_lines(path: Path, check: Check, limit: int = sys.maxsize) -> Iterator[tuple[bytes, dict[str, object] | None]]:
    """The lines of a file of `append_rows` with their rows; None for a line that is truncated or fails `check`. No lines when
    the file is missing; of one above `limit` bytes the lines at evenly spaced places. Raises OSError."""
    with contextlib.suppress(FileNotFoundError), os.fdopen(open_regular(path), "rb") as file:
        for line, _ in lines_of(file, even_segments(0, os.fstat(file.fileno()).st_size, limit)):
            yield line, parse_line(line, check)


def lines_of(file: BinaryIO, segments: Iterable[tuple[int, int]]) -> Iterator[tuple[bytes, int]]:
    """The lines that begin in segments (from, to) of a file, and the place of the end of each."""
    for start, end in segments:
        file.seek(max(start - 1, 0))
        if start:
            file.readline()  # the end of the line before
        while file.tell() < end and (line := file.readline(_MAX_ROW_BYTES)):
            yield line, file.tell()


def even_segments(start: int, end: int, limit: int) -> list[tuple[int, int]]:
    """Segments for `lines_of` from `start` to the end of a file at `end`. If that is more than `limit` bytes, they have a
    quarter of `limit` in evenly spaced parts, among them the first and the last."""
    if end - start <= limit:
        return [(start, sys.maxsize)]
    length = limit // 4 // _NUM_SEGMENTS
    starts = [start + (end - length - start) * i // (_NUM_SEGMENTS - 1) for i in range(_NUM_SEGMENTS)]
    return [(start, start + length) for start in starts]


def parse_line(line: bytes, check: Check) -> Row | None:
    """The row in a line of `append_rows`; None when it is truncated or fails `check`."""
    try:
        row = _checked(line.decode(), check)
    except ValueError:
        return None
    return row if isinstance(row, dict) else None


def read_json_rows(path: Path, check: Check | None = None, limit: int = sys.maxsize) -> Iterator[Row]:
    """The rows of a file of `append_rows`; none when it is missing or no file. Lines that fail `check` are left out.
    `limit` as in `read_lines`."""
    with contextlib.suppress(OSError):
        yield from (row for _, row in read_lines(path, check or has(), limit) if row is not None)


def read_metrics(path: Path, limit: int = sys.maxsize) -> Iterator[dict[str, float]]:
    """The rows of metrics.jsonl: step, time, and the metrics that are finite numbers. `limit` as in `read_lines`."""
    for row in read_json_rows(path, is_metrics_row, limit):
        yield {name: value for name, value in row.items() if is_number(value)}


def _checked(text: str, check: Check) -> Any:
    try:
        content = json.loads(text)
        valid = check(content)
    except RecursionError:
        raise ValueError("it is nested too deep") from None
    if not valid:
        raise ValueError("it has another form than the files of a run")
    return content


def is_count(value: object) -> bool:
    """An integer from 0 on."""
    return type(value) is int and 0 <= value <= _MAX_WHOLE


def is_number(value: Any) -> bool:
    """A finite number."""
    return type(value) in (int, float) and -LARGEST <= value <= LARGEST


def is_text(value: object) -> bool:
    return isinstance(value, str)


def maybe(check: Check) -> Check:
    """Null, or what `check` wants."""
    return lambda value: value is None or check(value)


def each(check: Check) -> Check:
    """A mapping of values that pass `check`."""
    return lambda value: isinstance(value, Mapping) and all(map(check, value.values()))


def has(**fields: Check) -> Check:
    """A mapping with these fields, and perhaps more. A field that may be null may be missing."""
    return lambda value: isinstance(value, Mapping) and all(check(value.get(name)) for name, check in fields.items())


def is_metrics_row(value: Any) -> bool:
    """Whether a row has a step and only numbers or null; this distinguishes metrics.jsonl from other files."""
    return OF_STEP(value) and set(map(type, value.values())) <= _NUMBERS


OF_STEP = has(step=is_count)  # a row of spans.jsonl, guards.jsonl


def truncate_rows(path: Path, step: int, check: Check = OF_STEP, *, complete: bool = False) -> int:
    """Leave only the rows up to `step` in a file of `append_rows`, as they are, if there is one; returns the number of removed
    rows. Damage is logged, lines that fail `check` too; a file is `complete` when every step from its first on must have a
    row. Of a file above 32 MiB the end is read, and cut in place."""
    if not path.exists():
        if not complete:
            return 0
        path.touch()
    remaining, steps, last, num_removed, num_damaged = bytearray(), set(), 0, 0, 0
    with os.fdopen(open_regular(path), "rb") as file:
        start = cut = _start_of_check(file, step, check)
        for line, end in lines_of(file, [(start, sys.maxsize)]):
            if (row := parse_line(line, check)) is None:
                num_damaged += line.endswith(b"\n")  # a kill leaves a line without its end
                continue
            num_damaged += row["step"] < last
            last = row["step"]
            if last > step:
                num_removed += 1
            else:
                remaining += line.removesuffix(b"\n") + b"\n"
                steps.add(last)
                cut = end
    first = max(min(steps, default=1), 1)
    num_missing = step + 1 - first - len(steps - {0}) if complete else 0
    if num_damaged or num_missing:
        damage = f" is damaged: {num_damaged} lines are wrong, and {num_missing}" if num_damaged else f": {num_missing}"
        log.warning("%s%s steps before step %d have no row.", path, damage, step + 1)
    if start:
        os.truncate(path, cut)
    else:
        write_atomically(path, remaining.decode())
    return num_removed


def _start_of_check(file: BinaryIO, step: int, check: Check) -> int:
    """The place at the start of what `truncate_rows` reads: 0, unless the end of a large file has rows up to `step`."""
    start = max(os.fstat(file.fileno()).st_size - _CHECKED_BYTES, 0)
    rows = (parse_line(line, check) for line, _ in lines_of(file, [(start, sys.maxsize)]))
    first = next((row for row in rows if row is not None), None)
    return start if first is not None and first["step"] <= step else 0


def write_atomically(path: Path, text: str | Iterable[str]) -> None:
    """Replace `path` atomically by `text` or its parts: a reader sees the old document or the new one."""
    with replacing(path, text):
        pass


@contextlib.contextmanager
def replacing(path: Path, text: str | Iterable[str]) -> Iterator[None]:
    """Replace `path` atomically at the end of the block. The text is written next to it at the start, and the end creates no
    file. So another folder that has replaced the parent meanwhile gets no file, and OSError is raised. All is synced."""
    temporary = path.with_name(f".{path.name}.{threading.get_native_id()}.tmp")  # two threads may write one file
    try:
        with _naming(path):
            temporary.unlink(missing_ok=True)  # opening a pipe would block
            with temporary.open("x", encoding="utf-8") as file:
                file.writelines([text] if isinstance(text, str) else text)
                file.flush()
                os.fsync(file.fileno())
        yield
        with _naming(path):
            os.replace(temporary, path)
            sync_folder(path.parent)
    finally:
        with contextlib.suppress(IsADirectoryError):
            temporary.unlink(missing_ok=True)


@contextlib.contextmanager
def _naming(path: Path) -> Iterator[None]:
    try:
        yield
    except OSError as error:
        error.filename = str(path)
        raise


def file_system_of(path: Path) -> str:
    """The type of the file system that holds `path` ("ext4", "nfs4", "fuse.gcsfuse"); "" if the system does not tell."""
    where = path.resolve()
    mounts = [mount for mount in psutil.disk_partitions(all=True) if where.is_relative_to(mount.mountpoint)]
    # of two mounts on one folder the later one is seen
    nearest = max(enumerate(mounts), key=lambda item: (len(item[1].mountpoint), item[0]), default=None)
    return nearest[1].fstype if nearest is not None else ""
