"""Saved adapters, named tinker://MODEL/KIND/NAME, in folders that peft reads.

    models/MODEL/{model.json, metrics.jsonl}                    the model as it was created, and its steps: a run folder
    models/MODEL/{weights,sampler_weights}/NAME/
      {adapter_model.safetensors, adapter_config.json}
      optimizer.safetensors                                     of weights
      state.json                                                rank, optimizer steps, times, the request that saved it
      expires                                                   time when it is removed, where it has one
    models/MODEL/states/SEQ/                                    the same, of the model after request SEQ, for a restart
      manifest.json                                             size and digest of every file; written last

A save writes a hidden folder, verifies its digests and renames it, so a folder with a name is complete.
"""

from __future__ import annotations

import json
import logging
import os
import re
import shutil
import threading
import time
from collections.abc import Collection, Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal

from verl.checkpoint.files import MANIFEST, find_damage, read_document, record_of, rename, write_json, write_manifest
from verl.checkpoint.tensor_files import read_tensors, write_tensors
from verl.engines.adapters import Adapter
from verl.models.adapter_weights import AdapterWeights
from verl.models.lora import CONFIG_FILE, WEIGHTS_FILE, own_names, peft_names
from verl.regular_files import whole_file
from verl.tinker.records import RefusedRequest
from verl.tracking.files import sync_folder, write_atomically

KINDS: dict[str, Literal["training", "sampler"]] = {"weights": "training", "sampler_weights": "sampler"}
log = logging.getLogger(__name__)

_EXPIRES, _STATES = "expires", "states"
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
        return f"tinker://{self.model_id}/{self.kind}/{self.name}"

    @property
    def digest(self) -> str:
        return str(read_document(self.folder / MANIFEST)["files"][WEIGHTS_FILE]["blake2b"])

    @property
    def expires(self) -> float | None:
        """The time when it is removed, if ever."""
        file = self.folder / _EXPIRES
        return float(file.read_text("utf-8")) if file.is_file() else None

    def num_bytes(self) -> int:
        return sum(file.stat().st_size for file in self.folder.iterdir())


class Checkpoints:
    """The saved adapters under `root`, of the base model at `base`, loaded on the CPU. Names come from requests: each is
    checked before it becomes part of a path. Raises RefusedRequest (404 for a name that does not exist)."""

    def __init__(self, root: Path, base: str):
        self.root, self.base = root / "models", base
        self.root.mkdir(parents=True, exist_ok=True)
        for folder in self.root.glob("*/*/.*.tmp-*"):  # of a save that a kill ended
            shutil.rmtree(folder, ignore_errors=True)

    def register(self, model_id: str, facts: Mapping[str, object]) -> None:
        """Write down a model as it was created, once."""
        if (self.run_folder(model_id) / "model.json").is_file():
            return
        self.run_folder(model_id).mkdir(parents=True, exist_ok=True)
        write_atomically(self.run_folder(model_id) / "model.json", json.dumps(facts))

    def facts(self, model_id: str) -> dict[str, Any]:
        file = self.run_folder(model_id) / "model.json"
        if not file.is_file():
            raise RefusedRequest(f"There is no training run {model_id!r}.", 404)
        return {"tenant": "local", **read_document(file)}

    def models(self) -> list[str]:
        """All registered models, the newest first."""
        files = sorted(self.root.glob("*/model.json"), key=lambda file: file.stat().st_mtime, reverse=True)
        return [file.parent.name for file in files]

    def save(
        self,
        model_id: str,
        kind: str,
        name: str,
        adapter: Adapter,
        *,
        overwrite: bool,
        notes: Mapping[str, object],
        ttl_s: int | None = None,
    ) -> SavedAdapter:
        """Save an adapter, for `weights` with its optimizer, for `ttl_s` seconds. A name that exists is refused unless
        `overwrite`, or unless the same request has saved it before a kill: its id is in the notes."""
        final = self._folder(model_id, kind, name)
        if final.exists() and not overwrite:
            state = read_document(final / "state.json")
            if state.get("request") != notes["request"]:
                raise RefusedRequest(f"{kind}/{name} exists already. Choose another name, or set overwrite.")
            return SavedAdapter(model_id, kind, name, final, state)
        state = self._write(final, adapter, notes, optimizer=kind == "weights", ttl_s=ttl_s)
        return SavedAdapter(model_id, kind, name, final, state)

    def _write(
        self, final: Path, adapter: Adapter, notes: Mapping[str, object], *, optimizer: bool, ttl_s: int | None = None
    ) -> dict[str, object]:
        """Write the folder `final`, complete or not at all: the content of its state.json."""
        temporary = final.parent / f".{final.name}.tmp-{os.getpid()}"
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
            if optimizer:
                slots = adapter.optimizer_tensors()
                records["optimizer.safetensors"] = write_tensors(temporary / "optimizer.safetensors", slots)
            if ttl_s is not None:
                write_atomically(temporary / _EXPIRES, repr(time.time() + ttl_s))
            write_manifest(temporary, adapter.num_steps, records)
            if damage := find_damage(temporary):
                raise RefusedRequest(f"{final.name} was not saved: on reading it back, {damage}.", 507)
            shutil.rmtree(final, ignore_errors=True)
            rename(temporary, final)
            sync_folder(final.parent)
        except BaseException:
            shutil.rmtree(temporary, ignore_errors=True)
            raise
        return state

    def save_state(self, model_id: str, seq_id: int, adapter: Adapter) -> None:
        """Save a model as it is after its request `seq_id`, for a restart of the service."""
        self._write(self.run_folder(model_id) / _STATES / str(seq_id), adapter, {}, optimizer=True)

    def newest_state(self, model_id: str) -> int | None:
        """The request after which the newest complete state of a model was saved; None without one."""
        folders = [f for f in (self.run_folder(model_id) / _STATES).glob("[0-9]*") if find_damage(f) is None]
        return max((int(folder.name) for folder in folders), default=None)

    def load_state(self, model_id: str, seq_id: int) -> Adapter:
        return self._adapter(self.run_folder(model_id) / _STATES / str(seq_id), optimizer=True)

    def drop_states(self, model_id: str, before: int | None = None) -> None:
        """Remove the states of a model, or the ones before a request."""
        for folder in (self.run_folder(model_id) / _STATES).glob("*"):
            if before is None or not folder.name.isdigit() or int(folder.name) < before:
                shutil.rmtree(folder, ignore_errors=True)

    def get(self, uri: str) -> SavedAdapter:
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
        return self._adapter(saved.folder, optimizer=optimizer)

    def _adapter(self, folder: Path, *, optimizer: bool) -> Adapter:
        state = read_document(folder / "state.json")
        adapter = Adapter(AdapterWeights(state["rank"], own_names(read_tensors(folder / WEIGHTS_FILE))))
        if optimizer:
            adapter.num_steps = state["num_steps"]
            for key, value in read_tensors(folder / "optimizer.safetensors").items():
                name, _, slot = key.rpartition("/")
                adapter.slots.setdefault(name, {})[slot] = value
        return adapter

    def listed(self, model_id: str | None = None) -> Iterator[SavedAdapter]:
        """The checkpoints of a model, or of all, the newest first."""
        pattern = f"{model_id if model_id and _MODEL.fullmatch(model_id) else '*'}/*/*/state.json"
        files = sorted(self.root.glob(pattern), key=lambda file: file.stat().st_mtime, reverse=True)
        for file in files:
            name, kind, model = (folder.name for folder in list(file.parents)[:3])
            if kind in KINDS and not name.startswith("."):
                yield SavedAdapter(model, kind, name, file.parent, read_document(file))

    def delete(self, model_id: str, checkpoint_id: str) -> None:
        shutil.rmtree(self.get(f"tinker://{model_id}/{checkpoint_id}").folder)

    def set_expiry(self, saved: SavedAdapter, ttl_s: int | None) -> None:
        """Remove a checkpoint in `ttl_s` seconds; None: never."""
        if ttl_s is None:
            (saved.folder / _EXPIRES).unlink(missing_ok=True)
        else:
            write_atomically(saved.folder / _EXPIRES, repr(time.time() + ttl_s))

    def remove_expired(self) -> None:
        for file in self.root.glob(f"*/*/*/{_EXPIRES}"):
            if not file.parent.name.startswith(".") and float(file.read_text("utf-8")) < time.time():
                shutil.rmtree(file.parent, ignore_errors=True)

    def stored_bytes(self, tenant: str) -> int:
        owners = {name: self.facts(name)["tenant"] == tenant for name in self.models()}
        return sum(saved.num_bytes() for saved in self.listed() if owners.get(saved.model_id))

    def run_folder(self, model_id: str) -> Path:
        """The folder of a model. Raises RefusedRequest for what is no name of one."""
        if not _MODEL.fullmatch(model_id):
            raise RefusedRequest(f"There is no training run {model_id[:200]!r}.", 404)
        return self.root / model_id

    def _folder(self, model_id: str, kind: str, name: str) -> Path:
        if kind not in KINDS or not _NAME.fullmatch(name):
            raise RefusedRequest(
                f"{f'{kind}/{name}'[:200]!r} names no checkpoint: give {' or '.join(KINDS)}, a slash, and letters, digits "
                "or . _ = -."
            )
        return self.run_folder(model_id) / kind / name


class Snapshots:
    """Weights of samplers below `root`, in files named by the digest of their content. A sampler of a checkpoint has a hard
    link to its file, which outlives the checkpoint. Hold `lock` from `write` or `link` until a sampler names the digest, and
    while unused files are removed."""

    def __init__(self, root: Path):
        self.root = root / "snapshots"
        self.root.mkdir(parents=True, exist_ok=True)
        self.lock = threading.Lock()

    def write(self, weights: AdapterWeights) -> str:
        """Save weights: their digest."""
        temporary = self.root / f".{os.getpid()}.tmp"
        temporary.unlink(missing_ok=True)
        try:
            digest = write_tensors(temporary, peft_names(weights.tensors)).blake2b
            os.replace(temporary, self._file(digest))
        finally:
            temporary.unlink(missing_ok=True)
        sync_folder(self.root)
        return digest

    def link(self, file: Path, digest: str) -> None:
        """Share the adapter file of a checkpoint, whose content has this digest."""
        if not self._file(digest).exists():
            try:
                os.link(file, self._file(digest))
            except OSError:  # a file system without links
                with whole_file(self._file(digest)) as temporary:
                    shutil.copyfile(file, temporary)
            sync_folder(self.root)

    def load(self, digest: str) -> AdapterWeights:
        """The weights with this digest. Raises RefusedRequest where the file is gone or damaged."""
        file = self._file(digest)
        if not file.is_file() or record_of(file).blake2b != digest:
            raise RefusedRequest("The weights of this sampler are not on the server's disk any more.", 404)
        tensors = own_names(read_tensors(file))
        rank = next(value.shape[0] for name, value in tensors.items() if name.endswith(".lora_A"))
        return AdapterWeights(rank, tensors)

    def remove_unused(self, used: Collection[str]) -> None:
        """Remove the files that no sampler of `used` names."""
        for file in self.root.glob("*.safetensors"):
            if file.stem not in used:
                file.unlink(missing_ok=True)

    def _file(self, digest: str) -> Path:
        return self.root / f"{digest}.safetensors"
