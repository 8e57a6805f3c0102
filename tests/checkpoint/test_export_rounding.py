"""Export to bfloat16 writes the weights that the run computed with, for each rounding, with LoRA, and for older runs; and never
an older checkpoint in silence."""

import shutil

import pytest
import torch

from tests.engines.test_contract import make_batch, policy_loss
from verl.checkpoint.export import compare, export
from verl.checkpoint.store import CheckpointStore, RoleCheckpoint
from verl.checkpoint.tensor_files import read_model
from verl.config import FSDPConfig, ModelConfig, OptimConfig
from verl.engines.api import MicroBatching
from verl.engines.local import LocalEngine
from verl.errors import CheckpointError

RUN = {
    "actor": "actor_rollout_ref: {{actor: {{fsdp_config: {{{setting}}}}}}}\n",
    "model": "engine: {{{setting}}}\n",  # fine-tuning, preferences, reward models
}


def trained(path, rounding, lora_rank=0):
    """An engine in bfloat16 after three steps."""
    engine = LocalEngine(
        model=ModelConfig(path=str(path), lora_rank=lora_rank),
        engine=FSDPConfig(dtype="bfloat16", master_rounding=rounding),
        optim=OptimConfig(lr=1e-2),
        head="lm",
        device=torch.device("cpu"),
        total_steps=10,
    )
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
    exported, expected = read_model(out), dict(engine.gather_weights())
    assert exported.keys() == expected.keys()
    assert all(exported[name].dtype == torch.bfloat16 for name in exported)
    assert not [name for name in exported if not torch.equal(exported[name], expected[name])]
    assert compare(run, out) == len(exported)
    masters = read_model(run / "global_step_3" / name / "huggingface")
    moved = [n for n, master in masters.items() if not torch.equal(master.to(torch.bfloat16), expected[n])]
    assert bool(moved) == (rounding == "dithered")


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
