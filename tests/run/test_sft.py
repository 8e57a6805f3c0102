"""Supervised fine-tuning from end to end on a tiny model: loss, formats, epochs, resuming, checkpoints."""

import pytest
import torch
from transformers import AutoModelForCausalLM, AutoTokenizer

from tests.config.test_sft import SCRIPTS
from tests.json_lines import write_lines
from tests.run.conftest import broken_off, merge, row_overrides, train_run
from tests.slow import slow
from verl.cli.main import main
from verl.config import SFT as SCHEMA
from verl.config import load_config
from verl.data_proto.proto import DataProto
from verl.errors import ConfigError, DataError
from verl.programs.sft import SFT
from verl.roles.guards import Guards, RollBack

pytestmark = pytest.mark.seed("A9")


@pytest.fixture(scope="module")
def rows(tmp_path_factory):
    """Folder with train.jsonl (20 rows of several lengths) and val.jsonl (6)."""
    folder = tmp_path_factory.mktemp("sft")
    for name, count in (("train", 20), ("val", 6)):
        examples = [
            {
                "messages": [
                    {"role": "user", "content": f"{name} {i}?"},
                    {"role": "assistant", "content": f"{'ab' * (i % 7 + 1)} {i}"},
                    {"role": "user", "content": "more"},
                    {"role": "assistant", "content": "c" * (i % 3 + 1)},
                ]
            }
            for i in range(count)
        ]
        write_lines(folder / f"{name}.jsonl", examples)
    return folder


@pytest.fixture
def sft_overrides(tiny_llama, rows):
    return [*row_overrides(tiny_llama, f"{rows}/train.jsonl", f"{rows}/val.jsonl"), "trainer.total_epochs=1"]


@pytest.fixture
def sft_run(sft_overrides, tmp_path):
    return lambda *changes, folder="run": train_run(tmp_path / folder, sft_overrides, changes, "sft")


QUESTION = [{"role": "user", "content": "q"}]
CALL = [{"type": "function", "function": {"name": "add", "arguments": {"a": 1}}}]


def test_calls_that_the_template_leaves_out_stop_check_and_run(sft_run, sft_overrides, tmp_path, capsys):
    """Once, they trained as an empty turn, and the dry run printed "Ready to train, 0 warnings"."""
    row, words = (
        {"messages": [*QUESTION, {"role": "assistant", "tool_calls": CALL}]},
        "leaves out tool_calls of message 1",
    )
    file = tmp_path / "tools.jsonl"
    plain = {"messages": [*QUESTION, {"role": "assistant", "content": "a"}]}
    write_lines(file, [plain, {**plain, **row}] * 4)
    assert main(["sft", "--dry-run", *merge(sft_overrides, [f"data.train_files={file}"])]) != 0
    said = capsys.readouterr().out
    assert words in " ".join(said.split())
    assert "row 1" in said
    with pytest.raises(DataError, match=f"row 1 .*{words}"):
        sft_run(f"data.train_files={file}")


def trained(run):
    """The metrics of training that are functions of weights and data."""
    names = ("train/loss", "train/grad_norm", "train/token_accuracy", "train/entropy", "train/lr")
    return [[row[name] for name in names] for row in run.training_rows()]


def reference_loss(model, batch: DataProto) -> torch.Tensor:
    """Cross-entropy of Hugging Face's forward, one row at a time, over the trained tokens of all rows."""
    losses = []
    for columns in batch.batch:
        prompt = columns["prompts"][columns["prompt_mask"]]
        exists = columns["attention_mask"][len(columns["prompts"]) :]
        ids, mask = torch.cat([prompt, columns["responses"][exists]]), columns["response_mask"][exists]
        logits = model(ids[None]).logits[0, len(prompt) - 1 : -1]
        losses.append(torch.nn.functional.cross_entropy(logits, ids[len(prompt) :], reduction="none")[mask])
    return torch.cat(losses)


class TestLoss:
    def test_is_the_mean_over_all_trained_tokens_of_the_batch(self, sft_run, sft_overrides, tiny_llama):
        first = sft_run("trainer.total_training_steps=1").training_rows()[0]
        data = SFT.load_data(load_config(sft_overrides, schema=SCHEMA).config)
        batch = data.train.batch(1)
        model = AutoModelForCausalLM.from_pretrained(tiny_llama, dtype=torch.float32)
        losses = reference_loss(model, batch)
        losses.mean().backward()
        norm = torch.nn.utils.get_total_norm([p.grad for p in model.parameters()])
        assert first["train/loss"] == pytest.approx(float(losses.mean().detach()), rel=1e-5)
        assert first["train/grad_norm"] == pytest.approx(float(norm), rel=1e-4)
        assert first["train/global_tokens"] == int(batch.batch["attention_mask"].sum())
        assert first["train/total_tokens(B)"] == first["train/global_tokens"] / 1e9

    @pytest.mark.parametrize(
        "micro",
        [
            ("data.max_token_len_per_gpu=64",),
            ("data.use_dynamic_bsz=False", "data.micro_batch_size_per_gpu=1"),
            slow(("data.use_dynamic_bsz=False", "data.micro_batch_size_per_gpu=3")),
        ],
    )
    def test_does_not_depend_on_micro_batches(self, sft_run, shared_run, sft_overrides, micro):
        undivided, parts = shared_run(sft_overrides, program="sft"), sft_run(*micro)
        for one, other in zip(trained(undivided), trained(parts), strict=True):
            assert one == pytest.approx(other, rel=1e-4, abs=1e-6)

    def test_dft_weighs_tokens_by_their_probability(self, sft_run):
        settings = ("trainer.total_training_steps=1", "trainer.val_before_train=True")
        nll, dft = (sft_run(*settings, f"sft.loss={loss}", folder=loss).rows for loss in ("nll", "dft"))
        for row, split in ((1, "train"), (0, "val")):  # of training and of held-out rows alike
            assert dft[row][f"{split}/nll"] == pytest.approx(nll[row][f"{split}/loss"], rel=1e-6)
            assert 0 < dft[row][f"{split}/loss"] < nll[row][f"{split}/loss"] / 10  # of a random model

    def test_neftune_acts_only_on_training(self, sft_run):
        settings = ("trainer.total_training_steps=1", "trainer.val_before_train=True")
        plain = sft_run(*settings, folder="plain").rows
        noisy = sft_run(*settings, "model.neftune_alpha=20", folder="noisy").rows
        assert noisy[0]["val/loss"] == plain[0]["val/loss"]
        assert noisy[1]["train/loss"] != plain[1]["train/loss"]
        again = sft_run(*settings, "model.neftune_alpha=20", folder="again").rows
        assert again[1]["train/loss"] == noisy[1]["train/loss"]

    def test_dropout_of_adapters_acts_only_on_training_and_not_by_micro_batches(self, sft_run):
        settings = (
            "trainer.total_training_steps=2",
            "trainer.val_before_train=True",
            "model.lora_rank=4",
            "optim.lr=0.02",
        )
        plain = sft_run(*settings, folder="plain").rows
        dropped = "model.lora_dropout=0.3"
        rows = sft_run(*settings, dropped, folder="dropped").rows
        assert rows[0]["val/loss"] == pytest.approx(plain[0]["val/loss"], rel=1e-6)  # by modules, not verl's decoder
        assert rows[2]["train/loss"] != plain[2]["train/loss"]  # in step 1 B is 0
        fixed = (
            "data.use_dynamic_bsz=False",
            "data.micro_batch_size_per_gpu=1",
            "model.enable_gradient_checkpointing=True",
        )
        apart = sft_run(*settings, dropped, *fixed, folder="apart").rows
        for name in ("train/loss", "train/grad_norm"):
            assert apart[2][name] == pytest.approx(rows[2][name], rel=1e-5)

    @pytest.mark.parametrize("settings", [("engine.ulysses_sequence_parallel_size=2", "trainer.n_gpus_per_node=2")])
    def test_dropout_of_adapters_is_refused_where_a_rank_has_parts_of_rows(self, sft_overrides, settings):
        from verl.engines.fsdp import _check_layout
        from verl.engines.groups import mesh_of

        overrides = [*sft_overrides, "model.lora_rank=4", "model.lora_dropout=0.1", *settings]
        config = load_config(overrides, schema=SCHEMA).config
        with pytest.raises(ConfigError, match="lora_dropout trains on one device or with FSDP2 by itself"):
            _check_layout(config.model, config.engine, mesh_of(config.engine, 2), config.optim, torch.float32)

    def test_lora_trains_only_adapters(self, sft_run, tiny_llama):
        from safetensors.torch import load_file

        run = sft_run("model.lora_rank=4", "trainer.save_freq=5", "optim.lr=0.02")
        assert run.training_rows()[-1]["train/loss"] < run.training_rows()[0]["train/loss"]
        folder = run.folder / "global_step_5" / "model"
        assert (folder / "lora_adapter" / "adapter_model.safetensors").exists()
        before, merged = (load_file(f / "model.safetensors") for f in (tiny_llama, folder / "huggingface"))
        changed = {name for name in before if not torch.equal(before[name], merged[name])}
        assert changed
        assert all("proj" in name for name in changed)


class TestEpochs:
    def test_saved_and_validated_after_each(self, sft_run):
        run = sft_run(
            "trainer.total_epochs=2", "trainer.save_freq=after_each_epoch", "trainer.test_freq=after_each_epoch"
        )
        assert [row["step"] for row in run.rows if "val/loss" in row] == [5, 10]
        assert sorted(f.name for f in run.folder.glob("global_step_*")) == ["global_step_10", "global_step_5"]
        assert run.rows[-1]["val/loss"] < run.rows[4]["val/loss"]
        assert 0 < run.rows[-1]["val/token_accuracy"] <= 1

    def test_older_checkpoints_are_removed(self, sft_run):
        run = sft_run("trainer.save_freq=1", "trainer.max_ckpt_to_keep=2")
        assert sorted(f.name for f in run.folder.glob("global_step_*")) == ["global_step_4", "global_step_5"]

    @pytest.mark.parametrize("stop", [3, slow(5), slow(7)])
    def test_a_resumed_run_equals_the_unbroken_one(self, sft_run, stop):
        """At an epoch's boundary (step 5) too: no step is lost and none is taken twice."""
        settings = (
            "trainer.total_epochs=2",
            f"trainer.save_freq={stop}",
            f"trainer.test_freq={stop}",
            "model.neftune_alpha=5",
            "model.lora_rank=4",
            "model.lora_dropout=0.2",
        )
        resumed, unbroken = broken_off(sft_run, *settings, stop=stop)
        assert [row["step"] for row in resumed.rows] == list(range(1, 11))
        assert resumed.repeatable == unbroken.repeatable

    def test_other_data_on_resume_are_named(self, sft_run, caplog):
        sft_run("trainer.save_freq=1", "trainer.total_training_steps=1")
        sft_run("trainer.save_freq=1", "trainer.total_training_steps=2", "data.train_max_samples=12")
        assert "12 rows train now, but 20 trained when" in caplog.text


class TestCheckpoint:
    def test_opens_with_transformers_has_the_validated_loss_and_starts_reinforcement_learning(
        self, sft_run, sft_overrides, tiny_run
    ):
        run = sft_run("trainer.save_freq=5", "trainer.test_freq=5")
        folder = run.folder / "global_step_5" / "model" / "huggingface"
        assert AutoTokenizer.from_pretrained(folder).chat_template
        validation = SFT.load_data(load_config(sft_overrides, schema=SCHEMA).config).validation
        with torch.no_grad():
            losses = reference_loss(AutoModelForCausalLM.from_pretrained(folder), validation.batch(range(6)))
        assert run.rows[-1]["val/loss"] == pytest.approx(float(losses.mean().detach()), rel=1e-5)
        started = tiny_run(f"actor_rollout_ref.model.path={folder}", "trainer.total_training_steps=1", folder="rl")
        assert len(started.training_rows()) == 1


def test_rows_that_are_cut_are_counted_in_the_header(sft_run, capsys):
    sft_run("data.max_length=60", "data.truncation=right", "trainer.total_training_steps=1")
    (header,) = [line for line in capsys.readouterr().out.splitlines() if line.startswith("training rows: ")]
    assert "Sequences longer than data.max_length=60, cut on the right: " in header


PLACES = ("model.path", "data.train_files", "data.val_files", "trainer.default_local_dir", "trainer.logger", "hydra.")


@pytest.mark.parametrize("name", [slow(name, when=name not in ("dynamic", "multi_turn", "padded")) for name in SCRIPTS])
def test_overrides_of_real_scripts_take_two_steps(name, sft_run):
    changes = [change for change in SCRIPTS[name].split() if not change.lstrip("+").startswith(PLACES)]
    changes = [change for change in changes if "train_batch_size" not in change and "ulysses" not in change]
    run = sft_run(*changes, "trainer.total_training_steps=2", "data.train_batch_size=4")
    assert [row["step"] for row in run.training_rows()] == [1, 2]


def test_a_rollback_continues_with_the_rows_after_the_failed_step(sft_run, sft_overrides, monkeypatch):
    taken = []

    def fail_once(self, result):
        taken.append(result.batch.batch["ordinal"].tolist())
        if len(taken) == 3:
            raise RollBack("the loss is not finite")

    monkeypatch.setattr(Guards, "check_updates", fail_once)
    run = sft_run("trainer.save_freq=2", "trainer.total_epochs=2")
    loader = SFT.load_data(load_config(sft_overrides, schema=SCHEMA).config).train
    assert taken == [loader.rows(number) for number in range(1, 12)]
    assert [row["step"] for row in run.training_rows()] == list(range(1, 11))


def test_the_last_step_validates_and_saves_whatever_the_schedule(sft_run):
    """As the trainer of existing releases; their scripts leave both frequencies out."""
    run = sft_run("trainer.save_freq=-1", "trainer.test_freq=-1", "trainer.total_training_steps=2")
    assert (run.folder / "global_step_2/model/huggingface/config.json").is_file()
    assert "val/loss" in run.rows[-1]
