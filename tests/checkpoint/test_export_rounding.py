"""Export to bfloat16 writes the weights that the run computed with, for each rounding, with LoRA, and for older runs."""

import os

import pytest
import torch

from tests.engines.test_contract import make_batch, policy_loss
from verl.checkpoint.export import compare, export
from verl.checkpoint.store import CheckpointStore, RoleCheckpoint
from verl.checkpoint.tensor_files import read_model
from verl.config import FSDPConfig, ModelConfig, OptimConfig
from verl.engines.api import MicroBatching
from verl.engines.local import LocalEngine

RUN = "actor_rollout_ref: {{actor: {{fsdp_config: {{{setting}}}}}}}\n"


@pytest.fixture(autouse=True)
def quick_disk(monkeypatch):
    monkeypatch.setattr(os, "fsync", lambda descriptor: None)


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


def saved(engine, folder, setting):
    """A run folder with one checkpoint of `engine` and a config with the given rounding key."""
    role = RoleCheckpoint(engine.state(), engine.module.config.save_pretrained)
    CheckpointStore(folder).save(3, {"actor": role}, {})
    (folder / "config.yaml").write_text(RUN.format(setting=setting))
    return folder


@pytest.mark.parametrize("lora_rank", [0, 4])
@pytest.mark.parametrize(
    ("rounding", "setting"),
    [
        ("dithered", "master_rounding: dithered"),
        ("nearest", "master_rounding: nearest"),
        ("nearest", "dtype: bfloat16"),  # a run of a version without the key
    ],
    ids=["dithered", "nearest", "older run"],
)
def test_the_exported_model_is_the_one_that_computed(tmp_path, tiny_llama, rounding, setting, lora_rank):
    engine = trained(tiny_llama, rounding, lora_rank)
    run = saved(engine, tmp_path / "run", setting)
    out = export(run, tmp_path / "out")
    found, expected = read_model(out), dict(engine.gather_weights())
    assert found.keys() == expected.keys()
    assert all(found[name].dtype == torch.bfloat16 for name in found)
    assert not [name for name in found if not torch.equal(found[name], expected[name])]
    assert compare(run, out) == len(found)
    masters = read_model(run / "global_step_3/actor/huggingface")
    moved = [n for n, master in masters.items() if not torch.equal(master.to(torch.bfloat16), expected[n])]
    assert bool(moved) == (rounding == "dithered")
