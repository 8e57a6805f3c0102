"""Folders and files that a later start can trust: written completely, synced, and listed with their digests in a manifest.

    FOLDER/manifest.json        size and digest of every file of FOLDER and its subfolders; written last
    FILE.manifest.json          the same for a single file

Everything that verl saves goes through `new_folder`, or through `seal` and `put_in_place`, and is compared with its manifest
before it is used. Folders without a manifest are of other programs; nothing of them is compared.
"""

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

from verl.errors import CheckpointError
from verl.parallel import digests
from verl.regular_files import make_folder, read_text, sync_file, sync_folder, whole_file

MANIFEST = "manifest.json"
_FORMAT = 2
_DEPTH = 3  # a model in a checkpoint is at ROLE/huggingface below its manifest
_OURS = '"blake2b": "'  # manifests of other programs have no digests of this name

# files of checkpoints of the existing release: FSDP of its trainers and of fine-tuning, and Megatron
_OF_OTHERS = ("model_world_size_*.pt", "*/model_world_size_*.pt", "*/dist_ckpt", "*/model/dist_ckpt")


@dataclass(frozen=True)
class FileRecord:
    """Size and digest (see digests.py) of a file.

    >>> FileRecord(bytes=1024, blake2b="9f2c").bytes
    1024
    """

    bytes: int
    blake2b: str


# -- writing ------------------------------------------------------------------------------------------------------------


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


def record_of(path: Path) -> FileRecord:
    """The record of a file as the disk returns it."""
    with ThreadPoolExecutor(digests.THREADS) as threads:
        return FileRecord(*digests.read_digest(path, threads))


def write_manifest(folder: Path, step: int, records: Mapping[str, FileRecord], name: str = MANIFEST) -> None:
    """Write the list of all files of a folder, after them: a checkpoint without it is none."""
    listed = {file: asdict(record) for file, record in sorted(records.items())}
    write_file(folder / name, [sealed({"format": _FORMAT, "step": step, "files": listed}).encode()])


def seal(folder: Path, what: str, records: Mapping[str, FileRecord] | None = None, step: int = 0) -> None:
    """Complete a folder: sync it, and write the manifest. `records` has files with digests from memory; all further files are
    read. Raises CheckpointError if the disk returns other bytes than were written."""
    listed = dict(records or {})
    for file in sorted(path for path in folder.rglob("*") if path.is_file()):
        if (name := file.relative_to(folder).as_posix()) not in listed:
            sync_file(file)
            listed[name] = record_of(file)
    write_manifest(folder, step, listed)
    for inner in (path for path in folder.rglob("*") if path.is_dir()):
        sync_folder(inner)
    sync_folder(folder)
    if (damage := find_damage(folder)) is not None:
        raise CheckpointError(f"{what} was not kept: on reading it back, {damage}. Check the disk.")


def is_there(path: Path) -> bool:
    """Whether the name exists, dangling links included. Raises OSError when the disk fails."""
    try:
        os.lstat(path)
    except (FileNotFoundError, NotADirectoryError):
        return False
    return True


def rename(source: Path, target: Path) -> None:
    """Rename `source` to the free name `target`. If the reply of a server is lost, a network client sends the request again and
    gets FileNotFoundError; the rename then happened."""
    try:
        os.rename(source, target)
    except FileNotFoundError:
        if is_there(source) or not is_there(target):
            raise


def put_in_place(temporary: Path, final: Path) -> None:
    """Give a complete folder or file its name for good. The name is free, or an empty folder's."""
    rename(temporary, final)
    sync_folder(final.parent)


@contextlib.contextmanager
def new_folder(final: Path, *, replaces: bool = False) -> Iterator[tuple[Path, dict[str, FileRecord]]]:
    """A temporary folder that becomes `final` when the block ends, complete and with a manifest, or not at all; with `replaces`
    in the place of another one. The second value takes records as `seal` does. Raises OSError, and CheckpointError as
    `seal`."""
    temporary, records = final.parent / f".{final.name}.tmp-{os.getpid()}", dict[str, FileRecord]()
    shutil.rmtree(temporary, ignore_errors=True)
    make_folder(final.parent)
    try:
        temporary.mkdir()
        yield temporary, records
        seal(temporary, str(final), records)
        if replaces:
            shutil.rmtree(final, ignore_errors=True)
        put_in_place(temporary, final)
    finally:
        shutil.rmtree(temporary, ignore_errors=True)


@contextlib.contextmanager
def new_file(final: Path) -> Iterator[Path]:
    """As `new_folder`, for a file with a manifest next to it."""
    manifest = final.with_name(f"{final.name}.{MANIFEST}")
    with whole_file(final) as temporary:
        yield temporary
        manifest.unlink(missing_ok=True)  # of a file that is not there any more
        record = record_of(temporary)
    with whole_file(manifest) as temporary:
        write_manifest(temporary.parent, 0, {final.name: record}, temporary.name)


# -- reading ------------------------------------------------------------------------------------------------------------


def find_damage(
    folder: Path,
    threads: Executor | None = None,
    *,
    max_bytes: float = math.inf,
    reads: Callable[[str], bool] | None = None,
    manifest_name: str = MANIFEST,
) -> str | None:
    """File and reason why `folder` is not complete; None when it is. Compares the manifest, all sizes, and on `threads` the
    content of files except tensors of more than `max_bytes`. A file that is not in the manifest, and that a loader might
    read, is damage too, unless a loader only `reads` some names."""
    try:
        manifest = _unsealed(read_text(folder / manifest_name))
        if manifest is None:
            return f"{manifest_name} was changed"
        if manifest["format"] != _FORMAT:
            return f"{manifest_name} has format {manifest['format']}; this version reads format {_FORMAT}"
        if folder.name.startswith("global_step_") and folder.name != f"global_step_{manifest['step']}":
            return f"it is a checkpoint of step {manifest['step']} under another name"
        records = {name: FileRecord(**record) for name, record in manifest["files"].items()}
        for name in records:
            if Path(name).is_absolute() or ".." in Path(name).parts:
                return f"{manifest_name} names {name!r}, which is not a file of the checkpoint"
        with contextlib.nullcontext(threads) if threads else ThreadPoolExecutor(digests.THREADS) as pool:
            for name, record in records.items():
                if reads is not None and not reads(name):
                    continue
                is_left = record.bytes > max_bytes and name.endswith(".safetensors")
                if reason := _file_damage(folder / name, record, None if is_left else pool):
                    return f"{name} {reason}"
        return None if reads is not None else _unlisted(folder, manifest["files"])
    except FileNotFoundError:
        if foreign := next((file.name for pattern in _OF_OTHERS for file in folder.glob(pattern)), None):
            return (
                f"{foreign} is of another release of verl, whose checkpoints are not read here; merge it with that release's "
                "verl.model_merger, and name the folder as the model's path"
            )
        return f"{MANIFEST} is missing, so the save did not finish" if folder.is_dir() else "the folder is not there"
    except (OSError, ValueError, KeyError, TypeError, AttributeError, RecursionError):  # a damaged file can raise any
        return f"{manifest_name} cannot be read"


@contextlib.contextmanager
def verification(folder: Path, reads: Callable[[str], bool] | None = None) -> Iterator[Callable[[], str | None]]:
    """Compare `folder` with its manifest on threads while the caller loads it, so each byte comes from the disk once. The
    function waits for the end, and returns what `find_damage` does."""
    with ThreadPoolExecutor(digests.THREADS) as threads, ThreadPoolExecutor(1) as thread:
        damage = thread.submit(find_damage, folder, threads, reads=reads)
        try:
            yield damage.result
        finally:
            threads.shutdown(wait=False, cancel_futures=True)  # a load that was interrupted does not wait


def file_damage(file: Path) -> str | None:
    """As `find_damage`, of a file of `new_file`; None for a file without a manifest."""
    name = f"{file.name}.{MANIFEST}"
    is_there = file.with_name(name).exists()
    return find_damage(file.parent, reads=lambda listed: True, manifest_name=name) if is_there else None


def manifest_above(folder: Path) -> tuple[Path, str] | None:
    """(the folder with a manifest of the files of `folder`, the beginning of their names in it): a model in a checkpoint has
    none of its own. None for a folder of another program."""
    folder = folder.resolve()
    for root in [folder, *folder.parents][:_DEPTH]:
        part = "".join(f"{name}/" for name in folder.relative_to(root).parts)
        try:
            text = read_text(root / MANIFEST)
        except FileNotFoundError:
            continue
        except (OSError, ValueError):
            return (root, part) if root == folder else None
        try:
            document = json.loads(text)  # fails for a truncated manifest, of any program
            files = document["files"] if _OURS in text else {}
            if any(name.startswith(part) for name in files):
                return root, part
        except (ValueError, KeyError, TypeError, RecursionError):  # `find_damage` says what is wrong with it
            return root, part
    return None


def _unlisted(folder: Path, files: Mapping[str, object]) -> str | None:
    """A file that loaders look for and that the save did not write."""
    for path in sorted(folder.rglob("*")):
        name = path.relative_to(folder).as_posix()
        is_read = path.suffix in (".json", ".safetensors") and not path.name.startswith(".")
        if is_read and name != MANIFEST and name not in files:
            return f"{name} was not written by the save"
    return None


def sealed(document: Mapping[str, object]) -> str:
    """One line of JSON that ends with the digest of the line before it, so that any changed byte is detected."""
    bare = {key: value for key, value in document.items() if key != "blake2b"}
    digest = hashlib.blake2b(json.dumps(bare).encode(), digest_size=32).hexdigest()
    return json.dumps({**bare, "blake2b": digest})


def read_sealed(path: Path) -> dict[str, Any]:
    """The document of `sealed` in a file. Raises CheckpointError naming the file."""
    try:
        document = _unsealed(read_text(path))
    except (OSError, ValueError, TypeError, AttributeError, RecursionError) as error:
        raise CheckpointError(f"{path} cannot be read ({type(error).__name__}).") from error
    if document is None:
        raise CheckpointError(f"{path} does not have the content that was saved (its digest differs).")
    return document


def _unsealed(text: str) -> dict[str, Any] | None:
    """The document in a text of `sealed`; None if a byte was changed. Raises ValueError for text that is no JSON."""
    document = json.loads(text)
    return document if sealed(document) == text else None


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
