"""Saved adapters, named tinker://MODEL/KIND/NAME, in folders that peft reads.

    models/MODEL/model.json                                     the model as it was created
    models/MODEL/{weights,sampler_weights}/NAME/
      {adapter_model.safetensors, adapter_config.json}
      optimizer.safetensors                                     of weights
      state.json                                                rank, optimizer steps, times
      manifest.json                                             size and digest of every file; written last

A save writes a hidden folder, verifies its digests and renames it, so a folder with a name is complete.
"""

from __future__ import annotations

import json
import os
import re
import shutil
import time
from collections.abc import Iterator, Mapping
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any, Literal

import torch

from verl.checkpoint.files import find_damage, read_document, rename, write_json, write_manifest
from verl.checkpoint.tensor_files import read_tensors, write_tensors
from verl.engines.adapters import Adapter, AdapterWeights
from verl.models.lora import CONFIG_FILE, WEIGHTS_FILE, own_names, peft_names
from verl.tinker.records import RefusedRequest
from verl.tracking.files import sync_folder, write_atomically

KINDS: dict[str, Literal["training", "sampler"]] = {"weights": "training", "sampler_weights": "sampler"}
_NAME = re.compile(r"[A-Za-z0-9][A-Za-z0-9._=-]{0,127}")
_MODEL = re.compile(r"[A-Za-z0-9][A-Za-z0-9:_-]{0,127}")


@dataclass(frozen=True)
class SavedAdapter:
    """A checkpoint: its place, and the content of its state.json."""

    model_id: str
    kind: str
    name: str
    folder: Path
    state: Mapping[str, Any]

    @property
    def uri(self) -> str:
        """tinker://MODEL/KIND/NAME."""
        return f"tinker://{self.model_id}/{self.kind}/{self.name}"

    def num_bytes(self) -> int:
        """Bytes of its files."""
        return sum(file.stat().st_size for file in self.folder.iterdir())


class Checkpoints:
    """The saved adapters under `root`, of the base model at `base`. Loaded adapters are on `device`.

    Names come from requests: each is checked before it becomes part of a path. Raises RefusedRequest (404 for a name that
    does not exist).
    """

    def __init__(self, root: Path, base: str, device: torch.device):
        self.root, self.base, self.device = root / "models", base, device
        self.root.mkdir(parents=True, exist_ok=True)

    def register(self, model_id: str, facts: Mapping[str, Any]) -> None:
        """Write down a model as it was created."""
        self._model_folder(model_id).mkdir(parents=True, exist_ok=True)
        write_atomically(self._model_folder(model_id) / "model.json", json.dumps(facts))

    def facts(self, model_id: str) -> dict[str, Any]:
        """The content that `register` wrote."""
        file = self._model_folder(model_id) / "model.json"
        if not file.is_file():
            raise RefusedRequest(f"There is no training run {model_id!r}.", 404)
        return read_document(file)

    def models(self) -> list[str]:
        """All registered models, the newest first."""
        files = sorted(self.root.glob("*/model.json"), key=lambda file: file.stat().st_mtime, reverse=True)
        return [file.parent.name for file in files]

    def save(
        self, model_id: str, kind: str, name: str, adapter: Adapter, *, overwrite: bool, notes: Mapping[str, Any]
    ) -> SavedAdapter:
        """Save an adapter, for `weights` with its optimizer. A name that exists is refused unless `overwrite`."""
        final = self._folder(model_id, kind, name)
        if final.exists() and not overwrite:
            raise RefusedRequest(f"{kind}/{name} exists already. Choose another name, or set overwrite.")
        temporary = final.parent / f".{name}.tmp-{os.getpid()}"
        shutil.rmtree(temporary, ignore_errors=True)
        temporary.mkdir(parents=True)
        try:
            weights = adapter.weights
            state = {"rank": weights.rank, "num_steps": adapter.num_steps, "time": time.time(), **notes}
            records = {
                WEIGHTS_FILE: write_tensors(temporary / WEIGHTS_FILE, peft_names(weights.tensors)),
                CONFIG_FILE: write_json(
                    temporary / CONFIG_FILE, weights.spec.to_json(self.base, weights.layers), "The adapter"
                ),
                "state.json": write_json(temporary / "state.json", state, "The state"),
            }
            if kind == "weights":
                slots = adapter.optimizer_tensors()
                records["optimizer.safetensors"] = write_tensors(temporary / "optimizer.safetensors", slots)
            write_manifest(temporary, adapter.num_steps, records)
            if damage := find_damage(temporary):
                raise RefusedRequest(f"{kind}/{name} was not kept: on reading it back, {damage}.", 507)
            shutil.rmtree(final, ignore_errors=True)
            rename(temporary, final)
            sync_folder(final.parent)
        except BaseException:
            shutil.rmtree(temporary, ignore_errors=True)
            raise
        return SavedAdapter(model_id, kind, name, final, state)

    def get(self, uri: str) -> SavedAdapter:
        """The checkpoint of a tinker:// address."""
        parts = uri.removeprefix("tinker://").split("/")
        if not uri.startswith("tinker://") or len(parts) != 3:
            raise RefusedRequest(f"{uri[:200]!r} is no address of the form tinker://MODEL/KIND/NAME.")
        model_id, kind, name = parts
        folder = self._folder(model_id, kind, name)
        if not folder.is_dir():
            raise RefusedRequest(f"There is no checkpoint {uri[:400]!r}.", 404)
        return SavedAdapter(model_id, kind, name, folder, read_document(folder / "state.json"))

    def load(self, uri: str, *, optimizer: bool) -> Adapter:
        """The adapter of a checkpoint, with its optimizer's state or a new one."""
        saved = self.get(uri)
        if damage := find_damage(saved.folder):
            raise RefusedRequest(f"The checkpoint {uri} is damaged: {damage}. Load another one.")
        if optimizer and saved.kind != "weights":
            raise RefusedRequest(f"{uri} has no optimizer state. Load a checkpoint of save_state.")
        tensors = own_names(self._read(saved.folder / WEIGHTS_FILE))
        adapter = Adapter(AdapterWeights(saved.state["rank"], tensors))
        if optimizer:
            adapter.num_steps = saved.state["num_steps"]
            for key, value in self._read(saved.folder / "optimizer.safetensors").items():
                name, _, slot = key.rpartition("/")
                adapter.slots.setdefault(name, {})[slot] = value
        return adapter

    def _read(self, file: Path) -> dict[str, torch.Tensor]:
        return {name: tensor.to(self.device) for name, tensor in read_tensors(file).items()}

    def listed(self, model_id: str | None = None) -> Iterator[SavedAdapter]:
        """The checkpoints of a model, or of all, the newest first."""
        pattern = f"{model_id if model_id and _MODEL.fullmatch(model_id) else '*'}/*/*/state.json"
        files = sorted(self.root.glob(pattern), key=lambda file: file.stat().st_mtime, reverse=True)
        for file in files:
            name, kind, model = (folder.name for folder in list(file.parents)[:3])
            if not name.startswith("."):
                yield SavedAdapter(model, kind, name, file.parent, read_document(file))

    def delete(self, model_id: str, checkpoint_id: str) -> None:
        """Remove the checkpoint `KIND/NAME` of a model."""
        shutil.rmtree(self.get(f"tinker://{model_id}/{checkpoint_id}").folder)

    def _model_folder(self, model_id: str) -> Path:
        if not _MODEL.fullmatch(model_id):
            raise RefusedRequest(f"There is no training run {model_id[:200]!r}.", 404)
        return self.root / model_id

    def _folder(self, model_id: str, kind: str, name: str) -> Path:
        if kind not in KINDS or not _NAME.fullmatch(name):
            raise RefusedRequest(
                f"{f'{kind}/{name}'[:200]!r} names no checkpoint: give {' or '.join(KINDS)}, a slash, and letters, digits "
                "or . _ = -."
            )
        return self._model_folder(model_id) / kind / name


@dataclass(frozen=True)
class ModelFacts:
    """A model as it was created, for its model.json."""

    model_id: str
    base_model: str
    rank: int
    parts: list[str]
    created: float
    user_metadata: dict[str, str] | None = None

    def document(self) -> dict[str, Any]:
        return asdict(self)
