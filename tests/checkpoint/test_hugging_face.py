"""Saved and exported folders are Hugging Face folders: same logits, no merge step. Export to bfloat16 writes the weights that
the run computed with, for each rounding, with LoRA, and for older runs; and never an older checkpoint in silence."""

import json
import shutil

import pytest
import torch
from safetensors.torch import load_file, save_file
from transformers import AutoModelForCausalLM, AutoTokenizer

from tests.checkpoint.states import assert_same_tensors
from tests.engines.test_contract import make_batch, policy_loss
from tests.engines.tiny import make_engine
from verl.checkpoint.export import compare, export
from verl.checkpoint.role import ALL_CONTENTS, read_role
from verl.checkpoint.store import CheckpointStore, RoleCheckpoint
from verl.checkpoint.tensor_files import read_model, write_model
from verl.engines.api import EngineState, MicroBatching, whole
from verl.errors import CheckpointError, ConfigError
from verl.models.rounding import Rounding
from verl.models.tiny import make_tiny_model


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


RUN = {
    "actor": "actor_rollout_ref: {{actor: {{fsdp_config: {{{setting}}}}}}}\n",
    "model": "engine: {{{setting}}}\n",  # fine-tuning, preferences, reward models
}


def trained(path, rounding, lora_rank=0):
    """An engine in bfloat16 after three steps."""
    engine = make_engine(path, dtype="bfloat16", model={"lora_rank": lora_rank}, engine={"master_rounding": rounding})
    for seed in range(3):
        batch = make_batch(seed, (3, 1, 4, 2))
        engine.train_batch(batch, policy_loss, ("log_probs", "entropy"), MicroBatching(max_tokens=24), 1.2)
    return engine


def saved(engine, folder, setting, steps=(3,), name="actor"):
    """A run folder with checkpoints of `engine` as the role `name`, and a config with the given rounding key."""
    role = RoleCheckpoint(engine.state(), engine.module.config.save_pretrained)
    for step in steps:
        CheckpointStore(folder).save(step, {name: role}, {})
    (folder / "config.yaml").write_text(RUN[name].format(setting=setting))
    return folder


@pytest.mark.parametrize(("name", "lora_rank"), [("actor", 0), ("actor", 4), ("model", 0)])
@pytest.mark.parametrize(
    ("rounding", "setting"),
    [
        ("dithered", "master_rounding: dithered"),
        ("nearest", "master_rounding: nearest"),
        ("nearest", "dtype: bfloat16"),  # a run of a version without the key
    ],
    ids=["dithered", "nearest", "older run"],
)
def test_the_exported_model_is_the_model_that_computed(tmp_path, tiny_llama, rounding, setting, name, lora_rank):
    engine = trained(tiny_llama, rounding, lora_rank)
    run = saved(engine, tmp_path / "run", setting, name=name)
    out = export(run, tmp_path / "out")
    exported, expected = load_file(out / MODEL), dict(engine.gather_weights())
    assert exported.keys() == expected.keys()
    assert all(exported[name].dtype == torch.bfloat16 for name in exported)
    assert not [name for name in exported if not torch.equal(exported[name], expected[name])]
    assert compare(run, out) == len(exported)
    masters = load_file(run / "global_step_3" / name / "huggingface" / MODEL)
    moved = [n for n, master in masters.items() if not torch.equal(master.to(torch.bfloat16), expected[n])]
    assert bool(moved) == (rounding == "dithered")


MODEL = "model.safetensors"
HEADS = ("model.layers.2.eh_proj.weight", "model.layers.2.mlp.experts.0.gate_proj.weight", "mtp.fc.weight")
BIAS = "model.layers.1.mlp.gate.e_score_correction_bias"


@pytest.mark.parametrize("lora_rank", [0, 4])
def test_tensors_that_no_engine_trains_are_in_every_folder(tmp_path, lora_rank):
    """Heads that predict further tokens, and the biases of routers."""
    path = make_tiny_model(tmp_path / "model", "deepseek_v3")
    file, generator = path / "model.safetensors", torch.Generator().manual_seed(1)
    untrained = {name: torch.randn(3, 4, generator=generator).bfloat16() for name in HEADS}
    untrained[BIAS] = torch.tensor([0.1, -0.2, 0.0, 0.3])
    save_file({**load_file(file), **untrained}, file, metadata={"format": "pt"})
    engine = trained(path, "dithered", lora_rank)
    run = saved(engine, tmp_path / "run", "master_rounding: dithered")
    out = export(run, tmp_path / "out")
    for folder in (run / "global_step_3/actor/huggingface", out):
        written = load_file(folder / MODEL)
        assert all(torch.equal(written[name], tensor) for name, tensor in untrained.items())
        assert AutoModelForCausalLM.from_pretrained(folder).get_buffer(BIAS).tolist() == untrained[BIAS].tolist()
    store, resumed = CheckpointStore(run), trained(path, "nearest", lora_rank)
    resumed.load_state(read_role(store.path(3) / "actor", ALL_CONTENTS))
    weights, again = engine.state().model, resumed.state().model
    assert all(torch.equal(whole(weights[name]), whole(again[name])) for name in weights)
    assert not set(untrained) & {name for name, _ in engine.gather_weights()}


def flip_a_bit(newest):
    file = newest / "actor/huggingface/model.safetensors"
    content = bytearray(file.read_bytes())
    content[-5] ^= 1
    file.write_bytes(content)


@pytest.mark.parametrize("damage", [flip_a_bit, shutil.rmtree], ids=["a bit is flipped", "the folder is removed"])
def test_a_damaged_newest_checkpoint_is_an_error_that_names_an_older_one(damage, tmp_path, tiny_llama, caplog):
    run = saved(trained(tiny_llama, "nearest"), tmp_path / "run", "master_rounding: nearest", steps=(3, 4))
    damage(run / "global_step_4")
    with pytest.raises(
        CheckpointError, match=r"is damaged \(.*global_step_4.*\)\. Export an older one with --step=3\."
    ):
        export(run, tmp_path / "out")
    assert not (tmp_path / "out").exists()
    assert "Resuming" not in caplog.text
    assert export(run, tmp_path / "out", step=3).is_dir()
