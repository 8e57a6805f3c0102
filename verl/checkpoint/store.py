"""Checkpoints of a run: saved whole or not at all, proved before they count, removed only when newer ones are good.

    global_step_N/
      {actor,critic}/huggingface/{config.json, tokenizer files, model.safetensors}   float32, for from_pretrained
      {actor,critic}/{optimizer.safetensors, extra.json}
      {actor,critic}/lora_adapter/                          with LoRA: what trains, for peft; the model has it merged in
      trainer_state.json
      manifest.json                     size and digest of every file; written last
    latest_checkpointed_iteration.txt   N of the newest

A save writes `.global_step_N.tmp-PID`, reads it back against its digests, and renames it. At any moment the newest folder
named global_step_N that verifies is a complete checkpoint, whatever was killed.
"""

from __future__ import annotations

import contextlib
import json
import logging
import os
import re
import shutil
import time
from collections.abc import Callable, Collection, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from verl.checkpoint.files import (
    MANIFEST,
    FileRecord,
    find_damage,
    record_of,
    sync_file,
    write_json,
    write_manifest,
)
from verl.checkpoint.tensor_files import (
    file_order,
    model_parts,
    num_bytes,
    read_model,
    read_tensors,
    set_config_dtype,
    write_model,
    write_tensors,
)
from verl.engines.api import AdapterState, EngineState, Tensors, whole
from verl.errors import CheckpointError
from verl.models.lora import CONFIG_FILE as ADAPTER_CONFIG
from verl.models.lora import WEIGHTS_FILE as ADAPTER_WEIGHTS
from verl.tracking.files import write_atomically

log = logging.getLogger(__name__)

ALL_CONTENTS = ("model", "optimizer", "extra")

_NAME = re.compile(r"global_step_(\d+)")
_LEFTOVER = re.compile(r"\.(global_step_\d+)\.(tmp|old|removed)-\d+")
_SPARE_BYTES = 64 << 20  # tokenizer, configs, manifest, and room for the file system


@dataclass(frozen=True)
class RoleCheckpoint:
    """What one role saves. `hf_files` writes config, generation config and tokenizer into a folder. `contents` is a
    subset of model, optimizer, extra, hf_model; model and hf_model are the same files here. `lora_only` leaves out
    everything of the model but its adapters.

    Where the role's weights are spread over ranks, one of them calls `write`, the others `take_part`.
    """

    state: EngineState
    hf_files: Callable[[Path], None]
    contents: Collection[str] = ALL_CONTENTS
    lora_only: bool = False

    def write(self, folder: Path) -> dict[str, FileRecord]:
        """All files of the role, in the new folder `folder`; returns their records by path."""
        folder.mkdir()
        return _write_role(folder, self)

    def take_part(self) -> None:
        """Help another rank to put together what it writes."""
        for tensors in self.files().values():
            for name in file_order(tensors):
                whole(tensors[name])

    def files(self) -> dict[str, Tensors]:
        """Groups of tensors by place in the role's folder, in the order in which they are written."""
        found: dict[str, Tensors] = {}
        has_model = "model" in self.contents or "hf_model" in self.contents
        if has_model and not (self.lora_only and self.state.adapter):
            parts = model_parts(self.state.model)
            found |= {f"huggingface/{number}": part for number, part in enumerate(parts)}
        if has_model and self.state.adapter is not None:
            found["lora_adapter"] = self.state.adapter.tensors
        if "optimizer" in self.contents:
            found["optimizer"] = self.state.optimizer
        return found

    def num_bytes(self) -> int:
        """Of the tensors that will be written."""
        return sum(num_bytes(tensors) for tensors in self.files().values())


@dataclass(frozen=True)
class LoadedCheckpoint:
    step: int
    roles: dict[str, EngineState]
    trainer_state: dict[str, Any] = field(default_factory=dict)


class CheckpointStore:
    """The checkpoints under `root`. One process writes (the one that holds the run folder's lock).

    `keep` is the number of newest checkpoints to keep; None or 0 keeps all. Making a store removes what killed saves left.
    """

    def __init__(self, root: str | Path, keep: int | None = None, *, verify_after_write: bool = True):
        self.root = Path(root)
        self.keep = keep if keep is not None and keep > 0 else None
        self.verify_after_write = verify_after_write
        self._clean_up()

    def candidates(self) -> list[int]:
        """Steps of the folders named global_step_N, newest first; whether they are complete shows in `find`."""
        return candidates(self.root)

    def path(self, step: int) -> Path:
        """`root`/global_step_N."""
        return self.root / f"global_step_{step}"

    # -- saving -------------------------------------------------------------------------------------------------------

    def save(self, step: int, roles: Mapping[str, RoleCheckpoint], trainer_state: Mapping[str, Any]) -> Path:
        """Write global_step_{step} and then forget checkpoints beyond `keep`.

        Raises CheckpointError, with everything saved before untouched, when the disk has no room (before anything is
        written), fails while writing, or does not give back what was written.
        """
        self._require_space(step, roles)
        temporary = self.root / f".global_step_{step}.tmp-{os.getpid()}"
        try:
            self.root.mkdir(parents=True, exist_ok=True)
            _write_folder(temporary, step, roles, trainer_state)
            damage = find_damage(temporary) if self.verify_after_write else None
            if damage is not None:
                raise CheckpointError(f"Checkpoint {step} was not kept: on reading it back, {damage}. Check the disk.")
            self._put_in_place(temporary, step)
        except OSError as error:
            raise CheckpointError(
                f"Checkpoint {step} could not be saved under {self.root}: {error.strerror or error}. "
                f"{self._what_remains()} Free some space or check the disk, and run the same command again."
            ) from error
        finally:
            self._clean_up()
        self._remove_old(step)
        return self.path(step)

    def _require_space(self, step: int, roles: Mapping[str, RoleCheckpoint]) -> None:
        wanted = sum(role.num_bytes() for role in roles.values()) + _SPARE_BYTES
        existing = next(p for p in (self.root, *self.root.absolute().parents) if p.exists())
        free = shutil.disk_usage(existing).free
        if free < wanted:
            raise CheckpointError(
                f"Checkpoint {step} needs {wanted / 1e9:.2f} GB, and {self.root} has {free / 1e9:.2f} GB free; nothing was "
                "written. Free some space, or keep fewer with trainer.max_actor_ckpt_to_keep."
            )

    def _put_in_place(self, temporary: Path, step: int) -> None:
        final = self.path(step)
        if final.exists():  # a damaged one, or one of an earlier run in this folder
            os.rename(final, self.root / f".{final.name}.old-{os.getpid()}")
        os.rename(temporary, final)
        sync_file(self.root)
        self._set_aside_later(step)
        write_atomically(self.root / "latest_checkpointed_iteration.txt", str(step))
        sync_file(self.root)

    def _set_aside_later(self, step: int) -> None:
        """Steps of a run only grow: a later checkpoint is of an earlier run that was started anew or from before it, and
        must not be taken for this run's newest."""
        for later in self.candidates():
            if later > step:
                aside = self.root / f"superseded_{time.strftime('%Y%m%d-%H%M%S')}_global_step_{later}"
                os.rename(self.path(later), aside)
                log.warning("%s is of an earlier run than this one; it is now %s.", self.path(later).name, aside)

    def _remove_old(self, newest: int) -> None:
        """Delete complete checkpoints beyond the newest `keep`, counted on the disk. Never `newest`, which has just been
        verified; a damaged one does not count as kept. A failure is logged: the run does not depend on it."""
        if self.keep is None:
            return
        whole = [step for step in self.candidates() if find_damage(self.path(step), sizes_only=True) is None]
        for step in whole[self.keep :]:
            if step == newest:
                continue
            doomed = self.root / f".global_step_{step}.removed-{os.getpid()}"
            try:
                os.rename(self.path(step), doomed)  # from here on it is no checkpoint, however far the deletion gets
                shutil.rmtree(doomed)
            except OSError as error:
                log.warning("The old checkpoint %s was not removed: %s", self.path(step), error)

    def _clean_up(self) -> None:
        """Remove what killed saves and deletions left behind."""
        leftovers = list(self.root.glob(".global_step_*")) if self.root.is_dir() else []
        for path in leftovers:
            match = _LEFTOVER.fullmatch(path.name)
            if match is None:
                continue
            final = self.root / match.group(1)
            if match.group(2) == "old" and not final.exists():
                with contextlib.suppress(OSError):
                    os.rename(path, final)  # stopped between the two renames: what was there before is back
            else:
                shutil.rmtree(path, ignore_errors=True)

    def _what_remains(self) -> str:
        steps = self.candidates()
        return f"The newest before it is global_step_{steps[0]}." if steps else "No other checkpoint exists."

    # -- loading ------------------------------------------------------------------------------------------------------

    def find(self, resume_mode: str = "auto", resume_from_path: str | None = None) -> Path | None:
        """The checkpoint to go on from, every byte of it verified; None to start afresh.

        `auto`: the newest that verifies; a damaged one is named in a warning and the next older one is taken.
        `resume_path`: the given one. `disable`: None. Raises CheckpointError when the given one is missing or damaged,
        or when there are checkpoints and none verifies (starting afresh over them would hide the loss).
        """
        if resume_mode == "disable":
            return None
        if resume_mode == "resume_path":
            return self._given(resume_from_path)
        return newest_complete(self.root, "To start afresh, set trainer.resume_mode=disable.")

    def _given(self, path: str | None) -> Path:
        if not path:
            raise CheckpointError("trainer.resume_mode=resume_path needs trainer.resume_from_path=.../global_step_N.")
        folder = Path(path).expanduser()
        if not folder.is_dir() or not _NAME.fullmatch(folder.resolve().name):
            there = ", ".join(f"global_step_{s}" for s in self.candidates()[:5]) or "none"
            raise CheckpointError(
                f"trainer.resume_from_path={path} is not a folder named global_step_N. In {self.root} there are: {there}."
            )
        damage = find_damage(folder.resolve())
        if damage is not None:
            raise CheckpointError(f"The checkpoint {folder} is damaged: {damage}. Give another one.")
        return folder.resolve()

    def load(self, path: Path, contents: Mapping[str, Collection[str]] | None = None) -> LoadedCheckpoint:
        """Read a checkpoint that `find` gave. `contents` says per role which of model, optimizer, extra to read (default
        all); parts that are not read are empty. Raises CheckpointError when a wanted part was not saved."""
        names = sorted(p.parent.name for p in path.glob("*/huggingface"))
        wanted = {name: (contents or {}).get(name, ALL_CONTENTS) for name in names}
        return LoadedCheckpoint(
            step=_step_of(path),
            roles={name: read_role(path / name, wanted[name]) for name in names},
            trainer_state=trainer_state(path),
        )


def trainer_state(path: Path) -> dict[str, Any]:
    """What the run knew besides weights when the checkpoint `path` was saved."""
    return json.loads((path / "trainer_state.json").read_text(encoding="utf-8"))


def candidates(root: Path) -> list[int]:
    """Steps of the folders `root`/global_step_N, newest first."""
    matches = [_NAME.fullmatch(p.name) for p in root.iterdir() if p.is_dir()] if root.is_dir() else []
    return sorted((int(m.group(1)) for m in matches if m), reverse=True)


def newest_complete(root: Path, advice: str) -> Path | None:
    """The newest checkpoint under `root` that verifies, with a warning for each newer one that does not; None when there
    is no checkpoint. Raises CheckpointError, with `advice`, when all are damaged."""
    reasons: list[str] = []
    for step in candidates(root):
        path = root / f"global_step_{step}"
        damage = find_damage(path)
        if damage is None:
            if reasons:
                log.warning("Going on from %s instead.", path)
            return path
        log.warning("The checkpoint %s is damaged and not used: %s.", path, damage)
        reasons.append(f"global_step_{step}: {damage}")
    if reasons:
        raise CheckpointError(f"No checkpoint in {root} is complete ({'; '.join(reasons[:3])}). {advice}")
    return None


def _step_of(path: Path) -> int:
    return json.loads((path / MANIFEST).read_text(encoding="utf-8"))["step"]


def _write_folder(
    folder: Path, step: int, roles: Mapping[str, RoleCheckpoint], trainer_state: Mapping[str, Any]
) -> None:
    """All files, then the manifest, all on the disk when this returns."""
    shutil.rmtree(folder, ignore_errors=True)
    folder.mkdir()
    records: dict[str, FileRecord] = {}
    for name, role in roles.items():
        records |= {f"{name}/{file}": record for file, record in role.write(folder / name).items()}
    records["trainer_state.json"] = write_json(folder / "trainer_state.json", trainer_state, "The trainer's state")
    write_manifest(folder, step, records)
    for inner in (p for p in folder.rglob("*") if p.is_dir()):
        sync_file(inner)
    sync_file(folder)


def _write_role(folder: Path, role: RoleCheckpoint) -> dict[str, FileRecord]:
    records: dict[str, FileRecord] = {}
    files = role.files()
    model_folder = folder / "huggingface"
    model_folder.mkdir()
    role.hf_files(model_folder)
    config_file = model_folder / "config.json"
    if "huggingface/0" in files and role.state.model and config_file.exists():
        # the module may compute in a narrower format than the master weights that are saved here
        set_config_dtype(config_file, next(iter(role.state.model.values())).dtype)
    for file in sorted(p for p in model_folder.rglob("*") if p.is_file()):
        sync_file(file)
        records[str(file.relative_to(folder))] = record_of(file)
    if "huggingface/0" in files:
        written = write_model(model_folder, role.state.model)
        records |= {f"huggingface/{name}": record for name, record in written.items()}
    if "lora_adapter" in files:
        records |= _write_adapter(folder, role.state)
    if "optimizer" in files:
        records["optimizer.safetensors"] = write_tensors(folder / "optimizer.safetensors", role.state.optimizer)
    if "extra" in role.contents:
        records["extra.json"] = write_json(folder / "extra.json", role.state.extra, f"The state of {folder.name}")
    return records


def _write_adapter(folder: Path, state: EngineState) -> dict[str, FileRecord]:
    assert state.adapter is not None
    (folder / "lora_adapter").mkdir()
    config, weights = f"lora_adapter/{ADAPTER_CONFIG}", f"lora_adapter/{ADAPTER_WEIGHTS}"
    return {
        config: write_json(folder / config, state.adapter.config, "The settings of the adapters"),
        weights: write_tensors(folder / weights, state.adapter.tensors),
    }


def read_role(folder: Path, contents: Collection[str]) -> EngineState:
    """The parts `contents` of the role that was written to `folder`; those that are not read are empty. Raises
    CheckpointError when a wanted part was not saved."""

    def part(name: str, file: str) -> Path:
        if not (folder / file).exists():
            raise CheckpointError(
                f"The checkpoint {folder.parent} was saved without the {name} of {folder.name}. Take {name!r} out of "
                "checkpoint.load_contents, or resume from another checkpoint."
            )
        return folder / file

    weights = "model" in contents or "hf_model" in contents
    optimizer = read_tensors(part("optimizer", "optimizer.safetensors")) if "optimizer" in contents else {}
    extra = json.loads(part("extra", "extra.json").read_text(encoding="utf-8")) if "extra" in contents else {}
    adapter_folder = folder / "lora_adapter"
    if not weights or not adapter_folder.is_dir():
        return EngineState(read_model(folder / "huggingface") if weights else {}, optimizer, extra)
    config = json.loads((adapter_folder / ADAPTER_CONFIG).read_text(encoding="utf-8"))
    adapter = AdapterState(read_tensors(adapter_folder / ADAPTER_WEIGHTS), config)
    return EngineState({}, optimizer, extra, adapter)
