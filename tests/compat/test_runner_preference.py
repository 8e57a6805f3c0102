"""RLRunner on pairs (DPO), and on models with adapters of peft."""

import copy
import sys

import pytest
import torch
from transformers import AutoModelForCausalLM, DataCollatorForSeq2Seq, Trainer

from tests.compat.test_runner import SCRIPTS, Recorder, arguments, rows, steps_of, tokenizer  # noqa: F401
from tests.json_lines import write_lines
from tests.run.conftest import train_run
from tests.run.test_preference_trl import PAIRS, ROWS, TEMPLATE
from tests.run.trl_oracle import trl_logs
from tests.slow import slow
from verl import RLRunner
from verl.errors import ConfigError

COMMON = {
    "per_device_train_batch_size": 4, "num_train_epochs": 2, "learning_rate": 1e-3, "lr_scheduler_type": "constant",
    "logging_steps": 1, "save_strategy": "no", "report_to": "none", "disable_tqdm": True, "use_cpu": True,
    "train_sampling_strategy": "sequential",
}  # fmt: skip
METRICS = [f"{name}/{side}" for name in ("rewards", "logps", "logits") for side in ("chosen", "rejected")]
METRICS += ["loss", "grad_norm", "rewards/accuracies", "rewards/margins", "entropy", "mean_token_accuracy"]


@pytest.fixture
def dpo_config(monkeypatch):
    """The DPOConfig that stands in for TRL's."""
    monkeypatch.syspath_prepend(str(SCRIPTS))
    monkeypatch.delitem(sys.modules, "trl", raising=False)
    from trl import DPOConfig

    yield lambda folder, **changes: DPOConfig(str(folder), **{**COMMON, **changes})
    sys.modules.pop("trl", None)


@pytest.fixture
def model(tiny_llama):
    return AutoModelForCausalLM.from_pretrained(tiny_llama, dtype=torch.float32)


@pytest.mark.parametrize(
    ("fields", "overrides", "kind"),
    [
        slow({}, [], "pairs"),
        (
            {"beta": 0.3, "max_length": 80},
            ["preference.beta=0.3", "data.max_length=80", "data.truncation=right", "data.train_on_line_end=True"],
            "messages",
        ),
        (
            {"loss_type": ["sigmoid", "sft"], "loss_weights": [0.5, 2.0], "label_smoothing": 0.0, "ld_alpha": 0.4},
            ["preference.loss=[sigmoid,sft]", "preference.loss_weights=[0.5,2.0]", "preference.ld_alpha=0.4"],
            "pairs",
        ),
        (
            {"sync_ref_model": True, "ref_model_sync_steps": 2, "ref_model_mixup_alpha": 0.5},
            ["ref.sync_steps=2", "ref.mixup_alpha=0.5"],
            "pairs",
        ),
    ],
    ids=["defaults", "messages, cut", "losses", "moving reference"],
)
def test_dpo_matches_verl_dpo(dpo_config, model, tiny_llama, tokenizer, tmp_path, fields, overrides, kind):  # noqa: F811
    pairs, recorder = ROWS[kind][:12], Recorder()
    runner = RLRunner(
        model, dpo_config(tmp_path / "script", **fields), train_dataset=pairs, processing_class=tokenizer,
        callbacks=[recorder],
    )  # fmt: skip
    assert runner.algorithm == "dpo"
    runner.train()
    write_lines(tmp_path / "train.jsonl", pairs)
    settings = [
        f"model.path={tiny_llama}", f"data.train_files={tmp_path / 'train.jsonl'}", "data.train_batch_size=4",
        "data.shuffle=False", "engine.dtype=float32", "optim.lr=1e-3", "optim.weight_decay=0.0", "optim.betas=[0.9,0.999]",
        "trainer.logger=[file]", "trainer.total_epochs=2",
    ]  # fmt: skip
    expected = train_run(tmp_path / "run", settings, overrides, "preference").training_rows()
    steps = steps_of(runner)
    assert len(steps) == len(expected) == 6
    for one, other in zip(steps, expected, strict=True):
        for name in METRICS:
            assert one[name] == pytest.approx(other[f"train/{name}"], rel=1e-5, abs=1e-6), name
    assert [name for name, _ in recorder.events].count("on_step_end") == 6
    start = AutoModelForCausalLM.from_pretrained(tiny_llama, dtype=torch.float32)
    assert any(not torch.equal(a, b) for a, b in zip(runner.model.parameters(), start.parameters(), strict=True))


@pytest.mark.parametrize("reference", ["start", "given"])
def test_evaluation_after_training_has_the_reference_of_training(
    dpo_config, model, tiny_llama, tokenizer, tmp_path, reference  # noqa: F811
):  # fmt: skip
    ref_model = None
    if reference == "given":
        ref_model = copy.deepcopy(model)
        with torch.no_grad():
            ref_model.lm_head.weight.mul_(1.5)
    runner = RLRunner(
        model, dpo_config(tmp_path, eval_strategy="epoch"), train_dataset=PAIRS[:12], eval_dataset=PAIRS[12:18],
        processing_class=tokenizer, ref_model=ref_model,
    )  # fmt: skip
    runner.train()
    last = [row for row in runner.state.log_history if "eval_loss" in row][-1]
    metrics = runner.evaluate()
    for name in ("eval_loss", "eval_rewards/margins", "eval_rewards/chosen", "eval_logits/chosen"):
        assert metrics[name] == pytest.approx(last[name], rel=1e-4), name
    assert abs(metrics["eval_rewards/chosen"]) > 1e-3


def test_what_dpo_refuses(dpo_config, model, tokenizer, tmp_path):  # noqa: F811
    def runner(args=None, **settings):
        return RLRunner(model, args or dpo_config(tmp_path), train_dataset=PAIRS, tokenizer=tokenizer, **settings)

    with pytest.raises(ConfigError, match="DPOConfig.truncation_mode=.* has no meaning for algorithm='dpo'"):
        runner(dpo_config(tmp_path, truncation_mode="keep_end"))
    with pytest.raises(ConfigError, match=r"ref\.mixup_alpha"):  # without sync_ref_model
        runner(dpo_config(tmp_path, ref_model_mixup_alpha=0.5)).train()
    with pytest.raises(ConfigError, match="compute_metrics for algorithm='dpo'"):
        runner(compute_metrics=lambda prediction: {})
    with pytest.raises(ConfigError, match="ref_model only for dpo and kto"):
        runner(ref_model=model, algorithm="sft")
    with pytest.raises(ConfigError, match="predict has no meaning for algorithm='dpo'"):
        runner().predict(PAIRS)


@pytest.mark.slow
@pytest.mark.parametrize("kind", ["pairs", "messages"])
def test_dpo_matches_trl(dpo_config, model, tiny_llama, tokenizer, tmp_path, kind):  # noqa: F811
    same = {"per_device_train_batch_size": 4, "max_steps": 6, "learning_rate": 1e-4, "weight_decay": 0.0, "beta": 0.2}
    case = {"trainer": "DPO", "model": str(tiny_llama), "rows": ROWS[kind], "args": same, "template": TEMPLATE}
    theirs, tokenizer.chat_template = trl_logs({"case": case}, tmp_path)["case"], TEMPLATE
    runner = RLRunner(model, dpo_config(tmp_path / "run", **same), train_dataset=ROWS[kind], processing_class=tokenizer)
    runner.train()
    assert len(steps_of(runner)) == len(theirs) == 6
    for one, other in zip(steps_of(runner), theirs, strict=True):
        for name in METRICS:
            if name == "rewards/accuracies" and abs(other["rewards/margins"]) < 1e-5:
                continue  # the policy is the reference: rounding ranks the pairs
            assert one[name] == pytest.approx(other[name], rel=1e-5, abs=1e-5), (other["step"], name)


class TestAdapters:
    def adapted(self, model, **changes):
        peft = pytest.importorskip("peft")
        torch.manual_seed(0)
        settings = {"r": 4, "lora_alpha": 16, "target_modules": ["q_proj", "down_proj"], "task_type": "CAUSAL_LM"}
        return peft.get_peft_model(copy.deepcopy(model), peft.LoraConfig(**{**settings, **changes}))

    def started(self, model):
        """One with trained adapters: B is not zero."""
        adapted = self.adapted(model)
        with torch.no_grad():
            for name, value in adapted.named_parameters():
                if "lora_B" in name:
                    value.normal_(std=0.02)
        return adapted

    def test_losses_and_adapters_match_trainer(self, model, tokenizer, rows, tmp_path):  # noqa: F811
        trainers = []
        for kind in (Trainer, RLRunner):
            trainers.append(
                kind(
                    model=self.started(model), args=arguments(tmp_path / kind.__name__, learning_rate=1e-2),
                    train_dataset=rows[2:], processing_class=tokenizer, data_collator=DataCollatorForSeq2Seq(tokenizer),
                )
            )  # fmt: skip
            trainers[-1].train()
        theirs, ours = trainers
        for one, other in zip(steps_of(ours), steps_of(theirs), strict=True):
            for name in ("loss", "grad_norm"):
                assert one[name] == pytest.approx(other[name], rel=1e-5), (name, other["step"])
        before = dict(self.started(model).named_parameters())
        for (name, one), (_, other) in zip(ours.model.named_parameters(), theirs.model.named_parameters(), strict=True):
            assert torch.allclose(one, other, atol=2e-4), name
            assert torch.equal(one, before[name]) == ("lora_" not in name), name
        assert (ours.predict(rows[:1]).predictions == ours.model(torch.tensor([rows[0]["input_ids"]])).logits.detach()
                .numpy()).all()  # fmt: skip
        ours.save_model(tmp_path / "saved")
        assert (tmp_path / "saved" / "adapter_model.safetensors").is_file()

    def test_dpo_starts_at_the_adapters_and_keeps_them_as_reference(self, dpo_config, model, tokenizer, tmp_path):  # noqa: F811
        runner = RLRunner(
            self.started(model), dpo_config(tmp_path, eval_strategy="epoch", learning_rate=1e-2), train_dataset=PAIRS[:12],
            eval_dataset=PAIRS[12:18], processing_class=tokenizer,
        )  # fmt: skip
        runner.train()
        first, *_ = steps_of(runner)
        assert first["loss"] == pytest.approx(0.693147, abs=1e-5)
        last = [row for row in runner.state.log_history if "eval_loss" in row][-1]
        metrics = runner.evaluate()
        assert metrics["eval_loss"] == pytest.approx(last["eval_loss"], rel=1e-4)
        assert abs(metrics["eval_rewards/chosen"]) > 1e-3

    def test_new_adapters_of_a_peft_config(self, model, tokenizer, rows, tmp_path):  # noqa: F811
        peft = pytest.importorskip("peft")
        config = peft.LoraConfig(r=2, target_modules="all-linear", exclude_modules=["v_proj"], task_type="CAUSAL_LM")
        runner = RLRunner(
            model, arguments(tmp_path, max_steps=2), train_dataset=rows, processing_class=tokenizer, peft_config=config,
            data_collator=DataCollatorForSeq2Seq(tokenizer),
        )  # fmt: skip
        runner.train()
        trained = {n: p for n, p in runner.model.named_parameters() if "lora_B" in n}
        assert trained
        assert all(bool(p.any()) for p in trained.values())
        assert not any("v_proj" in name for name in trained)

    def test_kinds_that_are_refused(self, model, tokenizer, rows, tmp_path):  # noqa: F811
        peft = pytest.importorskip("peft")

        def runner(adapted):
            return RLRunner(adapted, arguments(tmp_path), train_dataset=rows, processing_class=tokenizer)

        for field, value in (("rank_pattern", {"q_proj": 2}), ("modules_to_save", ["lm_head"]), ("bias", "all")):
            with pytest.raises(ConfigError, match=f"LoraConfig.{field}=.* has no meaning for RLRunner"):
                runner(self.adapted(model, **{field: value}))
        prefix = peft.get_peft_model(copy.deepcopy(model), peft.IA3Config(task_type="CAUSAL_LM"))
        with pytest.raises(ConfigError, match="adapters of type IA3"):
            runner(prefix)
        inside = copy.deepcopy(model)
        inside.add_adapter(peft.LoraConfig(r=2, target_modules=["q_proj"]))
        with pytest.raises(ConfigError, match="adapters by add_adapter"):
            runner(inside)
