"""Names and JSON files of a checkpoint: what its readers and writers share beside the manifest."""

import json
import shutil
from pathlib import Path
from typing import Any

from verl.errors import CheckpointError
from verl.manifest import FileRecord, write_file
from verl.tracking.files import has, read_json

SMALL_BYTES = 64 << 20  # larger files of tensors are compared while they load, smaller ones before a choice


def write_json(path: Path, value: object, place: str) -> FileRecord:
    """Write `value` to a new JSON file. Raises CheckpointError naming `place` when it is not JSON."""
    try:
        text = json.dumps(value, indent=1)
    except TypeError as error:
        raise CheckpointError(f"{place} cannot be saved as JSON: {error}.") from error
    return write_file(path, [text.encode()])


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
