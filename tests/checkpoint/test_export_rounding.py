"""Export to bfloat16 writes the weights that the run computed with, for each rounding, with LoRA, and for older runs; and never
an older checkpoint in silence."""

import shutil

import pytest
import torch
from safetensors.torch import load_file, save_file
from transformers import AutoModelForCausalLM

from tests.engines.test_contract import make_batch, policy_loss
from tests.engines.tiny import make_engine
from verl.checkpoint.export import compare, export
from verl.checkpoint.role import ALL_CONTENTS, read_role
from verl.checkpoint.store import CheckpointStore, RoleCheckpoint
from verl.engines.api import MicroBatching, whole
from verl.errors import CheckpointError
from verl.models.tiny import make_tiny_model

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
