"""Durable files with recorded digests, the manifest of a checkpoint, and its verification."""

from __future__ import annotations

import contextlib
import hashlib
import itertools
import json
import math
import os
import shutil
import stat
from collections.abc import Callable, Iterable, Iterator, Mapping
from concurrent.futures import Executor, Future, ThreadPoolExecutor
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import numpy as np

from verl.checkpoint import digests
from verl.errors import CheckpointError
from verl.regular_files import read_text
from verl.tracking.files import has, read_json

MANIFEST = "manifest.json"
_FORMAT = 2
SMALL_BYTES = 64 << 20  # larger files of tensors are compared while they load, others before a checkpoint is chosen


@dataclass(frozen=True)
class FileRecord:
    """Size and digest (see digests.py) of a file."""

    bytes: int
    blake2b: str


def write_file(path: Path, parts: Iterable[bytes | memoryview]) -> FileRecord:
    """Write `parts` to a new file and sync it. The digest is computed from memory during the write, on threads, so a later
    comparison reveals faults of the disk."""
    size, leaves = 0, list[Future[bytes]]()

    def buffers() -> Iterator[memoryview]:
        for buffer in itertools.cycle([np.empty(digests.CHUNK_BYTES, np.uint8).data for _ in range(digests.AHEAD)]):
            if len(leaves) >= digests.AHEAD:
                leaves[-digests.AHEAD].result()
            yield buffer

    with open(path, "xb") as file, ThreadPoolExecutor(digests.THREADS) as threads:
        for chunk in digests.copied_chunks(parts, buffers()):
            leaves.append(threads.submit(digests.of_leaves, chunk))
            file.write(chunk)
            if len(chunk) == digests.CHUNK_BYTES and hasattr(os, "posix_fadvise"):  # Linux starts to write the chunk
                os.posix_fadvise(file.fileno(), size, len(chunk), os.POSIX_FADV_DONTNEED)
            size += len(chunk)
        file.flush()
        os.fsync(file.fileno())
        return FileRecord(size, digests.of_file(leaf.result() for leaf in leaves))


def write_json(path: Path, value: object, place: str) -> FileRecord:
    """Write `value` to a new JSON file. Raises CheckpointError naming `place` when it is not JSON."""
    try:
        text = json.dumps(value, indent=1)
    except TypeError as error:
        raise CheckpointError(f"{place} cannot be saved as JSON: {error}.") from error
    return write_file(path, [text.encode()])


def record_of(path: Path) -> FileRecord:
    """The record of a file as the disk returns it."""
    with ThreadPoolExecutor(digests.THREADS) as threads:
        return FileRecord(*digests.read_digest(path, threads))


def is_there(path: Path) -> bool:
    """Whether the name exists, dangling links included. Raises OSError when the disk fails."""
    try:
        os.lstat(path)
    except (FileNotFoundError, NotADirectoryError):
        return False
    return True


def rename(source: Path, target: Path) -> None:
    """Rename `source` to the free name `target`. A network client whose server's reply was lost sends the request again and
    gets FileNotFoundError; the rename then happened."""
    try:
        os.rename(source, target)
    except FileNotFoundError:
        if is_there(source) or not is_there(target):
            raise


def remove_tree(path: Path) -> None:
    """Remove a folder with its content, a file, or a link (not its target)."""
    if path.is_symlink() or not path.is_dir():
        path.unlink(missing_ok=True)
    else:
        shutil.rmtree(path)


def read_document(path: Path) -> dict[str, Any]:
    """The JSON object in `path`. Raises CheckpointError when there is none."""
    try:
        document: dict[str, object] = read_json(path, has())
    except (OSError, ValueError) as error:
        reason = error.strerror if isinstance(error, OSError) else "not a JSON object"
        raise CheckpointError(f"{path} cannot be read ({reason}). Resume from another checkpoint.") from error
    return document


def write_manifest(folder: Path, step: int, records: dict[str, FileRecord]) -> None:
    """Write the list of all files of a checkpoint, after them: a folder without it is not a checkpoint."""
    listed = {name: asdict(record) for name, record in sorted(records.items())}
    write_file(folder / MANIFEST, [_manifest_text({"format": _FORMAT, "step": step, "files": listed}).encode()])


def find_damage(folder: Path, threads: Executor | None = None, *, max_bytes: float = math.inf) -> str | None:
    """File and reason why `folder` is not a complete checkpoint; None when it is. Compares the manifest, all sizes, and on
    `threads` the content of files except tensors of more than `max_bytes`. A file that is not in the manifest, and that a
    loader might read, is damage too."""
    try:
        text = read_text(folder / MANIFEST)
        manifest = json.loads(text)
        if _manifest_text(manifest) != text:
            return f"{MANIFEST} was changed"
        if manifest["format"] != _FORMAT:
            return f"{MANIFEST} has format {manifest['format']}; this version reads format {_FORMAT}"
        if folder.name.startswith("global_step_") and folder.name != f"global_step_{manifest['step']}":
            return f"it is a checkpoint of step {manifest['step']} under another name"
        records = {name: FileRecord(**record) for name, record in manifest["files"].items()}
        for name in records:
            if Path(name).is_absolute() or ".." in Path(name).parts:
                return f"{MANIFEST} names {name!r}, which is not a file of the checkpoint"
        with contextlib.nullcontext(threads) if threads else ThreadPoolExecutor(digests.THREADS) as pool:
            for name, record in records.items():
                is_left = record.bytes > max_bytes and name.endswith(".safetensors")
                if reason := _file_damage(folder / name, record, None if is_left else pool):
                    return f"{name} {reason}"
        return _unlisted(folder, manifest["files"])
    except FileNotFoundError:
        return f"{MANIFEST} is missing, so the save did not finish" if folder.is_dir() else "the folder is not there"
    except (OSError, ValueError, KeyError, TypeError, AttributeError, RecursionError):  # a damaged file can raise any
        return f"{MANIFEST} cannot be read"


@contextlib.contextmanager
def verification(folder: Path) -> Iterator[Callable[[], str | None]]:
    """Compare `folder` with its manifest on threads while the caller loads it, so each byte comes from the disk once. The
    function waits for the end, and returns what `find_damage` does."""
    with ThreadPoolExecutor(digests.THREADS) as threads, ThreadPoolExecutor(1) as thread:
        damage = thread.submit(find_damage, folder, threads)
        try:
            yield damage.result
        finally:
            threads.shutdown(wait=False, cancel_futures=True)  # a load that was interrupted does not wait


def _unlisted(folder: Path, files: Mapping[str, object]) -> str | None:
    """A file that loaders look for and that the save did not write."""
    for path in sorted(folder.rglob("*")):
        name = path.relative_to(folder).as_posix()
        is_read = path.suffix in (".json", ".safetensors") and not path.name.startswith(".")
        if is_read and name != MANIFEST and name not in files:
            return f"{name} was not written by the save"
    return None


def _manifest_text(manifest: Mapping[str, object]) -> str:
    """One line of JSON that ends with the digest of the rest, so that any changed byte is detected."""
    bare = {key: value for key, value in manifest.items() if key != "blake2b"}
    digest = hashlib.blake2b(json.dumps(bare).encode(), digest_size=32).hexdigest()
    return json.dumps({**bare, "blake2b": digest})


def _file_damage(path: Path, record: FileRecord, threads: Executor | None) -> str | None:
    try:
        status = path.stat()
        if not stat.S_ISREG(status.st_mode):
            return "is not a file"
        if status.st_size != record.bytes:
            return f"has {status.st_size} bytes instead of {record.bytes}"
        if threads is not None and FileRecord(*digests.read_digest(path, threads)) != record:
            return "does not have the content that was saved (its digest differs)"
    except FileNotFoundError:
        return "is missing"
    except OSError as error:
        return f"cannot be read ({error.strerror})"
    return None
