"""Saved and exported folders are Hugging Face folders: same logits, no merge step."""

import json

import pytest
import torch
from transformers import AutoModelForCausalLM, AutoTokenizer

from tests.checkpoint.states import assert_same_tensors
from verl.checkpoint.export import compare, export
from verl.checkpoint.store import CheckpointStore, RoleCheckpoint
from verl.checkpoint.tensor_files import read_model, write_model
from verl.engines.api import EngineState
from verl.errors import CheckpointError, ConfigError
from verl.models.rounding import Rounding


@pytest.fixture
def model(tiny_llama):
    return AutoModelForCausalLM.from_pretrained(tiny_llama, dtype=torch.float32).eval()


@pytest.fixture
def role(model, tiny_llama):
    tokenizer = AutoTokenizer.from_pretrained(tiny_llama)

    def hf_files(folder):
        model.config.save_pretrained(folder)
        model.generation_config.save_pretrained(folder)
        tokenizer.save_pretrained(folder)

    state = EngineState({name: p.detach() for name, p in model.named_parameters()}, {}, {})
    return RoleCheckpoint(state, hf_files)


@torch.no_grad()
def logits(model):
    return model(input_ids=torch.arange(40).reshape(2, 20)).logits


def test_checkpoint_is_read_by_from_pretrained(tmp_path, model, role):
    model.config.dtype = torch.bfloat16  # as a module that computes in bfloat16 would say
    path = CheckpointStore(tmp_path).save(7, {"actor": role}, {}) / "actor" / "huggingface"
    loaded = AutoModelForCausalLM.from_pretrained(path).eval()
    assert loaded.dtype == torch.float32
    assert torch.equal(logits(loaded), logits(model))
    assert AutoTokenizer.from_pretrained(path).decode([65, 66])
    assert json.loads((path / "generation_config.json").read_text())


def test_shards_are_read_by_from_pretrained(tmp_path, model, role):
    role.hf_files(tmp_path)
    records = write_model(tmp_path, role.state.model, max_shard_bytes=60_000)
    shards = sorted(tmp_path.glob("model-*.safetensors"))
    assert len(shards) > 2
    assert {f.name for f in shards} | {"model.safetensors.index.json"} == set(records)
    assert shards[-1].name == f"model-{len(shards):05d}-of-{len(shards):05d}.safetensors"
    loaded = AutoModelForCausalLM.from_pretrained(tmp_path, dtype=torch.float32).eval()
    assert torch.equal(logits(loaded), logits(model))
    assert_same_tensors(read_model(tmp_path), role.state.model)


@pytest.mark.parametrize("source", ["run", "checkpoint"])
def test_export(tmp_path, tiny_llama, role, source):
    store = CheckpointStore(tmp_path / "run")
    store.save(1, {"actor": role}, {})
    path = store.save(2, {"actor": role}, {})
    out = export(store.root if source == "run" else path, tmp_path / "out")
    loaded = AutoModelForCausalLM.from_pretrained(out).eval()
    assert loaded.dtype == torch.bfloat16
    narrow = AutoModelForCausalLM.from_pretrained(tiny_llama, dtype=torch.float32).eval()
    for name, parameter in narrow.named_parameters():  # a run without a config.yaml: the default
        parameter.data = Rounding("dithered").rounded(name, parameter.data, torch.bfloat16)
    assert torch.equal(logits(loaded), logits(narrow))
    AutoTokenizer.from_pretrained(out)
    assert sorted(p.name for p in tmp_path.iterdir()) == ["out", "run"]
    wide = export(path, tmp_path / "wide", dtype="float32")
    assert_same_tensors(read_model(wide), role.state.model)
    assert compare(path, out) == compare(store.root, wide) == len(role.state.model)


def test_a_folder_that_is_not_what_was_saved(tmp_path, role):
    from safetensors.torch import load_file, save_file

    path = CheckpointStore(tmp_path / "run").save(1, {"actor": role}, {})
    out = export(path, tmp_path / "out")
    tensors = load_file(out / "model.safetensors")
    name = sorted(tensors)[1]
    save_file({**tensors, name: tensors[name] + 1}, out / "model.safetensors", metadata={"format": "pt"})
    with pytest.raises(CheckpointError, match=f"1 of {len(tensors)} tensors of {out} differ .* the first '{name}'"):
        compare(path, out)
    save_file({n: t for n, t in tensors.items() if n != name}, out / "model.safetensors", metadata={"format": "pt"})
    with pytest.raises(CheckpointError, match=f"1 tensors are on one side only, the first '{name}'"):
        compare(path, out)
    with pytest.raises(CheckpointError, match="holds no model"):
        compare(path, tmp_path)


def test_export_says_what_is_wrong(tmp_path, role):
    store = CheckpointStore(tmp_path / "run")
    with pytest.raises(CheckpointError, match="holds no checkpoint"):
        export(tmp_path, tmp_path / "out")
    store.save(1, {"actor": role}, {})
    path = store.save(2, {"actor": role}, {})
    with pytest.raises(CheckpointError, match="no role 'critic'; it has: actor"):
        export(store.root, tmp_path / "out", role="critic")
    with pytest.raises(CheckpointError, match="no checkpoint of step 9; there are: 2, 1"):
        export(store.root, tmp_path / "out", step=9)
    with pytest.raises(ConfigError, match="int4"):
        export(store.root, tmp_path / "out", dtype="int4")
    with pytest.raises(CheckpointError, match="not empty"):
        export(store.root, store.root)
    (path / "trainer_state.json").unlink()
    with pytest.raises(CheckpointError, match="trainer_state"):
        export(path, tmp_path / "out")
    assert not (tmp_path / "out").exists()
    assert export(store.root, tmp_path / "out", step=1) == tmp_path / "out"
