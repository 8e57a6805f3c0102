"""Checkpoints of a run: saved atomically, verified before they count, removed only when newer ones verify.

    global_step_N/
      {actor,critic}/huggingface/{config.json, tokenizer files, model.safetensors}   float32, for from_pretrained
      {actor,critic}/{optimizer.safetensors, extra.json}
      {actor,critic}/lora_adapter/                          with LoRA: the adapters, for peft; the model has them merged
      samples/ledger.sqlite             samples that were generated and had not trained (see verl/tracking/ledger/reader.py)
      trainer_state.json
      manifest.json                     size and digest of every file; written last
    latest_checkpointed_iteration.txt   N of the newest

A save writes `.global_step_N.tmp-PID`, verifies its digests, and renames it. At any moment, even after a kill, the newest
folder named global_step_N that verifies is a complete checkpoint.
"""

import contextlib
import errno
import logging
import math
import os
import shutil
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Protocol

from verl.checkpoint.files import read_document, remove_tree, write_json
from verl.checkpoint.retention import (
    LATEST,
    Retention,
    candidates,
    clean_up,
    newest_complete,
    set_aside,
    set_aside_later,
    step_of,
)
from verl.checkpoint.role import RoleCheckpoint, read_role
from verl.errors import SYSTEM_ERRORS, CheckpointError
from verl.manifest import FileRecord, find_damage, is_there, rename, seal
from verl.regular_files import make_folder, sync_folder
from verl.tracking.files import replacing

__all__ = ["CheckpointStore", "CheckpointWriter", "RoleCheckpoint", "candidates", "newest_complete", "read_role"]

log = logging.getLogger(__name__)

_SPARE_BYTES = 64 << 20  # tokenizer, configs, manifest, and room for the file system
_FULL = (errno.ENOSPC, errno.EDQUOT)


class CheckpointWriter(Protocol):
    """Writes one folder of a checkpoint, in this process or through other ones."""

    def num_bytes(self) -> int:
        """Bytes of the tensors to write."""
        ...

    def write(self, folder: Path) -> dict[str, FileRecord]:
        """Write all files to the new folder `folder`; returns their records by path in it."""
        ...


class CheckpointStore:
    """The checkpoints under `root`. Only the process that holds the run folder's lock writes.

    `keep` is the number of newest checkpoints to keep; None or 0 keeps all. The constructor removes remains of killed saves.
    """

    def __init__(self, root: str | Path, keep: int | None = None):
        self.root = Path(root)
        self.retention = Retention(self.root, keep if keep is not None and keep > 0 else None)
        self._written: set[int] = set()
        clean_up(self.root)

    def candidates(self) -> list[int]:
        """Steps of everything named global_step_N, newest first, complete or not."""
        return candidates(self.root)

    def path(self, step: int) -> Path:
        """`root`/global_step_N."""
        return self.root / f"global_step_{step}"

    # -- saving -------------------------------------------------------------------------------------------------------

    def save(self, step: int, roles: Mapping[str, CheckpointWriter], trainer_state: Mapping[str, object]) -> Path:
        """Write global_step_{step}, then remove checkpoints beyond `keep`.

        Raises CheckpointError, with earlier checkpoints untouched, when the disk is full (before anything is written), fails
        during the write, or returns other bytes than were written.
        """
        num_bytes = sum(role.num_bytes() for role in roles.values())
        with self.explained(step, num_bytes):
            temporary = self.open(step, num_bytes)
            records = {name: role.write(temporary / name) for name, role in roles.items()}
            return self.commit(temporary, step, records, trainer_state)

    def check(self) -> None:
        """Nothing: `save` is synchronous and has raised its errors."""

    def finish(self) -> None:
        """Nothing: `save` is synchronous."""

    def close(self) -> None:
        """Nothing: `save` is synchronous."""

    @contextlib.contextmanager
    def explained(self, step: int, num_bytes: int) -> Iterator[None]:
        """Turn OSError into CheckpointError while a checkpoint of `num_bytes` bytes is written; remove unfinished files."""
        try:
            yield
        except BaseException as error:
            message = self._failure(step, num_bytes, error) if isinstance(error, OSError) else ""
            clean_up(self.root)
            if message:
                raise CheckpointError(message) from error
            raise

    def open(self, step: int, num_bytes: int) -> Path:
        """Make the temporary folder of a checkpoint of `num_bytes` bytes. Raises CheckpointError without enough space, OSError
        when the disk fails."""
        num_bytes += _SPARE_BYTES
        existing = next(p for p in (self.root, *self.root.absolute().parents) if p.exists())
        free = shutil.disk_usage(existing).free
        if free < num_bytes:
            raise CheckpointError(
                f"Checkpoint {step} needs {num_bytes / 1e9:.2f} GB, and {self.root} has {free / 1e9:.2f} GB free; nothing was "
                "written. Free some space, or keep fewer with trainer.max_actor_ckpt_to_keep."
            )
        temporary = self.root / f".global_step_{step}.tmp-{os.getpid()}"
        make_folder(self.root)
        remove_tree(temporary)
        temporary.mkdir()
        return temporary

    def commit(
        self,
        temporary: Path,
        step: int,
        records: Mapping[str, Mapping[str, FileRecord]],
        trainer_state: Mapping[str, object],
    ) -> Path:
        """Turn the folder of `open`, with the files of all roles, into the newest checkpoint: complete, verify and rename it.
        Raises CheckpointError when it does not verify, OSError when the disk fails."""
        listed = {f"{name}/{file}": record for name, files in records.items() for file, record in files.items()}
        listed["trainer_state.json"] = write_json(
            temporary / "trainer_state.json", trainer_state, "The trainer's state"
        )
        seal(temporary, f"Checkpoint {step}", listed, step)
        self._put_in_place(temporary, step)
        clean_up(self.root)
        self.retention.apply(step)
        return self.path(step)

    def _put_in_place(self, temporary: Path, step: int) -> None:
        final = self.path(step)
        with replacing(self.root / LATEST, str(step)):
            set_aside_later(self.root, step)
            old = self.root / f".{final.name}.old-{os.getpid()}"
            if is_there(final):
                rename(final, old)
            rename(temporary, final)
            if is_there(old) and step not in self._written:
                set_aside(old, step)
            self._written.add(step)
            sync_folder(self.root)
        sync_folder(self.root)

    def _failure(self, step: int, num_bytes: int, error: OSError) -> str:
        reason = error.strerror or str(error)
        if error.errno in _FULL:
            with contextlib.suppress(OSError):
                free = shutil.disk_usage(self.root).free
                reason += f" (it needs {(num_bytes + _SPARE_BYTES) / 1e9:.2f} GB, and {free / 1e9:.2f} GB are free)"
        remains = "What was saved before is untouched."
        with contextlib.suppress(OSError):
            older = [other for other in self.candidates() if other != step]
            remains = f"The newest beside it is global_step_{older[0]}." if older else "No other checkpoint exists."
        return (
            f"Checkpoint {step} could not be saved under {self.root}: {reason}. {remains} "
            f"{SYSTEM_ERRORS.get(error.errno or 0, 'Check the disk')}, and run the same command again."
        )

    # -- loading ------------------------------------------------------------------------------------------------------

    def find(
        self, resume_mode: str = "auto", resume_from_path: str | None = None, *, max_bytes: float = math.inf
    ) -> Path | None:
        """The checkpoint to resume from, every byte verified except tensors of more than `max_bytes`; None to start over.

        `auto`: the newest that verifies; a damaged one is named in a warning and the next older one is taken.
        `resume_path`: the given one. `disable`: None. Raises CheckpointError when the given one is missing or damaged,
        or when there are checkpoints and none verifies: starting over would hide the loss.
        """
        if resume_mode == "disable":
            return None
        if resume_mode == "resume_path":
            return self._given(resume_from_path, max_bytes)
        return newest_complete(self.root, "To start over, set trainer.resume_mode=disable.", max_bytes)

    def _given(self, path: str | None, max_bytes: float) -> Path:
        if not path:
            raise CheckpointError("trainer.resume_mode=resume_path needs trainer.resume_from_path=.../global_step_N.")
        folder = Path(path).expanduser()
        if not folder.is_dir() or step_of(folder.resolve().name) is None:
            names = ", ".join(f"global_step_{s}" for s in self.candidates()[:5]) or "none"
            raise CheckpointError(
                f"trainer.resume_from_path={path} is not a folder named global_step_N. In {self.root} there are: {names}."
            )
        damage = find_damage(folder.resolve(), max_bytes=max_bytes)
        if damage is not None:
            raise CheckpointError(f"The checkpoint {folder} is damaged: {damage}. Give another one.")
        return folder.resolve()


def trainer_state(path: Path) -> dict[str, object]:
    """The run's state in the checkpoint `path`, without the weights."""
    return read_document(path / "trainer_state.json")
