"""Durable files with recorded digests, the manifest of a checkpoint, and its verification."""

from __future__ import annotations

import hashlib
import json
import os
import shutil
import stat
from collections.abc import Iterable, Mapping
from concurrent.futures import ThreadPoolExecutor
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from verl.errors import CheckpointError
from verl.regular_files import read_text
from verl.tracking.files import has, read_json

MANIFEST = "manifest.json"
_FORMAT = 1
_CHUNK_BYTES = 8 << 20
_READERS = 4  # files that are read at once to verify them; digests leave the other threads of the process free


@dataclass(frozen=True)
class FileRecord:
    """Size of a file, and the BLAKE2b-256 of its content."""

    bytes: int
    blake2b: str


def write_file(path: Path, parts: Iterable[bytes | memoryview]) -> FileRecord:
    """Write `parts` to a new file and sync it. The digest is computed from memory during the write, on a thread, so a later
    comparison reveals faults of the disk."""
    digest, size = hashlib.blake2b(digest_size=32), 0
    with open(path, "xb") as file, ThreadPoolExecutor(1) as thread:
        for part in parts:
            for start in range(0, len(part), _CHUNK_BYTES):
                chunk = memoryview(part)[start : start + _CHUNK_BYTES]
                hashed = thread.submit(digest.update, chunk)
                file.write(chunk)
                hashed.result()
            size += len(part)
        file.flush()
        os.fsync(file.fileno())
    return FileRecord(size, digest.hexdigest())


def write_json(path: Path, value: object, place: str) -> FileRecord:
    """Write `value` to a new JSON file. Raises CheckpointError naming `place` when it is not JSON."""
    try:
        text = json.dumps(value, indent=1)
    except TypeError as error:
        raise CheckpointError(f"{place} cannot be saved as JSON: {error}.") from error
    return write_file(path, [text.encode()])


def record_of(path: Path) -> FileRecord:
    """The record of a file as the disk returns it."""
    digest, size = hashlib.blake2b(digest_size=32), 0
    buffer = memoryview(bytearray(_CHUNK_BYTES))
    with open(path, "rb", buffering=0) as file:
        while count := file.readinto(buffer):
            digest.update(buffer[:count])
            size += count
    return FileRecord(size, digest.hexdigest())


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


def find_damage(folder: Path, *, sizes_only: bool = False) -> str | None:
    """File and reason why `folder` is not a complete checkpoint; None when it is. Reads every byte, or with `sizes_only` just
    the manifest and the sizes. A file that is not in the manifest, and that a loader might read, is damage too."""
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
        with ThreadPoolExecutor(_READERS) as threads:
            reasons = threads.map(lambda name: _file_damage(folder / name, records[name], sizes_only), records)
            damage = next((f"{name} {reason}" for name, reason in zip(records, reasons, strict=True) if reason), None)
        return damage or _unlisted(folder, manifest["files"])
    except FileNotFoundError:
        return f"{MANIFEST} is missing, so the save did not finish" if folder.is_dir() else "the folder is not there"
    except (OSError, ValueError, KeyError, TypeError, AttributeError, RecursionError):  # a damaged file can raise any
        return f"{MANIFEST} cannot be read"


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


def _file_damage(path: Path, record: FileRecord, sizes_only: bool) -> str | None:
    try:
        status = path.stat()
        if not stat.S_ISREG(status.st_mode):
            return "is not a file"
        if status.st_size != record.bytes:
            return f"has {status.st_size} bytes instead of {record.bytes}"
        if not sizes_only and record_of(path) != record:
            return "does not have the content that was saved (its digest differs)"
    except FileNotFoundError:
        return "is missing"
    except OSError as error:
        return f"cannot be read ({error.strerror})"
    return None
