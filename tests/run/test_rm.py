"""Reward models from end to end on a tiny model: losses, held-out measures, laws of batches, readers of a checkpoint."""

import json
import subprocess
from functools import partial

import pytest
import torch
from transformers import AutoModelForSequenceClassification, AutoModelForTokenClassification, AutoTokenizer

from tests.json_lines import write_lines
from tests.roles.test_reward_model import make_classifier
from tests.run.conftest import broken_off, merge, row_overrides, train_run
from tests.run.trl_oracle import peer_env, python_of
from tests.slow import each_value
from verl.cli.main import main
from verl.config import RM, StepGuardsConfig, load_config
from verl.data_proto.proto import DataProto
from verl.engines.api import BatchTotals
from verl.models.tiny import make_tiny_model
from verl.programs.reward_model import RewardModelProgram
from verl.roles.guards import StepGuard
from verl.roles.objectives.reward import PairObjective

pytestmark = pytest.mark.seed("A9")

VERDICTS = ("accuracy", "margin", "calibration_error", "length_correlation")


def pairs(count, start=0):
    """The chosen completion has more of the letter a, and mostly more tokens."""
    return [
        {
            "prompt": f"{'x' * (i % 4)} {i}?",
            "chosen": " " + "a" * (i % 5 + 1) + "b" * (i % 3),
            "rejected": " " + "b" * (i % 4 + 1),
            "margin": float(i % 3),
        }
        for i in range(start, start + count)
    ]


ROWS = {
    "pairs": pairs,
    "ratings": lambda count, start=0: [
        {
            "prompt": f"{i}?",
            "completion": " " + "ab" * (i % 4 + 1),
            "rating": (i % 4) / 2,
            "chosen": "a",
            "rejected": "b",
        }
        for i in range(start, start + count)
    ],
    "steps": lambda count, start=0: [
        {
            "prompt": f"{i}?",
            "completions": [f"step {j} {'ok' if (i + j) % 3 else 'no'}" for j in range(i % 3 + 1)],
            "labels": [bool((i + j) % 3) for j in range(i % 3 + 1)],
        }
        for i in range(start, start + count)
    ],
}
KINDS = {
    "sigmoid": ("pairs", "rm.loss=sigmoid", "rm.center_rewards_coefficient=0.01"),
    "logexp": ("pairs", "rm.loss=logexp"),
    "regression": ("ratings", "rm.loss=regression"),
    "process": ("steps", "rm.loss=process"),
}


@pytest.fixture(scope="module")
def data(tmp_path_factory):
    folder = tmp_path_factory.mktemp("rm")
    for name, make in ROWS.items():
        write_lines(folder / f"{name}_train.jsonl", make(20))
        write_lines(folder / f"{name}_val.jsonl", make(6, 20))
    return folder


@pytest.fixture(scope="module")
def classifier(tmp_path_factory):
    """A folder of transformers, so that both sides start with the same head."""
    return make_classifier(tmp_path_factory.mktemp("classifier"))


@pytest.fixture
def rm_overrides(classifier, tiny_llama, data):
    def of(kind):
        rows, *changes = KINDS[kind]
        model = tiny_llama if kind == "process" else classifier
        base = row_overrides(model, f"{data}/{rows}_train.jsonl", f"{data}/{rows}_val.jsonl")
        return [*base, "optim.weight_decay=0", *changes]

    return of


@pytest.fixture
def rm_run(rm_overrides, tmp_path):
    return lambda kind, *changes, folder="run": train_run(tmp_path / folder, rm_overrides(kind), changes, "rm")


def loaded_data(overrides):
    return RewardModelProgram.load_data(load_config(overrides, schema=RM).config)


def sequences(batch):
    """Tokens of each row without padding, up to the last trained one, and the places of its trained tokens."""
    scored = []
    for columns in batch.batch:
        prompt = columns["prompts"][columns["prompt_mask"]]
        places = columns["response_mask"].nonzero().flatten()
        scored.append((torch.cat([prompt, columns["responses"][: places[-1] + 1]]), places + len(prompt)))
    return scored


def reference_scores(model, batch):
    """By transformers, one sequence at a time: [rows]."""
    return torch.stack([model(ids[None]).logits[0, 0] for ids, _ in sequences(batch)])


def reference_loss(kind, scores, batch):
    """Written with loops over pairs."""
    columns = batch.batch
    if kind == "regression":
        return ((scores - columns["rating"]) ** 2).mean()
    losses = []
    for ordinal in columns["ordinal"].unique().tolist():
        rows = (columns["ordinal"] == ordinal).nonzero().flatten().tolist()
        won, lost = sorted(rows, key=lambda row: not columns["chosen"][row])
        difference = scores[won] - scores[lost]
        if kind == "sigmoid":
            centred = 0.01 * (scores[won] + scores[lost]) ** 2
            losses.append(torch.log1p(torch.exp(-(difference - columns["margin"][won]))) + centred)
        else:
            losses.append(torch.log1p(torch.exp(-difference)))
    return torch.stack(losses).mean()


class TestLoss:
    @pytest.mark.parametrize("kind", ["sigmoid", "logexp", "regression"])
    def test_of_sequences_matches_transformers(self, kind, rm_run, rm_overrides, classifier):
        first = rm_run(kind, "trainer.total_training_steps=1").training_rows()[0]
        batch = loaded_data(rm_overrides(kind)).train.batch(1)
        model = AutoModelForSequenceClassification.from_pretrained(classifier, dtype=torch.float32)
        scores = reference_scores(model, batch)
        loss = reference_loss(kind, scores, batch)
        loss.backward()
        norm = torch.nn.utils.get_total_norm([p.grad for p in model.parameters()])
        assert first["train/loss"] == pytest.approx(float(loss.detach()), rel=1e-5)
        assert first["train/grad_norm"] == pytest.approx(float(norm), rel=1e-4)
        assert first["train/mean_reward"] == pytest.approx(float(scores.detach().mean()), rel=1e-5)
        assert first["train/min_reward"] == pytest.approx(float(scores.detach().min()), rel=1e-5)
        if kind != "regression":
            won, lost = scores.detach()[batch.batch["chosen"]], scores.detach()[~batch.batch["chosen"]]
            assert first["train/accuracy"] == float((won > lost).float().mean())
            assert first["train/margin"] == pytest.approx(float((won - lost).mean()), rel=1e-4, abs=1e-6)

    def test_of_steps_is_read_at_the_last_token_of_each(self, rm_run, rm_overrides):
        run = rm_run("process", "trainer.total_training_steps=3", "trainer.save_freq=3", "trainer.test_freq=3")
        folder = run.folder / "global_step_3" / "model" / "huggingface"
        data = loaded_data(rm_overrides("process"))
        batch = data.validation.batch(range(6))
        separator = data.tokenizer("\n", add_special_tokens=False)["input_ids"][0]
        model = AutoModelForTokenClassification.from_pretrained(folder, dtype=torch.float32).eval()
        losses, right = [], []
        for (ids, places), columns in zip(sequences(batch), batch.batch, strict=True):
            assert set(ids[places - 1].tolist()) == {separator}
            scores = model(ids[None]).logits[0, places - 1, 0]
            labels = columns["step_labels"][columns["response_mask"]]
            losses += torch.nn.functional.softplus(torch.where(labels > 0, -scores, scores)).tolist()
            right += ((scores > 0) == (labels > 0)).tolist()
        assert len(losses) == 12
        assert run.rows[-1]["val/loss"] == pytest.approx(sum(losses) / len(losses), rel=1e-5)
        assert run.rows[-1]["val/accuracy"] == pytest.approx(sum(right) / len(right))

    @pytest.mark.parametrize(
        ("kind", "micro"),
        each_value(
            ["sigmoid", "process"],
            [("data.max_token_len_per_gpu=16",), ("data.use_dynamic_bsz=False", "data.micro_batch_size_per_gpu=1")],
        ),
    )
    def test_does_not_depend_on_micro_batches(self, kind, micro, rm_run, shared_run, rm_overrides):
        """A pair is above the limit of a micro-batch, and stays in one."""
        settings = ("trainer.total_training_steps=3", "trainer.test_freq=3")
        undivided = shared_run(rm_overrides(kind), *settings, program="rm")
        parts = rm_run(kind, *settings, *micro)
        names = [name for name in undivided.rows[0] if name.startswith("train/")]
        for one, other in zip(undivided.rows, parts.rows, strict=True):
            for name in names:
                assert one[name] == pytest.approx(other[name], rel=1e-4, abs=1e-6), name
        assert undivided.rows[-1]["val/loss"] == pytest.approx(parts.rows[-1]["val/loss"], rel=1e-4)

    def test_does_not_depend_on_the_order_of_rows(self):
        objective = PairObjective("sigmoid", 0.01, StepGuard(StepGuardsConfig()))
        scores = torch.randn(8, generator=torch.Generator().manual_seed(0))
        columns = {
            "ordinal": torch.tensor([3, 3, 9, 9, 1, 1, 4, 4]),
            "sample_index": torch.tensor([0, 1] * 4),
            "chosen": torch.tensor([True, False] * 4),
            "margin": torch.tensor([0.0, 0, 1, 1, 2, 2, 0, 0]),
        }
        totals = BatchTotals(num_tokens=0, num_sequences=8, num_units=4)
        expected, _ = objective({"sequence_scores": scores}, DataProto.from_dict(columns), totals)
        order = torch.tensor([5, 0, 7, 2, 1, 3, 6, 4])
        batch = DataProto.from_dict({name: values[order] for name, values in columns.items()})
        loss, metrics = objective({"sequence_scores": scores[order]}, batch, totals)
        assert float(loss) == pytest.approx(float(expected), rel=1e-6)
        assert metrics["accuracy"].value == float((scores[::2] > scores[1::2]).float().mean())


@pytest.mark.parametrize("kind", KINDS)
def test_learns_and_measures_held_out_rows(kind, rm_run):
    settings = ("trainer.total_epochs=4", "trainer.val_before_train=True", "trainer.test_freq=20", "optim.lr=0.005")
    run = rm_run(kind, *settings)
    before, after = run.rows[0], run.rows[-1]
    assert after["train/loss"] < run.training_rows()[0]["train/loss"]
    assert after["val/loss"] < before["val/loss"]
    if kind in ("sigmoid", "logexp"):
        assert after["val/accuracy"] == 1.0 > before["val/accuracy"] or after["val/margin"] > before["val/margin"]
        assert {f"val/{name}" for name in VERDICTS} <= set(after)
        summary = json.loads((run.folder / "summary.json").read_text())
        assert "accuracy" in json.dumps(summary)
    logged = run.samples_of(20, "val")
    assert len(logged) == {"regression": 6, "process": 6}.get(kind, 12)
    assert all("response" in row and ("score" in row or "scores" in row) for row in logged)


def test_a_resumed_run_equals_the_unbroken_one(rm_run):
    settings = ("trainer.total_epochs=2", "trainer.save_freq=3", "trainer.test_freq=5")
    resumed, unbroken = broken_off(partial(rm_run, "sigmoid"), *settings, stop=3)
    assert [row["step"] for row in resumed.rows] == list(range(1, 11))
    rows = [{k: v for k, v in row.items() if not k.startswith("val/")} for row in resumed.repeatable]
    assert rows == [{k: v for k, v in row.items() if not k.startswith("val/")} for row in unbroken.repeatable]
    assert resumed.rows[-1]["val/loss"] == unbroken.rows[-1]["val/loss"]


class TestCheckpoint:
    def test_opens_with_transformers_and_rewards_a_policy(self, rm_run, rm_overrides, tiny_run, tmp_path):
        """From a language model without a head: the scores of training equal transformers' scores, also of a padded batch, in
        which transformers finds the last token of a row by the padding token, and the scores in reinforcement learning."""
        base = make_tiny_model(tmp_path / "base", pad_token_id=258)  # the end of a turn, as in SmolLM2
        tokenizer = AutoTokenizer.from_pretrained(base)
        tokenizer.pad_token = tokenizer.eos_token
        tokenizer.save_pretrained(base)
        run = rm_run("sigmoid", f"model.path={base}", "trainer.save_freq=5", "trainer.test_freq=5")
        folder = run.folder / "global_step_5" / "model" / "huggingface"
        model = AutoModelForSequenceClassification.from_pretrained(folder, dtype=torch.float32).eval()
        assert model.config.num_labels == 1
        batch = loaded_data(rm_overrides("sigmoid")).validation.batch(range(6))
        with torch.no_grad():
            scores = reference_scores(model, batch)
        assert [row["score"] for row in run.samples_of(5, "val")] == pytest.approx(scores.tolist(), rel=1e-4, abs=1e-5)
        tokenizer, texts = AutoTokenizer.from_pretrained(folder), ["a<|im_end|>", "a longer text<|im_end|>"]
        with torch.no_grad():
            together = model(**tokenizer(texts, return_tensors="pt", padding=True)).logits[:, 0]
            alone = [float(model(**tokenizer(text, return_tensors="pt")).logits[0, 0]) for text in texts]
        assert together.tolist() == pytest.approx(alone, rel=1e-4, abs=1e-6)
        ppo = tiny_run(
            "reward.custom_reward_function.path=null",
            "reward.reward_model.enable=True",
            f"reward.reward_model.model_path={folder}",
            "reward.reward_model.rollout.dtype=float32",
            "trainer.total_training_steps=1",
            folder="ppo",
        )
        ids = [torch.tensor([row["prompt_ids"] + row["response_ids"]]) for row in ppo.samples_of()]
        with torch.no_grad():
            expected = [float(model(one).logits[0, 0]) for one in ids]
        assert [row["score"] for row in ppo.samples_of()] == pytest.approx(expected, rel=1e-4, abs=1e-5)

    @pytest.mark.slow
    def test_opens_with_vllm(self, rm_run, tmp_path):
        """A model with heads of 32, a size of vLLM's kernels for CPUs."""
        from transformers import AutoModelForSequenceClassification

        python = python_of("vllm")
        model = make_tiny_model(
            tmp_path / "model", "llama", hidden_size=128, num_attention_heads=4, num_key_value_heads=2
        )
        run = rm_run("sigmoid", f"model.path={model}", "trainer.save_freq=5")
        folder = run.folder / "global_step_5" / "model" / "huggingface"
        prompts = [[3, 70, 9], [41, 5, 6, 7, 11]]
        code = (
            "import json, sys, vllm\n"
            "if __name__ == '__main__':\n"
            "    llm = vllm.LLM(sys.argv[1], runner='pooling', dtype='float32', max_model_len=64, enforce_eager=True,\n"
            "                   pooler_config={'use_activation': False})\n"
            "    found = llm.encode([{'prompt_token_ids': p} for p in json.loads(sys.argv[2])], pooling_task='classify')\n"
            "    print('SCORES', json.dumps([f.outputs.data.tolist() for f in found]))\n"
        )
        (tmp_path / "score.py").write_text(code)
        done = subprocess.run(
            [python, tmp_path / "score.py", folder, json.dumps(prompts)],
            env=peer_env.clean_environment() | {"HF_HUB_OFFLINE": "1", "VLLM_CPU_KVCACHE_SPACE": "1"},
            capture_output=True, text=True, timeout=280,
        )  # fmt: skip
        said = [line.removeprefix("SCORES ") for line in done.stdout.splitlines() if line.startswith("SCORES ")]
        assert said, done.stderr[-3000:]
        opened = AutoModelForSequenceClassification.from_pretrained(folder, dtype=torch.float32).eval()
        with torch.no_grad():
            expected = [opened(torch.tensor([prompt])).logits[0].tolist() for prompt in prompts]
        for output, score in zip(json.loads(said[0]), expected, strict=True):
            assert output == pytest.approx(score, abs=1e-4)


BAD_ROWS = {
    "ratings": ({"prompt": "q", "completion": "a", "rating": "good"}, "'rating' must be a finite number"),
    "steps": ({"prompt": "q", "completions": ["a", "b"], "labels": [True]}, "2 steps, but field 'labels' has 1 labels"),
    "pairs": ({"prompt": "q", "completion": "a", "label": True}, "needs pairs"),
}


@pytest.mark.parametrize("kind", ["sigmoid", "regression", "process"])
def test_bad_rows_are_named_before_anything_trains(kind, rm_overrides, tmp_path, capsys):
    name = KINDS[kind][0]
    row, sentence = BAD_ROWS[name]
    file = write_lines(tmp_path / "bad.jsonl", [*ROWS[name](4), row])
    arguments = merge(
        [*rm_overrides(kind), f"trainer.default_local_dir={tmp_path / 'run'}"], (f"data.train_files={file}",)
    )
    assert main(["rm", *arguments]) == 3
    said = capsys.readouterr().err
    assert "row 5" in said or "row 4" in said, said
    assert sentence in said
    assert not (tmp_path / "run" / "metrics.jsonl").exists()
    assert main(["rm", "--dry-run", *arguments]) == 1
    assert sentence in capsys.readouterr().out
