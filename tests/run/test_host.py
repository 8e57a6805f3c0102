"""The host runs a program that it was not written for: resuming, saving, validation, Ctrl-C, under two runtimes."""

import json

import pytest
from transformers import AutoModelForCausalLM

from tests import letters_task
from tests.run.conftest import Run
from tests.run.toy_program import INTERRUPT_AT, NAME
from tests.runtime import ranks
from verl.config import load_config
from verl.errors import InterruptedRun
from verl.run.host import evaluate, train

STEPS = 4
SETTINGS = (
    f"trainer.total_training_steps={STEPS}",
    "trainer.save_freq=1",
    "trainer.test_freq=2",
    "trainer.val_before_train=True",
    "actor_rollout_ref.actor.fsdp_config.dtype=float32",
    "actor_rollout_ref.actor.optim.lr=0.01",
)


@pytest.fixture(scope="module")
def overrides(tiny_llama, tiny_task, tmp_path_factory):
    root = tmp_path_factory.mktemp("runs")

    def of(folder, *changes):
        return letters_task.overrides(
            tiny_llama, tiny_task, f"trainer.default_local_dir={root / folder}", *SETTINGS, *changes
        )

    of.root = root
    return of


@pytest.fixture(scope="module")
def toy(overrides):
    def run(folder, *changes):
        assert train(load_config(overrides(folder, *changes), check=False), NAME) == 0
        return Run(overrides.root / folder)

    return run


@pytest.fixture(scope="module")
def unbroken(toy):
    return toy("unbroken")


def weights(run, step=STEPS):
    return (run.folder / f"global_step_{step}/model/huggingface/model.safetensors").read_bytes()


def test_a_program_without_rollout_and_reward_trains(unbroken):
    run = unbroken
    losses = [row["model/nll"] for row in run.training_rows()]
    assert losses[-1] < losses[0]
    validations = [row["val/nll"] for row in run.rows if "val/nll" in row]
    assert len(validations) == 3
    assert validations[-1] < validations[0]
    assert {"timing_s/update_model", "timing_per_token_ms/update_model", "perf/throughput"} <= set(run.rows[-1])
    assert not [name for name in run.rows[-1] if name.startswith(("actor/", "critic/", "rollout/", "reward/"))]
    checkpoint = run.folder / f"global_step_{STEPS}"
    assert AutoModelForCausalLM.from_pretrained(checkpoint / "model/huggingface")
    assert json.loads((checkpoint / "trainer_state.json").read_text())["rows_seen"] == 8 * STEPS
    assert [len(file.read_text().splitlines()) for file in (run.folder / "samples/train").glob("*.jsonl")] == [
        8
    ] * STEPS
    summary = json.loads((run.folder / "summary.json").read_text())
    assert summary["loss_after"] == validations[-1] < summary["loss_before"] == validations[0]
    assert not (run.folder / "ledger.sqlite").exists()


def test_it_resumes_bit_for_bit(toy, unbroken):
    toy("broken", "trainer.total_training_steps=2")
    resumed = toy("broken")
    assert resumed.repeatable == unbroken.repeatable
    assert weights(resumed) == weights(unbroken)


def test_ctrl_c_saves_and_the_run_resumes(toy, unbroken, monkeypatch):
    monkeypatch.setenv(INTERRUPT_AT, "3")
    with pytest.raises(InterruptedRun, match="after step 2 of 4; saved to"):
        toy("stopped", "trainer.save_freq=-1")
    monkeypatch.delenv(INTERRUPT_AT)
    assert weights(toy("stopped")) == weights(unbroken)


def test_saving_after_each_epoch(toy):
    run = toy("epochs", "trainer.save_freq=2", "actor_rollout_ref.actor.checkpoint.async_save=True")
    assert sorted(path.name for path in run.folder.glob("global_step_*")) == ["global_step_2", "global_step_4"]


def test_evaluation(overrides):
    assert evaluate(load_config(overrides("eval"), check=False), NAME) == 0
    assert json.loads((overrides.root / "eval/eval/eval.json").read_text())["val/nll"] > 0


def test_two_ranks_train_as_one(unbroken, overrides, tmp_path):
    jobs = tmp_path / "jobs.json"
    jobs.write_text(json.dumps([{"overrides": overrides("two"), "program": NAME}]))
    ranks.run(2, "tests.runtime.several_runs", jobs, timeout_s=120)
    two = Run(overrides.root / "two")
    for row, expected in zip(two.training_rows(), unbroken.training_rows(), strict=True):
        assert row["model/nll"] == pytest.approx(expected["model/nll"], rel=1e-4)
        assert row["model/grad_norm"] == pytest.approx(expected["model/grad_norm"], rel=1e-3)
    assert (two.folder / f"global_step_{STEPS}/model/huggingface/model.safetensors").exists()
