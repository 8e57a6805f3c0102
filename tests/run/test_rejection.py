"""Rejection sampling from end to end on a tiny model: the kept samples, the loss on them, their file, resuming."""

import json

import pytest
import torch
from transformers import AutoModelForCausalLM

from tests.json_lines import read_lines
from tests.run.conftest import Run
from tests.run.test_resume import weights
from verl.cli.main import main
from verl.config import SFT, load_config
from verl.data.conversations.dataset import load_conversations
from verl.errors import NumericsError
from verl.models.load import load_tokenizer
from verl.programs.rejection import RejectionSampling

SETTINGS = (
    "algorithm.program=rejection_sampling",
    "actor_rollout_ref.rollout.temperature=0.7",  # a likelihood is still the model's
    "rejection.truncated=True",  # a random model does not end its responses
)


@pytest.fixture
def steps(around, batches):
    """(samples with scores, samples that trained) of every step."""
    scored = []

    def select(original, self, result, step):
        scored.append(result.batch)
        return original(self, result, step)

    around(RejectionSampling, "assign_credit", select)
    return lambda: list(zip(scored, batches, strict=True))


def kept_rows(run: Run) -> list[dict]:
    return read_lines(run.folder / "kept.jsonl")


def test_trains_on_the_best_sample_of_each_prompt(tiny_run, tiny_llama, steps):
    run = tiny_run(*SETTINGS, "trainer.total_training_steps=1")
    ((scored, trained),) = steps()
    scores = scored.batch["token_level_scores"].sum(dim=1).view(4, 4)
    assert trained.batch["token_level_scores"].sum(dim=1).tolist() == scores.max(dim=1).values.tolist()
    row = run.training_rows()[0]
    assert row["rejection/score/mean"] == pytest.approx(float(scores.mean()))
    assert row["rejection/score/kept_mean"] == pytest.approx(float(scores.max(dim=1).values.mean()))
    assert (row["rejection/kept"], row["rejection/kept_ratio"], row["rejection/prompt_ratio"]) == (4, 0.25, 1)

    model = AutoModelForCausalLM.from_pretrained(tiny_llama, dtype=torch.float32)
    losses = []
    for columns in trained.batch:
        prompt = columns["prompts"][columns["prompt_mask"]]
        response = columns["responses"][columns["response_mask"]]
        logits = model(torch.cat([prompt, response])[None]).logits[0, len(prompt) - 1 : -1]
        losses.append(torch.nn.functional.cross_entropy(logits, response, reduction="none"))
    loss = torch.cat(losses).mean()
    loss.backward()
    assert row["actor/loss"] == pytest.approx(float(loss.detach()), rel=1e-5)
    norm = torch.nn.utils.get_total_norm([p.grad for p in model.parameters()])
    assert row["actor/grad_norm"] == pytest.approx(float(norm), rel=1e-4)


def test_the_line_of_a_step_tells_scores_from_shares():
    labels = {metric: label for metric, (label, _) in RejectionSampling.console_metrics.items()}
    assert all(label.startswith("reward") == ("/score/" in metric) for metric, label in labels.items())


def test_rounds_raise_the_likelihood_of_what_they_keep(tiny_run):
    rows = tiny_run(
        *SETTINGS,
        "trainer.total_training_steps=6",
        "actor_rollout_ref.rollout.n=8",
        "actor_rollout_ref.actor.ppo_epochs=2",
        "actor_rollout_ref.actor.optim.lr=0.02",
    ).training_rows()
    assert len(rows) == 6
    assert rows[-1]["actor/loss"] < rows[0]["actor/loss"]
    assert rows[-1]["rejection/score/mean"] > rows[0]["rejection/score/mean"]


def formats_of(run, model):
    """Formats of the kept rows, which train in fine-tuning the tokens that were sampled."""
    config = load_config([f"model.path={model}"], schema=SFT).config
    dataset = load_conversations(run.folder / "kept.jsonl", load_tokenizer(config.model), config.data, keep_going=True)
    for number, row in enumerate(kept_rows(run)):
        samples = {(s["ordinal"], s["sample_index"]): s for s in run.samples_of(row["step"])}
        sample, (sequence,) = samples[row["ordinal"], row["sample_index"]], dataset[number]
        assert sequence.input_ids.tolist() == sample["prompt_ids"] + sample["response_ids"]
        assert sequence.num_trained == len(sample["response_ids"])
    return dataset.summaries[0].formats


def test_the_file_of_selected_samples_trains_by_sft(tiny_run, tiny_llama, steps):
    run = tiny_run(*SETTINGS)
    rows = kept_rows(run)
    assert [row["step"] for row in rows] == [1] * 4 + [2] * 4
    assert [row["ordinal"] for row in rows] == [o for _, batch in steps() for o in batch.batch["ordinal"].tolist()]
    assert formats_of(run, tiny_llama)["tokenized"] > 0  # a message's end would follow a cut response


def test_a_step_that_keeps_nothing_leaves_the_weights_and_says_why(tiny_run, tiny_llama, tmp_path, caplog):
    """A run of only such steps does not end as if it had trained."""
    from safetensors.torch import load_file

    with pytest.raises(NumericsError, match=r"^Nothing has trained: .* Step 1: no sample was kept: .* below rejection"):
        tiny_run(*SETTINGS, "rejection.min_score=2", "trainer.total_training_steps=1", "trainer.save_freq=1")
    run = Run(tmp_path / "run")
    assert not (run.folder / "summary.json").exists()
    assert run.training_rows()[0]["training/skipped_batches"] == 1
    assert run.training_rows()[0]["rejection/kept"] == 0
    assert not (run.folder / "kept.jsonl").exists()
    before, after = load_file(tiny_llama / "model.safetensors"), weights(run, 1)
    assert {name: value.numpy().tobytes() for name, value in before.items()} == after
    assert "below rejection.min_score=2" in caplog.text


def test_truncated_samples_are_left_out(tiny_run, tiny_llama, steps):
    settings = ("rejection.keep=4", "rejection.dedup=False", "data.train_batch_size=24", "data.max_response_length=12")
    run = tiny_run(SETTINGS[0], *settings, "trainer.total_training_steps=1")
    row = run.training_rows()[0]
    reasons = list(steps()[0][0].non_tensor_batch["finish_reason"])
    assert 0 < row["rejection/kept"] == reasons.count("stop") < len(reasons)
    assert formats_of(run, tiny_llama)["prompt_completion"] > 0


def test_a_resumed_run_equals_the_unbroken_one(tiny_run):
    settings = (*SETTINGS, "trainer.save_freq=1", "trainer.total_training_steps=3", "rejection.min_score=0.3")
    unbroken = tiny_run(*settings, folder="unbroken")
    tiny_run(*settings, "trainer.total_training_steps=2", folder="broken")
    file = unbroken.folder.parent / "broken" / "kept.jsonl"
    with file.open("a") as stream:  # a step without a checkpoint before the run died
        stream.write(json.dumps({"step": 3, "prompt": [], "completion": []}) + '\n{"step": 3, ')
    resumed = tiny_run(*settings, folder="broken")
    assert resumed.repeatable == unbroken.repeatable
    assert weights(resumed, 3) == weights(unbroken, 3)
    assert kept_rows(resumed) == kept_rows(unbroken)


def test_the_verb_chooses_the_program(tiny_overrides, tmp_path):
    folder = tmp_path / "run"
    arguments = [
        *tiny_overrides,
        *SETTINGS[1:],
        f"trainer.default_local_dir={folder}",
        "rejection.write=sft/best.jsonl",
    ]
    assert main(["rejection", *arguments, "trainer.total_training_steps=1", "trainer.max_restarts=0"]) == 0
    assert len((folder / "sft" / "best.jsonl").read_text().splitlines()) == 4
