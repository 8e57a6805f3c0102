"""A run of adapters above a base in four bits."""

import pytest

MODEL = "actor_rollout_ref.model"


def test_a_run_samples_with_what_it_trains(tiny_run, tiny_llama):
    pytest.importorskip("torchao.quantization", reason="the extra 'qlora' is not installed")
    run = tiny_run(f"{MODEL}.lora_rank=4", f"{MODEL}.quantization=nf4", "trainer.save_freq=2")
    assert all(row["training/rollout_probs_diff_max"] < 1e-5 for row in run.training_rows())
    assert all(row["actor/grad_norm"] > 0 for row in run.training_rows())
    assert (run.folder / "global_step_2/actor/lora_adapter/adapter_model.safetensors").exists()
