"""Saved models, named tinker://MODEL/KIND/NAME, in folders that peft reads, or transformers if all weights train.

    models/MODEL/{model.json, metrics.jsonl}                    the model as it was created, and its steps: a run folder
    models/MODEL/{weights,sampler_weights,external_weights}/NAME/
      {adapter_model.safetensors, adapter_config.json}          or {model.safetensors, config.json}, with all weights
      optimizer.safetensors                                     of weights
      state.json                                                rank, optimizer steps, times, the request that saved it
      expires                                                   time when it is removed, if it has one; with its digest
      public                                                    if every tenant may read it
    models/MODEL/states/SEQ/                                    the same, of the model after request SEQ, for a restart
      manifest.json                                             size and digest of every file; written last

A save writes a hidden folder, verifies its digests and renames it, so a folder with a name is complete. What cannot be read
is left out of lists and named in the log, so the files of one tenant do not matter to another.
"""

from __future__ import annotations

import functools
import logging
import math
import os
import re
import shutil
import time
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, Literal

from verl.checkpoint.files import read_document, write_json
from verl.checkpoint.tensor_files import read_tensors, write_tensors
from verl.errors import CheckpointError
from verl.manifest import MANIFEST, FileRecord, find_damage, new_folder, read_sealed, record_of, sealed
from verl.models.adapter_weights import AdapterWeights
from verl.models.folder import fetch
from verl.models.lora import CONFIG_FILE, WEIGHTS_FILE, own_names, peft_names
from verl.regular_files import make_folder, whole_file
from verl.tinker.adapters import Adapter
from verl.tinker.records import RefusedRequest
from verl.tracking.files import has, is_count, is_number, is_text, write_atomically

KINDS: dict[str, Literal["training", "sampler", "external"]] = {
    "weights": "training", "sampler_weights": "sampler", "external_weights": "external",
}  # fmt: skip
log = logging.getLogger(__name__)

MODEL_FILE, MODEL_CONFIG = "model.safetensors", "config.json"
_EXPIRES, _STATES, _PUBLIC = "expires", "states", "public"
_FACTS = {"model_id", "base_model", "rank", "parts", "tenant", "created", "user_metadata"}
_ARE_FACTS = has(
    base_model=is_text, rank=is_count, tenant=is_text, created=is_number, parts=lambda v: isinstance(v, list)
)
_IS_STATE = has(base_model=is_text, rank=is_count, num_steps=is_count, time=is_number)
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
        return str(read_document(self.folder / MANIFEST)["files"][self.weights_file]["blake2b"])

    @property
    def weights_file(self) -> str:
        """The name of the file with the weights."""
        return weights_file(self.folder)

    @property
    def expires(self) -> float | None:
        """The time when it is removed, if ever; None also if it cannot be read."""
        return _expiry(self.folder)

    @property
    def is_public(self) -> bool:
        """Whether every tenant may read it."""
        return (self.folder / _PUBLIC).is_file()

    def files(self) -> list[str]:
        """The names of its files, without the manifest."""
        return sorted(read_document(self.folder / MANIFEST)["files"])

    def num_bytes(self) -> int:
        return _num_bytes(self.folder)


class Checkpoints:
    """The saved adapters under `root`, of the base model at `base` unless a save names another, loaded on the CPU. Names come
    from requests: each is checked before it becomes part of a path. Raises RefusedRequest (404 for an unknown name)."""

    def __init__(self, root: Path, base: str):
        self.root, self.base = root / "models", base
        make_folder(self.root)
        for folder in self.root.glob("*/*/.*.tmp-*"):  # of a save that a kill ended
            shutil.rmtree(folder, ignore_errors=True)
        saved = [folder.name for folder in self.root.iterdir() if folder.is_dir()]
        self._facts = {name: facts for name in saved if (facts := self._read_facts(name)) is not None}

    def register(self, model_id: str, facts: Mapping[str, object]) -> None:
        """Write down a model as it was created, once."""
        if model_id in self._facts:
            return
        make_folder(self.run_folder(model_id))
        write_atomically(self.run_folder(model_id) / "model.json", sealed(facts))
        self._facts[model_id] = {**facts}

    def facts(self, model_id: str) -> dict[str, Any]:
        """The content of model.json, read once. A model with a damaged file does not exist: its owner is not known."""
        if not (self.run_folder(model_id) / "model.json").is_file():
            self._facts.pop(model_id, None)
        elif model_id not in self._facts and (facts := self._read_facts(model_id)) is not None:
            self._facts[model_id] = facts
        if model_id not in self._facts:
            raise RefusedRequest(f"There is no training run {model_id!r}.", 404)
        return self._facts[model_id]

    def _read_facts(self, model_id: str) -> dict[str, Any] | None:
        file = self.root / model_id / "model.json"
        try:
            document = read_document(file)
            if not set(document) <= _FACTS:  # before there were digests
                document = read_sealed(file)
            if _ARE_FACTS(facts := {"tenant": "local", **document}):
                return facts
        except CheckpointError as error:
            warn_once(f"A model is left out: {error}")
        return None

    def _names(self) -> list[str]:
        """The models that have a file, the newest first."""
        files = {file: _time_of(file) for file in self.root.glob("*/model.json")}
        return [file.parent.name for file in sorted(files, key=files.__getitem__, reverse=True)]

    def models(self, sees: Callable[[str], bool] = lambda tenant: True) -> list[str]:
        """The models of the tenants that `sees` holds for, the newest first."""
        return [name for name in self._names() if name in self._facts and sees(self._facts[name]["tenant"])]

    def save(
        self,
        model_id: str,
        kind: str,
        name: str,
        adapter: Adapter,
        *,
        overwrite: bool,
        notes: Mapping[str, object],
        base: str | None = None,
        ttl_s: int | None = None,
    ) -> SavedAdapter:
        """Save an adapter, for `weights` with its optimizer, for `ttl_s` seconds. A name that exists is refused unless
        `overwrite`, or unless the same request has saved it before a kill: its id is in the notes."""
        final = self._folder(model_id, kind, name)
        if final.exists() and not overwrite:
            state = read_document(final / "state.json")
            if state.get("request") != notes["request"]:
                raise RefusedRequest(f"{kind}/{name} exists already. Choose another name, or set overwrite.")
        else:
            state = self._write(final, adapter, notes, base or self.base, optimizer=kind == "weights")
        saved = SavedAdapter(model_id, kind, name, final, state)
        if ttl_s is not None:
            self.set_expiry(saved, ttl_s)
        return saved

    def _write(
        self, final: Path, adapter: Adapter, notes: Mapping[str, object], base: str, *, optimizer: bool
    ) -> dict[str, object]:
        """Write the folder `final`, complete or not at all: the content of its state.json."""
        weights = adapter.weights
        state = {"rank": weights.rank, "num_steps": adapter.num_steps, "time": time.time(), **notes}
        with new_folder(final, replaces=True) as (temporary, records):
            records |= (
                write_adapter(temporary, weights, base) if weights.rank else write_policy(temporary, weights, base)
            )
            records["state.json"] = write_json(temporary / "state.json", state, "The state")
            if optimizer:
                slots = adapter.optimizer_tensors()
                records["optimizer.safetensors"] = write_tensors(temporary / "optimizer.safetensors", slots)
        return state

    def save_state(self, model_id: str, seq_id: int, adapter: Adapter) -> None:
        """Save a model as it is after its request `seq_id`, for a restart of the service."""
        self._write(self.run_folder(model_id) / _STATES / str(seq_id), adapter, {}, self.base, optimizer=True)

    def newest_state(self, model_id: str) -> int | None:
        """The newest complete saved state of a model, as the number of the request before it; None without one."""
        folders = [f for f in (self.run_folder(model_id) / _STATES).glob("[0-9]*") if f.name.isdigit()]
        for folder in sorted(folders, key=lambda folder: int(folder.name), reverse=True):
            if (damage := find_damage(folder)) is None:
                return int(folder.name)
            warn_once(f"The state {folder} is damaged and not used: {damage}.")
        return None

    def steps_of_state(self, model_id: str, seq_id: int) -> int:
        """The optimizer steps of a saved state."""
        return int(read_document(self.run_folder(model_id) / _STATES / str(seq_id) / "state.json")["num_steps"])

    def load_state(self, model_id: str, seq_id: int) -> Adapter:
        return self._adapter(self.run_folder(model_id) / _STATES / str(seq_id), optimizer=True)

    def drop_states(self, model_id: str, before: int | None = None) -> None:
        """Remove the states of a model, or the ones before a request."""
        for folder in (self.run_folder(model_id) / _STATES).glob("*"):
            if before is None or not folder.name.isdigit() or int(folder.name) < before:
                shutil.rmtree(folder, ignore_errors=True)

    def find(self, uri: str) -> SavedAdapter:
        """The checkpoint at an address; nothing of it is read."""
        parts = uri.removeprefix("tinker://").split("/")
        if not uri.startswith("tinker://") or len(parts) != 3:
            raise RefusedRequest(f"{uri[:200]!r} is no address of the form tinker://MODEL/KIND/NAME.")
        model_id, kind, name = parts
        folder = self._folder(model_id, kind, name)
        if not folder.is_dir():
            raise RefusedRequest(f"There is no checkpoint {uri[:400]!r}.", 404)
        return SavedAdapter(model_id, kind, name, folder, {})

    def read(self, saved: SavedAdapter, max_bytes: float = 0) -> SavedAdapter:
        """With the content of state.json. Raises RefusedRequest if a file has changed since it was saved; tensors of more
        than `max_bytes` are left to `load`."""
        if damage := find_damage(saved.folder, max_bytes=max_bytes):
            raise RefusedRequest(f"The checkpoint {saved.uri} is damaged: {damage}. Load another one.")
        return replace(saved, state=read_document(saved.folder / "state.json"))

    def load(self, uri: str, *, optimizer: bool) -> Adapter:
        """The adapter of a checkpoint, with its optimizer's state or a new one."""
        saved = self.read(self.find(uri), math.inf)
        if optimizer and saved.kind != "weights":
            raise RefusedRequest(f"{uri} has no optimizer state. Load a checkpoint of save_state.")
        return self._adapter(saved.folder, optimizer=optimizer)

    def _adapter(self, folder: Path, *, optimizer: bool) -> Adapter:
        state = read_document(folder / "state.json")
        adapter = Adapter(AdapterWeights(state["rank"], own_names(read_tensors(folder / weights_file(folder)))))
        if optimizer:
            adapter.num_steps = state["num_steps"]
            for key, value in read_tensors(folder / "optimizer.safetensors").items():
                name, _, slot = key.rpartition("/")
                adapter.slots.setdefault(name, {})[slot] = value
        return adapter

    def listed(self, model_id: str | None = None) -> Iterator[SavedAdapter]:
        """The checkpoints of a model, or of all, the newest first. One with a state.json that cannot be read is left out."""
        for folder in self._folders(model_id):
            try:
                state = read_document(folder / "state.json")
            except CheckpointError as error:
                warn_once(f"A checkpoint is left out: {error}")
                continue
            if _IS_STATE(state):
                yield SavedAdapter(folder.parents[1].name, folder.parent.name, folder.name, folder, state)

    def _folders(self, model_id: str | None) -> list[Path]:
        """The folders of the checkpoints of a model, or of all, the newest first."""
        pattern = f"{model_id if model_id and _MODEL.fullmatch(model_id) else '*'}/*/*/state.json"
        times = {file.parent: _time_of(file) for file in self.root.glob(pattern)}
        folders = [folder for folder in times if folder.parent.name in KINDS and not folder.name.startswith(".")]
        return sorted(folders, key=times.__getitem__, reverse=True)

    def delete(self, saved: SavedAdapter) -> None:
        shutil.rmtree(saved.folder)

    def set_public(self, saved: SavedAdapter, *, is_public: bool) -> None:
        """Let every tenant read a checkpoint, or its owner alone."""
        if is_public:
            (saved.folder / _PUBLIC).touch()
        else:
            (saved.folder / _PUBLIC).unlink(missing_ok=True)

    def copy(self, saved: SavedAdapter, model_id: str) -> SavedAdapter:
        """The checkpoint of the model `model_id` with the files of another one, which they share on the disk."""
        final = self._folder(model_id, saved.kind, saved.name)
        with new_folder(final, replaces=True) as (temporary, records):
            for name in saved.files():
                link_or_copy(saved.folder / name, temporary / name)
                records[name] = record_of(temporary / name)
        return SavedAdapter(model_id, saved.kind, saved.name, final, saved.state)

    def set_expiry(self, saved: SavedAdapter, ttl_s: int | None) -> None:
        """Remove a checkpoint in `ttl_s` seconds; None: never."""
        if ttl_s is None:
            (saved.folder / _EXPIRES).unlink(missing_ok=True)
        else:
            write_atomically(saved.folder / _EXPIRES, sealed({"time": time.time() + ttl_s}))

    def remove_expired(self) -> None:
        for file in self.root.glob(f"*/*/*/{_EXPIRES}"):
            expires = None if file.parent.name.startswith(".") else _expiry(file.parent)
            if expires is not None and expires < time.time():
                shutil.rmtree(file.parent, ignore_errors=True)

    def stored_bytes(self, tenant: str) -> int:
        """Bytes of the checkpoints of a tenant; only its files are looked at."""
        models = self.models(lambda owner: owner == tenant)
        return sum(_num_bytes(folder) for name in models for folder in self._folders(name))

    def replaced_bytes(self, model_id: str, kind: str, name: str) -> int:
        """Bytes that a save under this name makes free."""
        folder = self._folder(model_id, kind, name)
        return _num_bytes(folder) if folder.is_dir() else 0

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


def write_adapter(folder: Path, weights: AdapterWeights, base: str) -> dict[str, FileRecord]:
    """Write the files that peft reads: their sizes and digests."""
    return {
        WEIGHTS_FILE: write_tensors(folder / WEIGHTS_FILE, peft_names(weights.tensors)),
        CONFIG_FILE: write_json(folder / CONFIG_FILE, weights.spec.to_json(base, weights.layers), "The adapter"),
    }


def write_policy(folder: Path, weights: AdapterWeights, base: str) -> dict[str, FileRecord]:
    """Write the files of a model that trains all its weights, which transformers reads: their sizes and digests."""
    config = read_document(fetch(base, weights=False) / MODEL_CONFIG)
    return {
        MODEL_FILE: write_tensors(folder / MODEL_FILE, weights.tensors),
        MODEL_CONFIG: write_json(folder / MODEL_CONFIG, config, "The model's config"),
    }


def weights_file(folder: Path) -> str:
    """The name of the file with the weights of a checkpoint."""
    return WEIGHTS_FILE if (folder / WEIGHTS_FILE).is_file() else MODEL_FILE


def link_or_copy(source: Path, target: Path) -> None:
    """Let `target` be `source`: the same file, or a copy on a file system without links."""
    try:
        os.link(source, target)
    except OSError:
        with whole_file(target) as temporary:
            shutil.copyfile(source, temporary)


def _num_bytes(folder: Path) -> int:
    return sum(file.stat().st_size for file in folder.iterdir())


def _time_of(file: Path) -> float:
    """The time at which a file was written; 0 if another request removes it meanwhile."""
    try:
        return file.stat().st_mtime
    except OSError:
        return 0.0


@functools.lru_cache(4096)
def warn_once(sentence: str) -> None:
    """Log a sentence once."""
    log.warning("%s", sentence)


def _expiry(folder: Path) -> float | None:
    """The time when a checkpoint is removed; None for one without, and, with a warning, if it cannot be read."""
    file = folder / _EXPIRES
    if not file.exists():
        return None
    try:
        expires = read_sealed(file)["time"]
        return float(expires) if is_number(expires) else None
    except (CheckpointError, KeyError) as error:
        warn_once(f"A checkpoint is not removed after its time: {error}")
        return None
