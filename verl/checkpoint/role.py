"""One role's part of a checkpoint: model, optimizer, adapters and schedule."""

from __future__ import annotations

import copy
from collections.abc import Callable, Collection
from dataclasses import dataclass
from pathlib import Path

from verl.checkpoint import tensor_files
from verl.checkpoint.files import read_document, write_json
from verl.engines.api import AdapterState, Deferred, EngineState, Tensors, whole
from verl.errors import CheckpointError, os_error_of
from verl.foreign_text import clean
from verl.manifest import FileRecord, record_of
from verl.models.lora import CONFIG_FILE as ADAPTER_CONFIG
from verl.models.lora import WEIGHTS_FILE as ADAPTER_WEIGHTS
from verl.regular_files import sync_file
from verl.tracking.files import is_count

ALL_CONTENTS = ("model", "optimizer", "extra")
_WEIGHTS = {"model", "hf_model"}
_COUNTS = ("num_lr_steps", "num_optimizer_steps")  # of extra.json


@dataclass(frozen=True)
class RoleCheckpoint:
    """The state that one role saves. `hf_files` writes config, generation config and tokenizer into a folder. `contents` is a
    subset of model, optimizer, extra, hf_model; model and hf_model are the same files here. `lora_only` saves the adapters
    without the model.

    If the role's weights are sharded over ranks, one of them calls `write`, its peers `take_part`.
    """

    state: EngineState
    hf_files: Callable[[Path], None]
    contents: Collection[str] = ALL_CONTENTS
    lora_only: bool = False

    def write(self, folder: Path) -> dict[str, FileRecord]:
        """Write all files of the role to the new folder `folder`; returns their records by path."""
        folder.mkdir()
        return _write_role(folder, self)

    def take_part(self) -> None:
        """Join the collectives that gather the tensors for the rank that writes."""
        for tensors in self.files().values():
            for tensor in map(tensors.__getitem__, tensor_files.file_order(tensors)):
                if not isinstance(tensor, Deferred) or tensor.is_collective:
                    whole(tensor)

    def copied(self) -> RoleCheckpoint:
        """A copy with its tensors in host memory, to be written while the role trains."""
        copies = {
            group: {
                name: whole(tensors[name]).detach().to("cpu", copy=True) for name in tensor_files.file_order(tensors)
            }
            for group, tensors in self.files().items()
        }
        saved = {
            name: t for group, part in copies.items() if group.startswith("huggingface/") for name, t in part.items()
        }
        model = {name: saved[name] for name in self.state.model if name in saved}  # the order decides the files
        adapter = self.state.adapter
        if adapter is not None and "lora_adapter" in copies:
            adapter = AdapterState(copies["lora_adapter"], copy.deepcopy(adapter.config))
        state = EngineState(model, copies.get("optimizer", {}), copy.deepcopy(self.state.extra), adapter)
        return RoleCheckpoint(state, self.hf_files, self.contents, self.lora_only)

    def files(self) -> dict[str, Tensors]:
        """Groups of tensors by place in the role's folder, in the order of writing."""
        groups: dict[str, Tensors] = {}
        has_model = "model" in self.contents or "hf_model" in self.contents
        if has_model and not (self.lora_only and self.state.adapter):
            parts = tensor_files.model_parts(self.state.model)
            groups |= {f"huggingface/{number}": part for number, part in enumerate(parts)}
        if has_model and self.state.adapter is not None:
            groups["lora_adapter"] = self.state.adapter.tensors
        if "optimizer" in self.contents:
            groups["optimizer"] = self.state.optimizer
        return groups

    def num_bytes(self) -> int:
        """Bytes of the tensors to write."""
        return sum(tensor_files.num_bytes(tensors) for tensors in self.files().values())


def _write_role(folder: Path, role: RoleCheckpoint) -> dict[str, FileRecord]:
    records: dict[str, FileRecord] = {}
    files = role.files()
    model_folder = folder / "huggingface"
    model_folder.mkdir()
    try:
        role.hf_files(model_folder)
    except Exception as error:
        raise os_error_of(error) or error from error  # a full disk, as tokenizers reports it
    config_file = model_folder / "config.json"
    if "huggingface/0" in files and role.state.model and config_file.exists():
        # the module may compute in a narrower dtype than the saved master weights have
        tensor_files.set_config_dtype(config_file, next(iter(role.state.model.values())).dtype)
    for file in sorted(p for p in model_folder.rglob("*") if p.is_file()):
        sync_file(file)
        records[str(file.relative_to(folder))] = record_of(file)
    if "huggingface/0" in files:
        written = tensor_files.write_model(model_folder, role.state.model)
        records |= {f"huggingface/{name}": record for name, record in written.items()}
    if "lora_adapter" in files:
        records |= _write_adapter(folder, role.state)
    if "optimizer" in files:
        records["optimizer.safetensors"] = tensor_files.write_tensors(
            folder / "optimizer.safetensors", role.state.optimizer
        )
    if "extra" in role.contents:
        records["extra.json"] = write_json(folder / "extra.json", role.state.extra, f"The state of {folder.name}")
    return records


def _write_adapter(folder: Path, state: EngineState) -> dict[str, FileRecord]:
    assert state.adapter is not None
    (folder / "lora_adapter").mkdir()
    config, weights = f"lora_adapter/{ADAPTER_CONFIG}", f"lora_adapter/{ADAPTER_WEIGHTS}"
    return {
        config: write_json(folder / config, state.adapter.config, "The settings of the adapters"),
        weights: tensor_files.write_tensors(folder / weights, state.adapter.tensors),
    }


def require_parts(folder: Path, contents: Collection[str], adapters: bool | None = None) -> None:
    """Raise CheckpointError when a role in `folder` was not saved, or without one of `contents`, or, unless `adapters` is
    None, with LoRA if it has none now, or the other way round. Nothing is read."""
    if not folder.is_dir():
        raise CheckpointError(
            f"{folder.parent} has no {folder.name}; it was saved by a run without one. Set trainer.resume_mode=disable."
        )
    weights, saved_adapters = bool(_WEIGHTS & set(contents)), (folder / "lora_adapter" / ADAPTER_CONFIG).is_file()
    is_there = {
        **{name: saved_adapters or any((folder / "huggingface").glob("model*.safetensors")) for name in _WEIGHTS},
        "optimizer": (folder / "optimizer.safetensors").exists(),
        "extra": (folder / "extra.json").exists(),
    }
    for name in contents:
        if not is_there.get(name, True):
            raise CheckpointError(
                f"The checkpoint {folder.parent} was saved without the {name} of {folder.name}. Take {name!r} out of "
                "checkpoint.load_contents, or resume from another checkpoint."
            )
    if weights and adapters is not None and adapters != saved_adapters:
        how, fix = ("with", "to what it was then") if saved_adapters else ("without", "to 0")
        raise CheckpointError(
            f"The {folder.name} in the checkpoint {folder.parent} was saved {how} LoRA adapters. Set model.lora_rank {fix}."
        )


def read_role(folder: Path, contents: Collection[str]) -> EngineState:
    """The parts `contents` of a role in `folder`, with tensors that are read when they are built; other parts are empty. Raises
    CheckpointError as `require_parts` does."""
    require_parts(folder, contents)
    weights = bool(_WEIGHTS & set(contents))
    optimizer = tensor_files.deferred_tensors(folder / "optimizer.safetensors") if "optimizer" in contents else {}
    extra = read_document(folder / "extra.json") if "extra" in contents else {}
    wrong = [name for name in _COUNTS if not is_count(extra.get(name, 0))]
    if wrong:
        raise CheckpointError(
            f"{folder / 'extra.json'} has {wrong[0]}={clean(extra[wrong[0]])}, which is no count. Resume from another "
            "checkpoint."
        )
    adapter_folder = folder / "lora_adapter"
    if not weights or not (adapter_folder / ADAPTER_CONFIG).is_file():
        return EngineState(tensor_files.read_model(folder / "huggingface") if weights else {}, optimizer, extra)
    config = read_document(adapter_folder / ADAPTER_CONFIG)
    adapter = AdapterState(tensor_files.deferred_tensors(adapter_folder / ADAPTER_WEIGHTS), config)
    return EngineState({}, optimizer, extra, adapter)
