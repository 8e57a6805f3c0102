"""Results about rows that later starts read again, in the user's cache (VERL_DATA_CACHE, else ~/.cache/verl/rows).

    KEY.arrays      what a scan that met no bad row has computed of the rows (verl/data/scan.py)
    KEY.first       the same of the first rows, for a start after a run that ended before its scan
    KEY.arrow       the rows of a large parquet file (verl/data/files.py)

All are read as memory maps. A key is a digest of all that the result depends on. Files that no run has used for 30 days are
removed when another is written.
"""

from __future__ import annotations

import contextlib
import fcntl
import json
import mmap
import os
import time
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import IO, Any

import numpy as np

from verl._version import __version__
from verl.data_proto.token_ids import num_embeddings
from verl.data_proto.tokenizer import Tokenizer
from verl.models.content import digest_of_text
from verl.regular_files import whole_file

FORMAT = 3  # of the cached files, and of the checks behind them
_UNUSED_S = 30 * 86400.0
_CLAIM_S = 3600.0
_ALIGNED = 8  # bytes


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
    """The path of an entry; None where the folder cannot be made."""
    folder = os.environ.get("VERL_DATA_CACHE")
    base = os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache"
    path = Path(folder) if folder else Path(base) / "verl" / "rows"
    try:
        path.mkdir(parents=True, exist_ok=True, mode=0o700)
    except OSError:
        return None
    return path / name


def mark_used(path: Path) -> bool:
    """Whether the entry is there; it is then used now."""
    try:
        os.utime(path)
    except OSError:
        return False
    return True


@contextlib.contextmanager
def new_entry(path: Path) -> Iterator[Path]:
    """A temporary name, which becomes `path` when the block ends without an error."""
    with whole_file(path) as temporary:
        yield temporary
        with open(temporary, "rb") as file:
            os.fsync(file.fileno())  # a power loss leaves the whole entry under its name, or none
    for entry in path.parent.iterdir():
        with contextlib.suppress(OSError):  # another run removes it too
            if time.time() - entry.stat().st_mtime > _UNUSED_S:
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


def read_arrays(file: IO[bytes]) -> Iterator[tuple[dict[str, np.ndarray], Any]]:
    """Memory maps of the arrays, with the value, of each call of `write_arrays` that has ended."""
    size = os.fstat(file.fileno()).st_size
    content = mmap.mmap(file.fileno(), size, access=mmap.ACCESS_READ) if size else b""
    end = 0
    while end + _ALIGNED <= size:
        start = end + _ALIGNED
        end = start + int.from_bytes(content[end:start], "little")
        if end > size:
            return
        header, arrays = json.loads(content[start:end]), {}
        for name, (dtype, count) in header["arrays"].items():
            start, end = end, end + -(-count * np.dtype(dtype).itemsize // _ALIGNED) * _ALIGNED
            if end > size:
                return
            arrays[name] = np.frombuffer(content, dtype, count, start)
        yield arrays, header["facts"]


def load_arrays(key: str | None) -> tuple[dict[str, np.ndarray], Any] | None:
    """The cached arrays of `key` and their facts; None without them."""
    path = cached_path(f"{key}.arrays") if key else None
    if path is None or not mark_used(path):
        return None
    try:
        with open(path, "rb") as file:
            return next(read_arrays(file), None)
    except (OSError, ValueError, LookupError, TypeError):  # damaged
        return None


def save_arrays(key: str | None, arrays: Mapping[str, Sequence[np.ndarray]], facts: object) -> None:
    """Cache arrays, each as its parts, as `key`; nothing where the cache cannot be written."""
    path = cached_path(f"{key}.arrays") if key else None
    with contextlib.suppress(OSError):
        if path is not None:
            with new_entry(path) as temporary, open(temporary, "wb") as file:
                write_arrays(file, arrays, facts)


def claim(key: str | None, *, wait: bool) -> int | None:
    """A descriptor that holds the lock of `key` until it is closed, also in forked processes; None when another process has it,
    with `wait` for longer than an hour. -1 where there is no lock."""
    path = cached_path(f"{key}.lock") if key else None
    if path is None:
        return -1
    try:
        descriptor = os.open(path, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o600)
    except OSError:
        return -1
    deadline = time.monotonic() + (_CLAIM_S if wait else 0.0)
    while True:
        try:
            fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
            return descriptor
        except OSError:
            if time.monotonic() >= deadline:
                os.close(descriptor)
                return None
            time.sleep(0.1)
