"""Loss, gradient norm and token accuracy of ten steps equal the values of TRL's SFTTrainer on the same batches."""

import json

import pytest

from tests.data.conversations.templates import MARKED_CHATML, chat
from tests.run.conftest import Run
from tests.run.trl_oracle import trl_logs
from verl.models.tiny import make_tiny_model

NUM_STEPS, BATCH_SIZE = 10, 4
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
    "messages llama, dft": (
        "messages",
        "llama",
        {"assistant_only_loss": True, "loss_type": "dft"},
        ["sft.loss=dft"],
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
    """Folders of tiny random models, with a template that marks the assistant's text."""
    folder = tmp_path_factory.mktemp("models")
    made = {family: make_tiny_model(folder / family, family) for family in ("llama", "qwen2")}
    (folder / "template.jinja").write_text(MARKED_CHATML)
    return made


@pytest.fixture(scope="module")
def theirs(models, tmp_path_factory):
    """TRL's log of every case: one process, because its imports take longer than the steps."""
    folder = tmp_path_factory.mktemp("trl")
    common = {"per_device_train_batch_size": BATCH_SIZE, "max_steps": NUM_STEPS, "learning_rate": 1e-3}
    cases = {
        name: {
            "model": str(models[family]),
            "rows": FORMATS[form],
            "args": {**common, "weight_decay": 0.0, **args},
            "template": MARKED_CHATML,
        }
        for name, (form, family, args, _) in CASES.items()
    }
    return trl_logs(cases, folder)


@pytest.mark.slow
@pytest.mark.parametrize("case", CASES)
def test_ten_steps_are_those_of_trl(case, theirs, models, tmp_path):
    from verl.config import SFT, load_config
    from verl.run.host import train

    form, family, args, overrides = CASES[case]
    (tmp_path / "train.jsonl").write_text("".join(json.dumps(row) + "\n" for row in FORMATS[form]))
    settings = [
        f"model.path={models[family]}",
        f"model.custom_chat_template={models[family].parent / 'template.jinja'}",
        "model.enable_gradient_checkpointing=False",
        f"data.train_files={tmp_path / 'train.jsonl'}",
        f"data.train_batch_size={BATCH_SIZE}",
        "data.shuffle=False",
        "engine.dtype=float32",
        "optim.lr=1e-3",
        "optim.weight_decay=0.0",
        "trainer.logger=[file]",
        f"trainer.total_training_steps={NUM_STEPS}",
        f"trainer.default_local_dir={tmp_path / 'run'}",
        *overrides,
    ]
    assert train(load_config(settings, schema=SFT), program="sft") == 0
    ours = Run(tmp_path / "run").training_rows()
    assert len(ours) == len(theirs[case]) == NUM_STEPS
    for row, log in zip(ours, theirs[case], strict=True):
        assert row["train/loss"] == pytest.approx(log["loss"], rel=1e-5)
        assert row["train/grad_norm"] == pytest.approx(log["grad_norm"], rel=1e-5)
        assert row["train/lr"] == pytest.approx(log["learning_rate"], rel=1e-9)
        if "gradient_accumulation_steps" not in args:  # TRL averages these over micro-batches, not over tokens
            assert row["train/token_accuracy"] == pytest.approx(log["mean_token_accuracy"], rel=1e-5)
            assert row["train/entropy"] == pytest.approx(log["entropy"], rel=1e-5)
