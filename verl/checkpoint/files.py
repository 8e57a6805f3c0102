"""Writing files so that they are on the disk, and proving later that they are still what was written."""

from __future__ import annotations

import hashlib
import json
import os
from collections.abc import Iterable
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from verl.errors import CheckpointError

MANIFEST = "manifest.json"
_FORMAT = 1
_CHUNK_BYTES = 8 << 20


@dataclass(frozen=True)
class FileRecord:
    """What a file holds: its size, and the BLAKE2b-256 of its content."""

    bytes: int
    blake2b: str


def write_file(path: Path, parts: Iterable[bytes | memoryview]) -> FileRecord:
    """Write `parts` one after the other to a new file and onto the disk. The digest is taken from memory, on the way:
    a later comparison sees what the disk did to it."""
    digest, size = hashlib.blake2b(digest_size=32), 0
    with open(path, "xb") as file:
        for part in parts:
            file.write(part)
            digest.update(part)
            size += len(part)
        file.flush()
        os.fsync(file.fileno())
    return FileRecord(size, digest.hexdigest())


def write_json(path: Path, value: Any, place: str) -> FileRecord:
    """Raises CheckpointError naming `place` when JSON cannot hold `value`."""
    try:
        text = json.dumps(value, indent=1)
    except TypeError as error:
        raise CheckpointError(f"{place} cannot be saved as JSON: {error}.") from error
    return write_file(path, [text.encode()])


def record_of(path: Path) -> FileRecord:
    """The record of a file as it now lies on the disk."""
    digest, size = hashlib.blake2b(digest_size=32), 0
    buffer = memoryview(bytearray(_CHUNK_BYTES))
    with open(path, "rb", buffering=0) as file:
        while count := file.readinto(buffer):
            digest.update(buffer[:count])
            size += count
    return FileRecord(size, digest.hexdigest())


def sync_file(path: Path) -> None:
    """Onto the disk with a file or folder that somebody else wrote."""
    descriptor = os.open(path, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)


def write_manifest(folder: Path, step: int, records: dict[str, FileRecord]) -> None:
    """The list of all files of a checkpoint, written after them: a folder without it is not a checkpoint."""
    listed = {name: asdict(record) for name, record in sorted(records.items())}
    write_file(folder / MANIFEST, [_manifest_text({"format": _FORMAT, "step": step, "files": listed}).encode()])


def find_damage(folder: Path, *, sizes_only: bool = False) -> str | None:
    """Why `folder` is not a complete checkpoint (file and reason), or None when it is. Reads every byte, or with
    `sizes_only` just the manifest and the sizes."""
    try:
        text = (folder / MANIFEST).read_text(encoding="utf-8")
        manifest = json.loads(text)
        if _manifest_text(manifest) != text:
            return f"{MANIFEST} was changed"
        if manifest["format"] != _FORMAT:
            return f"{MANIFEST} is of format {manifest['format']}; this version reads format {_FORMAT}"
        if folder.name.startswith("global_step_") and folder.name != f"global_step_{manifest['step']}":
            return f"it is a checkpoint of step {manifest['step']} under another name"
        for name, wanted in manifest["files"].items():
            reason = _file_damage(folder / name, FileRecord(**wanted), sizes_only)
            if reason is not None:
                return f"{name} {reason}"
    except FileNotFoundError:
        return f"{MANIFEST} is missing, so the save did not finish"
    except (OSError, ValueError, KeyError, TypeError, AttributeError):  # whatever a damaged document may turn into
        return f"{MANIFEST} cannot be read"
    return None


def _manifest_text(manifest: dict[str, Any]) -> str:
    """One line of JSON that ends with the digest of the rest, so that no byte of it can change unseen."""
    bare = {key: value for key, value in manifest.items() if key != "blake2b"}
    digest = hashlib.blake2b(json.dumps(bare).encode(), digest_size=32).hexdigest()
    return json.dumps({**bare, "blake2b": digest})


def _file_damage(path: Path, wanted: FileRecord, sizes_only: bool) -> str | None:
    try:
        size = path.stat().st_size
        if size != wanted.bytes:
            return f"has {size} bytes instead of {wanted.bytes}"
        if not sizes_only and record_of(path) != wanted:
            return "does not have the content that was saved (its digest differs)"
    except FileNotFoundError:
        return "is missing"
    except OSError as error:
        return f"cannot be read ({error.strerror})"
    return None
