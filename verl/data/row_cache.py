"""Results about rows that later starts read again, in the user's cache (VERL_DATA_CACHE, else ~/.cache/verl/rows).

    KEY.arrays      what a scan that met no bad row has computed of the rows (verl/data/scan.py)
    KEY.first       the same of the first rows, for a start after a run that ended before its scan
    KEY.arrow       the rows of a large parquet file (verl/data/files.py)

All are read as memory maps. A key is a digest of all that the result depends on. An entry ends with a checksum of its name and
its content; a damaged one is computed again. Entries that no run has used for 30 days are removed when another is written, and
what a killed start has left; other files of the folder stay.
"""

import contextlib
import fcntl
import functools
import json
import logging
import mmap
import os
import re
import time
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import IO, Any

import numpy as np

from verl._version import __version__
from verl.data_proto.token_ids import num_embeddings
from verl.data_proto.tokenizer import Tokenizer
from verl.models.content import checksum_of, digest_of_text
from verl.regular_files import cache_folder, open_regular, whole_file

log = logging.getLogger(__name__)

FORMAT = 4  # of the cached files, and of the checks behind them
_UNUSED_S = 30 * 86400.0
_CLAIM_S = 3600.0
_ALIGNED = 8  # bytes
_SEAL = 32  # characters of the checksum at the end
_NAMES = re.compile(
    r"\.?[0-9a-f]{32}(\.first)?\.(arrays|arrow|lock)(\.[0-9a-f]{8}\.tmp)?"
)  # of entries; a folder has further files
_WAIT_SAID_S = 5.0


def key_of(*parts: object) -> str | None:
    """A key from values that JSON can hold; None when one of them is None, since what is not known cannot be compared."""
    if any(part is None for part in parts):
        return None
    return digest_of_text(__version__, str(FORMAT), *(json.dumps(part, sort_keys=True, default=repr) for part in parts))


def digest_of_tokenizer(tokenizer: Tokenizer) -> str | None:
    """The digest of all that decides how a fast tokenizer of transformers works; None for another class."""
    import tokenizers
    import transformers

    backend = getattr(tokenizer, "backend_tokenizer", None)
    if backend is None or not type(tokenizer).__module__.startswith("transformers."):
        return None
    settings = [
        type(tokenizer).__name__,
        tokenizer.chat_template,
        tokenizer.special_tokens_map,
        num_embeddings(tokenizer),
        transformers.__version__,
        tokenizers.__version__,
    ]
    return digest_of_text(backend.to_str(), json.dumps(settings, default=repr))


def cached_path(name: str) -> Path | None:
    """The path of an entry; None if the folder cannot be made."""
    try:
        path = cache_folder("VERL_DATA_CACHE", "rows")
        path.mkdir(parents=True, exist_ok=True, mode=0o700)
    except OSError:
        return None
    return path / name


def read_entry(path: Path | None) -> memoryview | None:
    """A memory map of an entry, marked as used now unless it is another user's. None without one, and for a damaged one: it
    is removed."""
    if path is None or not os.path.lexists(path):
        return None
    with contextlib.suppress(OSError, ValueError):
        with os.fdopen(open_regular(path), "rb") as file:
            content = mapped(file)
        if content[-_SEAL:] == _seal(path, content[:-_SEAL]):
            with contextlib.suppress(OSError):  # read-only, or another user's
                os.utime(path)
            return content[:-_SEAL]
    discard(path)
    return None


def mapped(file: IO[bytes]) -> memoryview:
    """A memory map of a file."""
    size = os.fstat(file.fileno()).st_size
    return memoryview(mmap.mmap(file.fileno(), size, access=mmap.ACCESS_READ) if size else b"")


def discard(path: Path) -> None:
    """Remove a damaged entry."""
    _say_damaged(path)
    with contextlib.suppress(OSError):
        path.unlink()


@functools.cache  # once, also of an entry that cannot be removed
def _say_damaged(path: Path) -> None:
    log.warning("%s in the cache of rows is damaged. It is computed again.", path)


def _seal(path: Path, content: memoryview) -> bytes:
    return checksum_of(content, path.name).encode()


@contextlib.contextmanager
def new_entry(path: Path) -> Iterator[Path]:
    """A temporary name; it becomes `path` if the block ends without an error."""
    with whole_file(path) as temporary:
        yield temporary
        with open(temporary, "r+b") as file:
            seal = _seal(path, mapped(file))
            file.seek(0, os.SEEK_END)
            file.write(seal)
            file.flush()
            os.fsync(file.fileno())  # a power loss leaves the complete entry under its name, or none
    for entry in path.parent.iterdir():
        with contextlib.suppress(OSError):  # another run removes it too
            most_s = _CLAIM_S if entry.suffix == ".tmp" else _UNUSED_S  # a start that was killed leaves its file behind
            if _NAMES.fullmatch(entry.name) and time.time() - entry.stat().st_mtime > most_s:
                entry.unlink()


def write_arrays(file: IO[bytes], arrays: Mapping[str, Sequence[np.ndarray]], facts: object) -> None:
    """Append 1-d arrays, each as its parts, and a value that JSON can hold: the bytes of a header, the header, the arrays."""
    sizes = {name: [parts[0].dtype.str, sum(map(len, parts))] for name, parts in arrays.items()}
    header = json.dumps({"arrays": sizes, "facts": facts}).encode()
    header += b" " * (-len(header) % _ALIGNED)
    file.write(len(header).to_bytes(_ALIGNED, "little") + header)
    for parts in arrays.values():
        for part in parts:
            file.write(part.tobytes())
        file.write(bytes(-sum(part.nbytes for part in parts) % _ALIGNED))


def read_arrays(content: memoryview) -> Iterator[tuple[dict[str, np.ndarray], Any]]:
    """The arrays, with the value, of each call of `write_arrays` that has ended."""
    size, end = len(content), 0
    while end + _ALIGNED <= size:
        start = end + _ALIGNED
        end = start + int.from_bytes(content[end:start], "little")
        if end > size:
            return
        header, arrays = json.loads(bytes(content[start:end])), {}
        for name, (dtype, count) in header["arrays"].items():
            start, end = end, end + -(-count * np.dtype(dtype).itemsize // _ALIGNED) * _ALIGNED
            if end > size:
                return
            arrays[name] = np.frombuffer(content, dtype, count, start)
        yield arrays, header["facts"]


def load_arrays(
    key: str | None, dtypes: Mapping[str, np.dtype], num_facts: int
) -> tuple[dict[str, np.ndarray], list[Any]] | None:
    """The cached arrays of `key` with these `dtypes`, and their `num_facts` facts; None without them."""
    path = cached_path(f"{key}.arrays") if key else None
    content = read_entry(path)
    if path is None or content is None:
        return None
    with contextlib.suppress(ValueError, LookupError, TypeError, AttributeError, RecursionError):  # of another writer
        for arrays, facts in read_arrays(content):
            has_facts = isinstance(facts, list) and len(facts) == num_facts
            if has_facts and {name: array.dtype for name, array in arrays.items()} == dtypes:
                return arrays, facts
    discard(path)
    return None


def save_arrays(key: str | None, arrays: Mapping[str, Sequence[np.ndarray]], facts: object) -> None:
    """Cache arrays, each as its parts, as `key`; nothing if the cache cannot be written."""
    path = cached_path(f"{key}.arrays") if key else None
    with contextlib.suppress(OSError):
        if path is not None:
            with new_entry(path) as temporary, open(temporary, "wb") as file:
                write_arrays(file, arrays, facts)


def claim(key: str | None, *, wait: bool) -> int | None:
    """A descriptor that holds the lock of `key` until it is closed, also in forked processes; None when another process has it,
    with `wait` for longer than an hour. -1 if there is no lock."""
    path = cached_path(f"{key}.lock") if key else None
    if path is None:
        return -1
    try:
        descriptor = open_regular(path, os.O_RDWR | os.O_CREAT)
    except OSError:
        return -1
    deadline = time.monotonic() + (_CLAIM_S if wait else 0.0)
    say_at = time.monotonic() + _WAIT_SAID_S
    while True:
        try:
            fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
            return descriptor
        except OSError:
            if time.monotonic() >= deadline:
                os.close(descriptor)
                return None
            if time.monotonic() >= say_at:
                log.warning("Another start checks the same rows, and has %s locked. This one waits for it.", path)
                say_at = deadline
            time.sleep(0.1)
