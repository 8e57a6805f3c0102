"""Damage to every kind of folder that verl saves, by bits, cuts and missing files, and what loading says.

Correct is an error that names the file. `cases` is the section "saved-folders" of benchmarks/fuzz.py.
"""

import dataclasses
import importlib.util
import logging
import shutil

import torch

import verl
from tests.api.session_loop import KEYS
from tests.damage import cut, flip
from verl.checkpoint.export import export
from verl.checkpoint.role import RoleCheckpoint
from verl.checkpoint.store import CheckpointStore
from verl.engines.api import AdapterState, EngineState
from verl.errors import VerlError
from verl.manifest import MANIFEST
from verl.models.convert import convert_gguf
from verl.models.load import load_causal_lm, load_tokenizer
from verl.models.lora import LoRASpec, read_adapter
from verl.models.tiny import make_tiny_model

SMALL = {"hidden_size": 16, "intermediate_size": 32, "num_attention_heads": 2, "num_key_value_heads": 1}


@dataclasses.dataclass
class Kind:
    """Files below `folder` that `load` reads again; `foreign`: names that other programs' folders lack too."""

    folder: object
    load: object
    foreign: tuple = ()


def _model(folder):
    load_tokenizer(folder)
    load_causal_lm(folder)


def _checkpoint(root, model):
    """A checkpoint with a model, and one with adapters only."""
    module = load_causal_lm(model)

    def hf_files(folder):
        module.config.save_pretrained(folder)
        load_tokenizer(model).save_pretrained(folder)

    spec = LoRASpec(2, 4.0, ("q_proj",))
    layer = "model.layers.0.self_attn.q_proj"
    tensors = {f"{layer}.lora_A": torch.ones(2, 16), f"{layer}.lora_B": torch.ones(16, 2)}
    config = {"r": 2, "lora_alpha": 4.0, "peft_type": "LORA", "base_model_name_or_path": str(model)}
    state = EngineState({name: p.detach() for name, p in module.named_parameters()}, {}, {})
    store = CheckpointStore(root)
    store.save(1, {"actor": RoleCheckpoint(state, hf_files)}, {})
    adapted = dataclasses.replace(state, adapter=AdapterState(_peft(tensors), config))
    store.save(2, {"actor": RoleCheckpoint(adapted, hf_files, lora_only=True)}, {})
    return spec


def _peft(tensors):
    from verl.models.lora import peft_names

    return peft_names(tensors)


def _of_service(root):
    """Folders of the training service, and what reads them."""
    from verl.models.adapter_weights import AdapterWeights
    from verl.tinker.adapters import Adapter
    from verl.tinker.checkpoints import Checkpoints
    from verl.tinker.snapshots import Snapshots

    store, snapshots = Checkpoints(root, "base"), Snapshots(root)
    facts = {
        "base_model": "base",
        "rank": 2,
        "parts": ["attention"],
        "tenant": "ada",
        "created": 1.0,
        "user_metadata": None,
    }
    store.register("m", facts)
    layer = "model.layers.0.self_attn.q_proj"
    adapter = Adapter(AdapterWeights(2, {f"{layer}.lora_A": torch.ones(2, 8), f"{layer}.lora_B": torch.ones(8, 2)}))
    notes = {"base_model": "base", "user_metadata": None, "request": "r"}
    store.save("m", "weights", "w", adapter, overwrite=False, notes=notes)
    store.save("m", "sampler_weights", "s", adapter, overwrite=False, notes=notes, ttl_s=3600)
    store.save_state("m", 3, adapter)
    digest = snapshots.write(adapter.weights)

    def read_state():
        if Checkpoints(root, "base").newest_state("m") is None:
            raise VerlError("\n".join(_said))

    def read_facts():
        if not Checkpoints(root, "base").models():
            raise VerlError("\n".join(_said))

    def read_list():
        expires = [saved.expires for saved in Checkpoints(root, "base").listed() if saved.kind == "sampler_weights"]
        store.load("tinker://m/sampler_weights/s", optimizer=False)
        if (model / "sampler_weights/s/expires").exists() and expires != [read_list.expected]:
            raise VerlError("\n".join(_said))

    model = store.run_folder("m")
    read_list.expected = next(s.expires for s in store.listed() if s.expires)
    return {
        "service weights": Kind(model / "weights/w", lambda: store.load("tinker://m/weights/w", optimizer=True)),
        "service samplers": Kind(model / "sampler_weights/s", read_list, ("expires",)),
        "service states": Kind(model / "states/3", read_state),
        "service models": Kind(model / "model.json", read_facts),
        "service snapshots": Kind(snapshots.root, lambda: snapshots.load(digest)),
    }


_said: list[str] = []


class _Listener(logging.Handler):
    def emit(self, record):
        _said.append(record.getMessage())


def kinds(root):
    """Every kind of folder, saved below `root`, and a function that ends what they need."""
    model = make_tiny_model(root / "model", "llama", max_position_embeddings=64, **SMALL)
    session = verl.Session(model, config=KEYS)
    saved = session.save(root / "session")
    spec = _checkpoint(root / "run", model)
    exported = export(model, root / "exported", "float32")
    folders = {
        "session": Kind(saved, lambda: session.load(saved)),
        "export": Kind(exported, lambda: _model(exported), (MANIFEST,)),
        "model of a checkpoint": Kind(
            root / "run/global_step_1/actor/huggingface", lambda: _model(root / "run/global_step_1/actor/huggingface")
        ),
        "adapter": Kind(
            root / "run/global_step_2/actor/lora_adapter",
            lambda: read_adapter(root / "run/global_step_2/actor/lora_adapter", spec, str(model)),
        ),
    }
    if importlib.util.find_spec("gguf") is not None:
        from tests.models.test_gguf_file import add_merges

        (root / "gguf").mkdir()
        merged = make_tiny_model(root / "merged", "llama")
        add_merges(merged)
        file = export(merged, root / "gguf/model.gguf", "float32", gguf=True)

        def read_gguf():
            shutil.rmtree(root / "back", ignore_errors=True)
            convert_gguf(file, root / "back", "float32")

        folders["gguf"] = Kind(root / "gguf", read_gguf, (f"model.gguf.{MANIFEST}",))
    if importlib.util.find_spec("tinker") is not None:
        folders |= _of_service(root / "served")
    return folders, session.close


def outcome(rng, name, kind, change, file):
    """The answer of loading to a changed file: "named", or "not ours" if a folder without this file is none of ours."""
    content = file.read_bytes()
    _said.clear()
    _forget_sentences()
    if change is None:
        file.unlink()
    else:
        file.write_bytes(change(rng, content))
    try:
        kind.load()
    except Exception as error:
        if not (isinstance(error, VerlError) or type(error).__name__ == "RefusedRequest"):
            raise
        said = "\n".join([str(error), *_said])
        named = file.name if kind.folder.is_dir() else "model.json"
        assert named in said or "weights of this sampler" in said, (name, file.name, said)
        return "named"
    finally:
        file.write_bytes(content)
    assert (change is None and file.name in kind.foreign) or file.read_bytes() == content == b"", (
        f"{name}: {file.name} is loaded as if whole"
    )
    return "not ours"


def _forget_sentences():
    if importlib.util.find_spec("tinker") is not None:
        from verl.tinker import checkpoints

        checkpoints.warn_once.cache_clear()


def files_of(kind):
    place = kind.folder
    return [place] if place.is_file() else sorted(file for file in place.rglob("*") if file.is_file())


def every_file(rng, folder, changes=(flip,)):
    """(kind, outcome) of each change of each file of each kind."""
    listener, logger = _Listener(), logging.getLogger("verl")
    level = logger.level
    logger.addHandler(listener)
    logger.setLevel(logging.WARNING)  # benchmarks/fuzz.py silences it
    folders, close = kinds(folder)
    try:
        for name, kind in folders.items():
            for file in files_of(kind):
                for change in changes:
                    yield name, outcome(rng, name, kind, change, file)
            kind.load()
    finally:
        close()
        logger.removeHandler(listener)
        logger.setLevel(level)


def cases(rng, count, folder):
    """(kind, outcome) of about `count` changes."""
    num_files = 45
    yield from every_file(rng, folder, [flip, cut, None] * max(1, count // (3 * num_files)))
