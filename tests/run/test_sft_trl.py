"""Loss, gradient norm and token accuracy of ten steps equal the values of TRL's SFTTrainer on the same batches."""

import pytest

from tests.data.conversations.templates import MARKED_CHATML, chat
from tests.run.trl_oracle import paired_steps, trl_case
from verl.models.tiny import make_tiny_model

WORDS = ["sky", "is", "blue", "and", "the", "sea", "too", "日本", "é"]


def words(start, count):
    return " ".join(WORDS[(start + i) % len(WORDS)] for i in range(count))


FORMATS = {
    "messages": [
        {"messages": chat(words(i, 2), words(i + 1, i % 5 + 1), words(i, 3), words(i, i % 7 + 1))} for i in range(40)
    ],
    "prompt_completion": [
        {"prompt": words(i, i % 4 + 1), "completion": " " + words(i + 2, i % 6 + 1)} for i in range(40)
    ],
    "text": [{"text": words(i, i % 9 + 2)} for i in range(40)],
}
# name: rows, family, SFTConfig in addition to the common settings, our overrides
CASES = {
    f"{form} {family}": (form, family, {"assistant_only_loss": form == "messages"}, [])
    for form in FORMATS
    for family in ("llama", "qwen2")
} | {
    "messages llama, two micro-batches": (
        "messages",
        "llama",
        {"assistant_only_loss": True, "per_device_train_batch_size": 2, "gradient_accumulation_steps": 2},
        ["data.use_dynamic_bsz=False", "data.micro_batch_size_per_gpu=2"],
    ),
    "messages llama, dft": ("messages", "llama", {"assistant_only_loss": True, "loss_type": "dft"}, ["sft.loss=dft"]),
    "text llama, packed by TRL": (
        "text",
        "llama",
        {"packing": True, "max_length": 2048, "per_device_train_batch_size": 1},  # all rows in one pack
        ["data.train_batch_size=40"],
    ),
    "text qwen2, cosine after a warm-up": (
        "text",
        "qwen2",
        {"lr_scheduler_type": "cosine", "warmup_steps": 3},
        ["optim.lr_scheduler_type=cosine", "optim.lr_warmup_steps=3"],
    ),
}


@pytest.fixture(scope="module")
def models(tmp_path_factory):
    """Folders of tiny random models."""
    folder = tmp_path_factory.mktemp("models")
    return {family: make_tiny_model(folder / family, family) for family in ("llama", "qwen2")}


@pytest.fixture(scope="module")
def cases(models):
    return {
        name: trl_case(models[family], FORMATS[form], MARKED_CHATML, 1e-3, args=args)
        for name, (form, family, args, _) in CASES.items()
    }


@pytest.mark.slow
@pytest.mark.parametrize("case", CASES)
def test_ten_steps_match_trl(case, cases, theirs, tmp_path):
    *_, args, overrides = CASES[case]
    for row, log in paired_steps(theirs[case], "sft", tmp_path, cases[case], "float32", *overrides):
        assert row["train/loss"] == pytest.approx(log["loss"], rel=1e-5)
        assert row["train/grad_norm"] == pytest.approx(log["grad_norm"], rel=1e-5)
        assert row["train/lr"] == pytest.approx(log["learning_rate"], rel=1e-9)
        if "gradient_accumulation_steps" not in args:  # TRL averages these over micro-batches, not over tokens
            assert row["train/token_accuracy"] == pytest.approx(log["mean_token_accuracy"], rel=1e-5)
            assert row["train/entropy"] == pytest.approx(log["entropy"], rel=1e-5)
