"""Preference optimization from end to end on a tiny model: losses, references, laws, resuming, evaluation."""

import json
import math
import os
import shutil

import pytest
import torch
from safetensors.torch import load_file, save_file
from transformers import AutoModelForCausalLM, AutoTokenizer

from tests.json_lines import read_lines, write_lines
from tests.run.conftest import broken_off, row_overrides, train_run
from tests.slow import slow
from verl.config.active_keys import LABELLED_LOSSES
from verl.errors import DataError
from verl.families import PREFERENCE_LOSSES
from verl.models.tiny import make_tiny_model

pytestmark = pytest.mark.seed("A9")

FAST = ("aot_unpaired", "orpo", "kto", "ld and wpo")


@pytest.fixture(scope="module")
def rows(tmp_path_factory):
    """Folder with pairs and labelled completions of several lengths: 20 rows to train on, 6 to validate on."""
    folder = tmp_path_factory.mktemp("preferences")
    for name, count in (("train", 20), ("val", 6)):
        prompts = [f"{name} {'?' * (i % 4)} {i}" for i in range(count)]
        pairs = [
            {"prompt": p, "chosen": "ab" * (i % 5 + 1), "rejected": "x" * (i % 3 + 1) + "b" * (i % 2)}
            for i, p in enumerate(prompts)
        ]
        labelled = [{"prompt": p, "completion": "ab" * (i % 5 + 1), "label": i % 3 > 0} for i, p in enumerate(prompts)]
        for kind, examples in (("pairs", pairs), ("labelled", labelled)):
            write_lines(folder / f"{kind}_{name}.jsonl", examples)
    return folder


@pytest.fixture
def preference_run(tiny_llama, rows, tmp_path):
    """`preference_run("key=value", ..., folder=, labelled=)` trains, and returns the Run."""

    def run(*changes, folder="run", labelled=False):
        kind = "labelled" if labelled else "pairs"
        overrides = row_overrides(tiny_llama, f"{rows}/{kind}_train.jsonl", f"{rows}/{kind}_val.jsonl")
        return train_run(tmp_path / folder, overrides, changes, "preference")

    return run


def trained(run):
    """The metrics of training that are functions of weights and data."""
    skipped = ("timing", "perf", "time", "rollout", "step", "train/total_tokens", "training/")
    return [{k: v for k, v in row.items() if not k.startswith(skipped)} for row in run.training_rows()]


def assert_close(one, other, rel=2e-4):
    for row, expected in zip(trained(one), trained(other), strict=True):
        if (
            abs(expected.get("train/rewards/margins", 1)) < 1e-6
        ):  # the policy is the reference: rounding ranks the pairs
            for metrics in (row, expected):
                metrics.pop("train/rewards/accuracies", None)
        assert row == pytest.approx(expected, rel=rel, abs=2e-5)


def loss_settings(name):
    return [f"preference.loss={name}", *(["preference.label_smoothing=0.001"] if name == "exo_pair" else [])]


class TestLosses:
    def test_dpo_is_the_formula_on_plain_log_probs(self, preference_run, tiny_llama, rows):
        """The first two steps against Hugging Face's forward, one completion at a time."""
        run = preference_run("trainer.total_training_steps=2", "data.shuffle=False", "trainer.save_freq=1")
        lines = read_lines(rows / "pairs_train.jsonl")
        start = AutoModelForCausalLM.from_pretrained(tiny_llama)
        for step, folder in ((1, tiny_llama), (2, run.folder / "global_step_1" / "model" / "huggingface")):
            policy = AutoModelForCausalLM.from_pretrained(folder)
            ratios = [
                [logp(policy, tiny_llama, row["prompt"], row[key]) - logp(start, tiny_llama, row["prompt"], row[key])]
                for row in lines[4 * step - 4 : 4 * step]
                for key in ("chosen", "rejected")
            ]
            chosen, rejected = torch.tensor(ratios).reshape(4, 2).T
            metrics = run.training_rows()[step - 1]
            margins = 0.1 * (chosen - rejected)
            loss = float(-torch.nn.functional.logsigmoid(margins).mean())
            assert metrics["train/loss"] == pytest.approx(loss, rel=1e-5)
            assert metrics["train/rewards/margins"] == pytest.approx(float(margins.mean()), abs=1e-5)
            assert (
                metrics["train/rewards/accuracies"] == pytest.approx(float((margins > 0).float().mean())) or step == 1
            )
        assert run.training_rows()[0]["train/loss"] == pytest.approx(math.log(2), abs=1e-6)

    def test_it_learns_the_preferences(self, preference_run):
        """Validation compares with the start: before training there is no margin."""
        run = preference_run("trainer.total_epochs=4", "trainer.test_freq=20", "trainer.val_before_train=True")
        first, last = run.rows[0], run.rows[-1]
        assert first["val/rewards/margins"] == pytest.approx(0.0, abs=1e-6)
        assert last["val/rewards/accuracies"] == 1.0
        assert last["val/loss"] < 0.4
        assert last["val/rewards/margins"] > 1
        assert last["val/rewards/margins"] == pytest.approx(last["val/rewards/chosen"] - last["val/rewards/rejected"])

    def test_kto_learns_from_labels(self, preference_run):
        run = preference_run("preference.loss=kto", "trainer.total_epochs=3", labelled=True)
        first, last = run.training_rows()[0], run.training_rows()[-1]
        assert first["train/loss"] == pytest.approx(0.5, abs=1e-5)
        assert last["train/loss"] < first["train/loss"]
        assert last["train/rewards/margins"] > 0

    def test_bco_moves_its_shift_by_the_rewards_before(self, preference_run):
        run = preference_run("preference.loss=bco", labelled=True)
        rewards, deltas = ([row[f"train/{name}"] for row in run.training_rows()] for name in ("rewards/mean", "delta"))
        assert deltas[0] == 0.0
        for number in range(1, 5):
            assert deltas[number] == pytest.approx(sum(rewards[:number]) / number, rel=1e-6)

    def test_a_list_is_a_weighted_sum(self, preference_run):
        one_step = "trainer.total_training_steps=1"
        parts = [
            preference_run(one_step, f"preference.loss={name}", folder=name).training_rows()[0]["train/loss"]
            for name in ("sigmoid", "sft", "hinge")
        ]
        mixed = preference_run(
            one_step, "preference.loss=[sigmoid,sft,hinge]", "preference.loss_weights=[0.5,2,1]", folder="mixed"
        )
        expected = 0.5 * parts[0] + 2 * parts[1] + parts[2]
        assert mixed.training_rows()[0]["train/loss"] == pytest.approx(expected, rel=1e-6)

    def test_pairs_train_as_labelled_completions_too(self, preference_run):
        run = preference_run("preference.loss=apo_zero_unpaired", "trainer.total_training_steps=2")
        assert run.training_rows()[0]["train/loss"] == pytest.approx(0.5, abs=1e-5)


class TestLaws:
    @pytest.mark.parametrize(
        "name", [slow(name, when=name not in FAST) for name in (*PREFERENCE_LOSSES.built_in, "ld and wpo")]
    )
    def test_micro_batches_do_not_matter(self, preference_run, name):
        changes = loss_settings("sigmoid" if name == "ld and wpo" else name)
        changes += ["preference.ld_alpha=0.5", "preference.use_weighting=True"] * (name == "ld and wpo")
        changes += ["trainer.total_training_steps=2"]
        labelled = name in LABELLED_LOSSES
        undivided = preference_run(*changes, folder="whole", labelled=labelled)
        small = ("data.use_dynamic_bsz=False", "data.micro_batch_size_per_gpu=1")
        assert_close(preference_run(*changes, *small, folder="parts", labelled=labelled), undivided)

    def test_padding_and_the_order_of_rows_do_not_matter(self, preference_run, rows, tmp_path):
        lines = (rows / "pairs_train.jsonl").read_text().splitlines()
        longest = json.dumps({"prompt": "p" * 90, "chosen": "c" * 70, "rejected": "r"})
        (tmp_path / "moved.jsonl").write_text("\n".join([*lines[3::-1], *lines[4:8], longest]) + "\n")
        changes = ("data.shuffle=False", "trainer.total_training_steps=2", "trainer.val_before_train=True")
        plain = preference_run(*changes, folder="plain")
        assert_close(preference_run(*changes, f"data.train_files={tmp_path}/moved.jsonl", folder="moved"), plain)
        assert plain.rows[0]["val/loss"] == pytest.approx(math.log(2), abs=1e-6)


class TestReference:
    @pytest.fixture
    def kept_and_computed(self, preference_run):
        """Equal metrics of two runs: log-probabilities of the reference are kept, or computed in each step."""

        def runs(*changes, rel=1e-5):
            stored, each = (
                preference_run(*changes, f"ref.precompute={precompute}", folder=f"run-{precompute}")
                for precompute in (True, False)
            )
            assert_close(stored, each, rel=rel)
            assert [(run.folder / TestKeptReference.FILE).exists() for run in (stored, each)] == [True, False]
            return stored.training_rows()

        return runs

    def test_kept_log_probs_match_a_second_model(self, kept_and_computed):
        kept_and_computed("trainer.test_freq=5")

    def test_another_model_can_be_the_reference(self, kept_and_computed, tmp_path):
        other = make_tiny_model(tmp_path / "other", "llama", seed=7)
        first, *_ = kept_and_computed("trainer.total_training_steps=1", f"ref.model_path={other}")
        assert first["train/loss"] != pytest.approx(math.log(2), abs=1e-3)

    def test_the_model_without_adapters_is_the_reference_of_lora(self, kept_and_computed):
        assert kept_and_computed("model.lora_rank=4", "optim.lr=0.02", rel=1e-4)[-1]["train/loss"] < 0.6

    def test_rows_that_were_added_are_refused_on_resume(self, preference_run, rows, tmp_path):
        preference_run("trainer.save_freq=1", "trainer.total_training_steps=1")
        lines = (rows / "pairs_train.jsonl").read_text().replace("train", "other")
        (tmp_path / "other.jsonl").write_text(lines)
        with pytest.raises(DataError, match="rows that it did not have when the run began"):
            preference_run(
                "trainer.save_freq=1", f"data.train_files={tmp_path}/other.jsonl",
                "trainer.resume_changed_inputs=warn",
            )  # fmt: skip


class TestKeptReference:
    """The file of the reference's log-probabilities lies outside of the checkpoints; their state has its digest."""

    FILE = "reference_log_probs.safetensors"
    SETTINGS = ("trainer.save_freq=1", "trainer.total_epochs=1")

    @pytest.mark.parametrize("damage", ["values", "tensors", "text", "gone", "fifo"])
    def test_another_file_is_refused(self, preference_run, shared_run, tiny_llama, rows, tmp_path, damage):
        base = row_overrides(tiny_llama, f"{rows}/pairs_train.jsonl", f"{rows}/pairs_val.jsonl")
        saved = shared_run(base, *self.SETTINGS, "trainer.total_training_steps=1", program="preference")
        file = shutil.copytree(saved.folder, tmp_path / "run") / self.FILE
        tensors = load_file(file)
        file.unlink()
        if damage == "values":
            save_file({**tensors, "log_probs": tensors["log_probs"] + 1}, file)
        elif damage == "tensors":
            save_file({"log_probs": tensors["log_probs"]}, file)
        elif damage == "text":
            file.write_text("no")
        elif damage == "fifo":
            os.mkfifo(file)
        sentence = "is gone" if damage in ("gone", "fifo") else "is not the file that this run has written"
        with pytest.raises(DataError, match=f"{self.FILE} {sentence}, and the policy has changed"):
            preference_run(*self.SETTINGS)

    def test_what_a_killed_start_has_left_is_replaced(self, preference_run, tmp_path):
        (tmp_path / "run").mkdir()
        (tmp_path / "run" / f"{self.FILE}.new").write_text("half a file")
        assert (preference_run("trainer.total_training_steps=1").folder / self.FILE).exists()


class TestResuming:
    @pytest.mark.parametrize("loss", ["sigmoid", "bco", slow("kto")])
    def test_a_resumed_run_equals_the_unbroken_one(self, preference_run, loss):
        settings = (f"preference.loss={loss}", "trainer.total_epochs=2", "trainer.save_freq=3", "trainer.test_freq=5")
        runs = broken_off(preference_run, *settings, stop=3, labelled=loss != "sigmoid")
        after = [[row for row in run.repeatable if row["step"] > 3] for run in runs]
        assert after[0] == after[1]
        assert [row["step"] for row in after[0]] == list(range(4, 11))

    def test_a_moving_reference_is_saved(self, preference_run):
        settings = ("ref.sync_steps=2", "ref.mixup_alpha=0.5", "trainer.save_freq=3")
        resumed, unbroken = broken_off(preference_run, *settings, stop=3)
        assert resumed.repeatable == unbroken.repeatable
        fixed = preference_run(folder="fixed")
        losses = [[row["train/loss"] for row in trained(run)] for run in (fixed, unbroken)]
        assert losses[0][:2] == pytest.approx(losses[1][:2], rel=1e-5)
        assert losses[0][3] != pytest.approx(losses[1][3], rel=1e-3)


def logp(model, tokenizer_folder, prompt, completion):
    tokenizer = AutoTokenizer.from_pretrained(tokenizer_folder)
    first = tokenizer(prompt)["input_ids"]
    ids = tokenizer(prompt + completion + tokenizer.eos_token)["input_ids"]
    with torch.no_grad():
        logits = model(torch.tensor([ids])).logits[0, len(first) - 1 : -1]
    return float(logits.log_softmax(-1).gather(1, torch.tensor(ids[len(first) :])[:, None]).sum())
