"""Writing files so that they are on the disk, and proving later that they are still what was written."""

from __future__ import annotations

import errno
import hashlib
import json
import os
import shutil
import stat
from collections.abc import Iterable
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from verl.errors import CheckpointError

MANIFEST = "manifest.json"
_FORMAT = 1
_CHUNK_BYTES = 8 << 20
_MAX_DOCUMENT_BYTES = 64 << 20  # of a JSON file that is read whole
# what a file system answers that cannot put a folder on the disk by itself (CIFS, 9p and many in user space)
_NO_FOLDER_SYNC = (errno.EINVAL, errno.ENOTSUP, errno.ENOSYS, errno.EISDIR)


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


def sync_folder(path: Path) -> bool:
    """Onto the disk with the names in a folder; False where the file system has no such operation."""
    try:
        sync_file(path)
    except OSError as error:
        if error.errno not in _NO_FOLDER_SYNC:
            raise
        return False
    return True


def is_there(path: Path) -> bool:
    """Whether something has that name, a link that leads nowhere included. A disk that does not answer is an OSError."""
    try:
        os.lstat(path)
    except (FileNotFoundError, NotADirectoryError):
        return False
    return True


def rename(source: Path, target: Path) -> None:
    """`source` under the name `target`, which is free. A network file system that loses the server's answer asks again and
    is told that there is nothing to rename: it has been done then."""
    try:
        os.rename(source, target)
    except FileNotFoundError:
        if is_there(source) or not is_there(target):
            raise


def remove_tree(path: Path) -> None:
    """A folder with what is in it, a file, or a link (not what it leads to)."""
    if path.is_symlink() or not path.is_dir():
        path.unlink(missing_ok=True)
    else:
        shutil.rmtree(path)


def read_document(path: Path) -> dict[str, Any]:
    """The JSON object in `path`. Raises CheckpointError when there is none."""
    try:
        found = json.loads(_read_small(path))
    except (OSError, ValueError, RecursionError) as error:
        reason = error.strerror if isinstance(error, OSError) else "not JSON"
        raise CheckpointError(f"{path} cannot be read ({reason}). Resume from another checkpoint.") from error
    if not isinstance(found, dict):
        raise CheckpointError(f"{path} is not a JSON object. Resume from another checkpoint.")
    return found


def write_manifest(folder: Path, step: int, records: dict[str, FileRecord]) -> None:
    """The list of all files of a checkpoint, written after them: a folder without it is not a checkpoint."""
    listed = {name: asdict(record) for name, record in sorted(records.items())}
    write_file(folder / MANIFEST, [_manifest_text({"format": _FORMAT, "step": step, "files": listed}).encode()])


def find_damage(folder: Path, *, sizes_only: bool = False) -> str | None:
    """Why `folder` is not a complete checkpoint (file and reason), or None when it is. Reads every byte, or with
    `sizes_only` just the manifest and the sizes. Files that are not in the manifest and that a loader might take for a part
    are damage too."""
    try:
        text = _read_small(folder / MANIFEST)
        manifest = json.loads(text)
        if _manifest_text(manifest) != text:
            return f"{MANIFEST} was changed"
        if manifest["format"] != _FORMAT:
            return f"{MANIFEST} is of format {manifest['format']}; this version reads format {_FORMAT}"
        if folder.name.startswith("global_step_") and folder.name != f"global_step_{manifest['step']}":
            return f"it is a checkpoint of step {manifest['step']} under another name"
        for name, wanted in manifest["files"].items():
            if Path(name).is_absolute() or ".." in Path(name).parts:
                return f"{MANIFEST} names {name!r}, which is not a file of the checkpoint"
            reason = _file_damage(folder / name, FileRecord(**wanted), sizes_only)
            if reason is not None:
                return f"{name} {reason}"
        return _unlisted(folder, manifest["files"])
    except FileNotFoundError:
        return f"{MANIFEST} is missing, so the save did not finish" if folder.is_dir() else "the folder is not there"
    except (
        OSError,
        ValueError,
        KeyError,
        TypeError,
        AttributeError,
        RecursionError,
    ):  # whatever damage may turn it into
        return f"{MANIFEST} cannot be read"


def _read_small(path: Path) -> str:
    """A document as text. Whatever else lies under the name (a pipe would be waited for without end) is a ValueError."""
    found = path.stat()
    if not stat.S_ISREG(found.st_mode) or found.st_size > _MAX_DOCUMENT_BYTES:
        raise ValueError(f"{path} is no document")
    return path.read_text(encoding="utf-8")


def _unlisted(folder: Path, files: dict[str, Any]) -> str | None:
    """A file of a kind that loaders look for, and that the save did not write: it would be read as a part."""
    for path in sorted(folder.rglob("*")):
        name = path.relative_to(folder).as_posix()
        looked_for = path.suffix in (".json", ".safetensors") and not path.name.startswith(".")
        if looked_for and name != MANIFEST and name not in files:
            return f"{name} was not written by the save"
    return None


def _manifest_text(manifest: dict[str, Any]) -> str:
    """One line of JSON that ends with the digest of the rest, so that no byte of it can change unseen."""
    bare = {key: value for key, value in manifest.items() if key != "blake2b"}
    digest = hashlib.blake2b(json.dumps(bare).encode(), digest_size=32).hexdigest()
    return json.dumps({**bare, "blake2b": digest})


def _file_damage(path: Path, wanted: FileRecord, sizes_only: bool) -> str | None:
    try:
        found = path.stat()
        if not stat.S_ISREG(found.st_mode):
            return "is not a file"
        if found.st_size != wanted.bytes:
            return f"has {found.st_size} bytes instead of {wanted.bytes}"
        if not sizes_only and record_of(path) != wanted:
            return "does not have the content that was saved (its digest differs)"
    except FileNotFoundError:
        return "is missing"
    except OSError as error:
        return f"cannot be read ({error.strerror})"
    return None
