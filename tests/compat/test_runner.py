"""RLRunner in scripts of transformers and TRL, and the trainers that the seed documents name."""

import dataclasses
import importlib
import json
import runpy
import sys
from functools import partial
from pathlib import Path

import pytest
import torch
from transformers import AutoModelForCausalLM, DataCollatorForSeq2Seq, Trainer, TrainerCallback, TrainingArguments

from tests.commands import ran
from tests.json_lines import read_lines
from tests.run import conftest as runs
from tests.run.trl_oracle import peer_env, python_of
from tests.slow import slow
from verl import RLRunner
from verl.config import load_config
from verl.errors import ConfigError, DataError, RewardError
from verl.models.load import load_tokenizer
from verl.runner.arguments import Arguments

tiny_task, tiny_overrides = runs.tiny_task, runs.tiny_overrides
SCRIPTS = Path(__file__).parent / "scripts"


@pytest.fixture
def tokenizer(tiny_llama):
    return load_tokenizer(str(tiny_llama))


@pytest.fixture
def rows(tokenizer):
    """Tokenized rows of several lengths; the user's tokens do not train."""
    examples = []
    for n in range(22):
        prompt, answer = (tokenizer.encode(text, add_special_tokens=False) for text in (f"{n}?", "ab" * (n % 5 + 1)))
        examples.append({"input_ids": prompt + answer, "labels": [-100] * len(prompt) + answer})
    return examples


def arguments(folder, **changes):
    settings = {
        "output_dir": str(folder), "per_device_train_batch_size": 2, "gradient_accumulation_steps": 2, "num_train_epochs": 2,
        "learning_rate": 2e-3, "warmup_steps": 2, "logging_steps": 1, "save_strategy": "no", "report_to": "none",
        "disable_tqdm": True, "use_cpu": True, "dataloader_drop_last": True, "label_names": ["labels"],
        "per_device_eval_batch_size": 2,
    }  # fmt: skip
    return TrainingArguments(**{**settings, **changes})


class Recorder(TrainerCallback):
    """Events that both trainers have, with the state at each."""

    def __init__(self):
        self.events = []

    def __getattribute__(self, name):
        events = ("on_train_begin", "on_epoch_begin", "on_step_begin", "on_step_end", "on_log", "on_evaluate", "on_save",
                  "on_epoch_end", "on_train_end")  # fmt: skip
        if name not in events:
            return super().__getattribute__(name)
        return lambda args, state, control, **_: self.events.append((name, state.global_step))


def trained(kind, folder, tiny_llama, tokenizer, rows, recorder=None, **changes):
    model = AutoModelForCausalLM.from_pretrained(tiny_llama, dtype=torch.float32)
    trainer = kind(
        model=model,
        args=arguments(folder, **changes),
        train_dataset=rows[2:],
        eval_dataset=rows[:2],
        processing_class=tokenizer,
        data_collator=DataCollatorForSeq2Seq(tokenizer),
        callbacks=[] if recorder is None else [recorder],
    )
    trainer.output = trainer.train()
    return trainer


def steps_of(trainer):
    return [row for row in trainer.state.log_history if "grad_norm" in row]


@pytest.mark.parametrize(
    "changes",
    [
        slow({}),
        slow({"lr_scheduler_type": "cosine", "data_seed": 7, "max_steps": 7}),
        {
            "lr_scheduler_type": "warmup_stable_decay", "lr_scheduler_kwargs": {"num_decay_steps": 3, "decay_type": "1-sqrt"},
            "warmup_steps": 2, "data_seed": 7, "max_steps": 7,
        },
    ],
    ids=["linear", "cosine", "wsd"],
)  # fmt: skip
def test_losses_match_trainer(tiny_llama, tokenizer, rows, tmp_path, changes):
    changes = {"eval_strategy": "epoch", **changes}
    theirs_seen, ours_seen = Recorder(), Recorder()
    theirs = trained(Trainer, tmp_path / "theirs", tiny_llama, tokenizer, rows, theirs_seen, **changes)
    ours = trained(RLRunner, tmp_path / "ours", tiny_llama, tokenizer, rows, ours_seen, **changes)
    assert len(steps_of(ours)) == len(steps_of(theirs)) == changes.get("max_steps", 10)
    for one, other in zip(steps_of(ours), steps_of(theirs), strict=True):
        for name in ("loss", "grad_norm", "learning_rate", "epoch", "step"):
            assert one[name] == pytest.approx(other[name], rel=1e-5), (name, other["step"])
    assert ours.output.metrics["train_loss"] == pytest.approx(theirs.output.training_loss, rel=1e-5)
    expected = list(theirs_seen.events)
    del expected[-2]  # the log of the whole training's speed, before on_train_end
    assert ours_seen.events == expected
    for (name, one), (_, other) in zip(ours.model.named_parameters(), theirs.model.named_parameters(), strict=True):
        assert torch.allclose(one, other, atol=2e-4), name
    losses, expected = (
        [row["eval_loss"] for row in trainer.state.log_history if "eval_loss" in row] for trainer in (ours, theirs)
    )
    assert losses == pytest.approx(expected, rel=1e-3)


class StopAt(TrainerCallback):
    def on_step_end(self, args, state, control, **_):
        control.should_save = state.global_step == 2
        control.should_training_stop = state.global_step == 3


def test_callbacks_control_the_run_and_checkpoints_have_their_names(tiny_llama, tokenizer, rows, tmp_path):
    runner = trained(RLRunner, tmp_path / "run", tiny_llama, tokenizer, rows, StopAt())
    assert runner.state.global_step == 3
    assert sorted(f.name for f in (tmp_path / "run").glob("checkpoint-*")) == ["checkpoint-2", "checkpoint-3"]
    assert json.loads((tmp_path / "run/checkpoint-3/trainer_state.json").read_text())["global_step"] == 3
    saved = AutoModelForCausalLM.from_pretrained(tmp_path / "run" / "checkpoint-3", dtype=torch.float32)
    for (name, one), (_, other) in zip(saved.named_parameters(), runner.model.named_parameters(), strict=True):
        assert torch.equal(one, other), name


def test_checkpoints_of_another_trainer_stay(tiny_llama, tokenizer, rows, tmp_path):
    """A script that called TRL before, with its output_dir: hours of training are in there."""
    theirs = tmp_path / "run" / "checkpoint-500"
    theirs.mkdir(parents=True)
    (theirs / "trainer_state.json").write_text("{}")
    runner = partial(trained, RLRunner, tmp_path / "run", tiny_llama, tokenizer, rows, StopAt())
    (theirs / "model.safetensors").write_text("theirs")
    with pytest.raises(ConfigError, match="has checkpoints of another trainer, such as checkpoint-500"):
        runner()
    assert (theirs / "model.safetensors").read_text() == "theirs"
    theirs.rename(tmp_path / "run" / "checkpoint-best")
    runner()
    (tmp_path / "run/checkpoint-3/mine.json").write_text("of a callback")
    runner()  # its own checkpoints are none of another trainer
    assert (tmp_path / "run/checkpoint-best/model.safetensors").read_text() == "theirs"


def test_a_run_resumes_from_a_checkpoint(tiny_llama, tokenizer, rows, tmp_path):
    unbroken = trained(RLRunner, tmp_path / "whole", tiny_llama, tokenizer, rows, save_strategy="steps", save_steps=4)
    model = AutoModelForCausalLM.from_pretrained(tiny_llama, dtype=torch.float32)
    again = RLRunner(
        model, arguments(tmp_path / "whole", save_strategy="steps", save_steps=4), train_dataset=rows[2:],
        processing_class=tokenizer,
    )  # fmt: skip
    again.train(resume_from_checkpoint=str(tmp_path / "whole" / "checkpoint-8"))
    assert [row["step"] for row in steps_of(again)] == [9, 10]
    for (name, one), (_, other) in zip(again.model.named_parameters(), unbroken.model.named_parameters(), strict=True):
        assert torch.equal(one, other), name


def test_evaluate_predict_and_save(tiny_llama, tokenizer, rows, tmp_path):
    model = AutoModelForCausalLM.from_pretrained(tiny_llama, dtype=torch.float32)
    count = lambda prediction: {"trained": int((prediction.label_ids != -100).sum())}  # noqa: E731
    runner = RLRunner(
        model,
        arguments(tmp_path),
        train_dataset=rows,
        eval_dataset=rows[:3],
        tokenizer=tokenizer,
        compute_metrics=count,
    )
    metrics = runner.evaluate()
    reference = Trainer(
        model,
        arguments(tmp_path / "theirs", dataloader_drop_last=False),
        DataCollatorForSeq2Seq(tokenizer),
        eval_dataset=rows[:3],
        processing_class=tokenizer,
    )
    per_row = [reference.evaluate(rows[i : i + 1])["eval_loss"] for i in range(3)]
    sizes = [sum(label != -100 for label in row["labels"]) for row in rows[:3]]
    assert metrics["eval_loss"] == pytest.approx(
        sum(loss * size for loss, size in zip(per_row, sizes, strict=True)) / sum(sizes), rel=1e-5
    )
    assert metrics["eval_trained"] == sum(sizes)
    logits = runner.predict(rows[:1]).predictions
    expected = model(torch.tensor([rows[0]["input_ids"]])).logits.detach()
    assert torch.allclose(torch.tensor(logits), expected, atol=1e-5)
    runner.save_model(tmp_path / "saved")
    assert load_tokenizer(str(tmp_path / "saved")).eos_token_id == tokenizer.eos_token_id


@pytest.mark.seed("A8")
@pytest.mark.parametrize("name", ["run_clm", "sft", "grpo", "dpo"])
def test_scripts_run_with_two_lines_changed(name, tiny_llama, tmp_path, monkeypatch):
    text = (SCRIPTS / f"{name}.py").read_text()
    kind = {"run_clm": "Trainer", "sft": "SFTTrainer", "grpo": "GRPOTrainer", "dpo": "DPOTrainer"}[name]
    changed = text.replace(f", {kind}", "", 1).replace(f"= {kind}(", "= RLRunner(")
    changed = changed.replace("\n\nmodel_path", "\nfrom verl import RLRunner\n\nmodel_path")
    before, after = (set(t.splitlines()) for t in (text, changed))
    assert len(before - after) == 2
    script = tmp_path / "script.py"
    script.write_text(changed)
    monkeypatch.syspath_prepend(str(SCRIPTS))
    monkeypatch.setattr(sys, "argv", [str(script), str(tiny_llama), str(tmp_path / "out")])
    try:
        namespace = runpy.run_path(str(script), run_name="__main__")
    finally:
        sys.modules.pop("trl", None)
    history = namespace["trainer"].state.log_history
    final = AutoModelForCausalLM.from_pretrained(tmp_path / "out" / "final", dtype=torch.float32)
    start = AutoModelForCausalLM.from_pretrained(tiny_llama, dtype=torch.float32)
    assert any(not torch.equal(a, b) for a, b in zip(final.parameters(), start.parameters(), strict=True))
    if name == "grpo":
        samples = read_lines(tmp_path / "out/samples/train/step_000001.jsonl")
        assert len(samples) == 8
        assert all(
            s["score"] == pytest.approx(s["reward_parts"]["digits"] + 0.5 * s["reward_parts"]["holds"]) for s in samples
        )
        assert {"loss", "reward", "kl"} <= set(history[0])
    else:
        losses = [row["loss"] for row in history if "loss" in row]
        assert losses[-1] < losses[0]
        assert name != "dpo" or losses[0] == pytest.approx(0.6931, abs=1e-3)
    if name == "run_clm":
        assert namespace["metrics"]["eval_loss"] < 5


@pytest.fixture
def trl(monkeypatch):
    """The configs of TRL, the module scripts/trl.py."""
    monkeypatch.syspath_prepend(str(SCRIPTS))
    yield importlib.import_module("trl")
    sys.modules.pop("trl", None)


class TestArgumentsOfTRL:
    def keys(self, args, algorithm):
        mapped = Arguments(args, algorithm, world_size=2, num_rows=64, keys={})
        return mapped, dict(pair.split("=", 1) for pair in mapped.overrides())

    @pytest.mark.parametrize(
        ("fields", "batch", "mini_batch", "steps", "warmup"),
        [
            ({}, 4, 4, 24, 6),  # 2 ranks x 4 micro-batches x 2 samples in groups of 4
            ({"steps_per_generation": 8}, 8, 4, 12, 3),
            ({"steps_per_generation": 8, "num_iterations": 2}, 8, 4, 6, 2),
        ],
    )
    def test_generations_and_updates(self, trl, tmp_path, fields, batch, mini_batch, steps, warmup):
        """TRL counts optimizer steps; a generation has steps_per_generation micro-batches."""
        common = {"per_device_train_batch_size": 2, "gradient_accumulation_steps": 4, "num_generations": 4}
        args = trl.GRPOConfig(str(tmp_path), use_cpu=True, max_steps=24, warmup_steps=6, **common, **fields)
        mapped, keys = self.keys(args, "grpo")
        assert keys["data.train_batch_size"] == str(batch)
        assert keys["actor_rollout_ref.actor.ppo_mini_batch_size"] == str(mini_batch)
        assert mapped.max_steps == steps
        assert keys["actor_rollout_ref.actor.optim.lr_warmup_steps"] == str(warmup)

    @pytest.mark.parametrize(
        ("fields", "sentence"),
        [
            ({"steps_per_generation": 3, "gradient_accumulation_steps": 2}, "no multiple of .*_accumulation_steps=2"),
            ({"scale_rewards": "batch"}, "scale_rewards=batch is not available here; there are group, none"),
            ({"min_p": 0.1}, "GRPOConfig.min_p=0.1 has no meaning"),
        ],
    )
    def test_what_would_be_left_out_is_refused(self, trl, tmp_path, fields, sentence):
        with pytest.raises(ConfigError, match=sentence):
            self.keys(trl.GRPOConfig(str(tmp_path), use_cpu=True, **fields), "grpo")

    @pytest.mark.parametrize(
        ("fields", "bound", "loss"),
        [({}, "inf", None), ({"delta": 4.0}, "4.0", None), ({"importance_sampling_level": "sequence"}, "inf", "gspo")],
    )
    def test_ratios_have_the_bounds_of_trl(self, trl, tmp_path, fields, bound, loss):
        """No bound for negative advantages but `delta`; the key's default is 3."""
        _, keys = self.keys(trl.GRPOConfig(str(tmp_path), use_cpu=True, **fields), "grpo")
        assert keys["actor_rollout_ref.actor.clip_ratio_c"] == bound
        assert keys.get("actor_rollout_ref.actor.policy_loss.loss_mode") == loss
        load_config([f"{key}={value}" for key, value in keys.items()])

    def test_what_is_shown_changes_nothing(self, trl, tmp_path):
        _, keys = self.keys(trl.GRPOConfig(str(tmp_path), use_cpu=True, log_completions=True), "grpo")
        assert keys["algorithm.norm_adv_by_std_in_grpo"] == "True"

    def test_loss_and_column_of_texts(self, trl, tmp_path):
        _, keys = self.keys(
            trl.SFTConfig(str(tmp_path), use_cpu=True, loss_type="dft", dataset_text_field="body"), "sft"
        )
        assert (keys["sft.loss"], keys["data.text_key"]) == ("dft", "body")

    @pytest.mark.slow
    def test_the_configs_next_to_the_scripts_match_trl(self, trl, tmp_path):
        """Names and defaults, after TRL's own checks."""
        python = python_of("trl")
        configs = {
            name: getattr(trl, name)(str(tmp_path), use_cpu=True) for name in ("SFTConfig", "GRPOConfig", "DPOConfig")
        }
        inherited = {f.name for f in dataclasses.fields(TrainingArguments)}
        ours = {
            name: {f.name: getattr(args, f.name) for f in dataclasses.fields(args) if f.name not in inherited}
            for name, args in configs.items()
        }
        code = (
            "import json, sys, trl\n"
            "wanted = json.loads(sys.argv[1])\n"
            "configs = {name: getattr(trl, name)(sys.argv[2], use_cpu=True) for name in wanted}\n"
            "print(json.dumps({n: {f: getattr(configs[n], f) for f in fields} for n, fields in wanted.items()}))"
        )
        offline = peer_env.clean_environment() | {"HF_HUB_OFFLINE": "1"}
        done = ran(python, "-c", code, json.dumps(ours), tmp_path, env=offline, timeout=280)
        assert json.loads(done.stdout.splitlines()[-1]) == ours


class TestRefusals:
    def runner(self, tiny_llama, tmp_path, rows=None, *, args=None, **settings):
        return RLRunner(
            str(tiny_llama), args or arguments(tmp_path), train_dataset=rows or [{"text": "ab"}] * 8, **settings
        )

    @pytest.mark.parametrize(
        ("field", "value"), [("label_smoothing_factor", 0.1), ("adam_epsilon", 1e-6), ("load_best_model_at_end", True),
                             ("torch_compile_mode", "default"), ("auto_find_batch_size", True)]
    )  # fmt: skip
    def test_fields_without_a_meaning(self, tiny_llama, tmp_path, field, value):
        args = arguments(tmp_path)
        setattr(args, field, value)
        with pytest.raises(ConfigError, match=f"TrainingArguments.{field}=.* has no meaning for algorithm='sft'"):
            self.runner(tiny_llama, tmp_path, args=args)

    def test_what_would_change_batches_or_the_model_is_not_left_out(self, tiny_llama, tmp_path):
        with pytest.raises(ConfigError, match="train_sampling_strategy=group_by_length is not available"):
            self.runner(
                tiny_llama, tmp_path, args=arguments(tmp_path, train_sampling_strategy="group_by_length")
            ).train()
        args = arguments(tmp_path)
        args.model_init_kwargs = {"dtype": "bfloat16", "attn_implementation": "flash_attention_2"}
        assert self.runner(tiny_llama, tmp_path, args=args).model.dtype == torch.bfloat16
        with pytest.raises(ConfigError, match="model_init_kwargs is for a model by its path"):
            RLRunner(AutoModelForCausalLM.from_pretrained(tiny_llama), args, train_dataset=[{"text": "ab"}] * 8)
        args.model_init_kwargs["load_in_4bit"] = True
        with pytest.raises(ConfigError, match="load_in_4bit is not available"):
            self.runner(tiny_llama, tmp_path, args=args)

    def test_contradictions(self, tiny_llama, tmp_path):
        with pytest.raises(
            ConfigError, match="config gives optim.lr=0.1, and args or the data sets give optim.lr|give 0.002"
        ):
            self.runner(tiny_llama, tmp_path, config={"optim.lr": 0.1}).train()
        with pytest.raises(ConfigError, match="takes 4 rows .* and train_dataset has 3"):
            self.runner(tiny_llama, tmp_path, [{"text": "a"}] * 3)
        with pytest.raises(ConfigError, match="no multiple of num_generations=8"):
            self.runner(tiny_llama, tmp_path, [{"prompt": "a"}] * 8, reward_funcs=len)
        with pytest.raises(ConfigError, match="RLRunner has no algorithm 'sac'"):
            self.runner(tiny_llama, tmp_path, algorithm="sac")
        with pytest.raises(ConfigError, match="makes an optimizer"):
            self.runner(tiny_llama, tmp_path, optimizers=(object(), None))

    @pytest.mark.parametrize(
        ("rows", "reward", "keys"),
        [
            ({"text": "ab"}, None, {"optim.lr": 0.1, "data.train_batch_size": 4, "trainer.total_training_steps": 3}),
            ({"text": "ab"}, None, {"trainer.seed": 7, "optim.betas": [0.8, 0.9], "trainer.default_local_dir": "HERE"}),
            (
                {"prompt": "ab"}, len, {"algorithm.adv_estimator": "rloo", "actor_rollout_ref.rollout.n": 2,
                "actor_rollout_ref.actor.ppo_mini_batch_size": 1, "data.train_batch_size": 2,
                "actor_rollout_ref.actor.optim.lr": 1e-5, "actor_rollout_ref.rollout.temperature": 0.7},
            ),
        ],
    )  # fmt: skip
    def test_fields_that_are_not_set_give_way_to_keys(self, tiny_llama, tmp_path, rows, reward, keys):
        keys = {key: str(tmp_path / "run") if value == "HERE" else value for key, value in keys.items()}
        args = None if "trainer.default_local_dir" in keys else TrainingArguments(str(tmp_path), report_to="none")
        runner = RLRunner(str(tiny_llama), args, train_dataset=[rows] * 16, reward_funcs=reward, config=keys)
        values = runner._load({"trainer.val_only": False}).schema.flatten(runner._load({}).config)
        assert {key: values[key] for key in keys} == keys
        assert runner.state.max_steps == values["trainer.total_training_steps"]
        assert str(runner.inputs).startswith(values["trainer.default_local_dir"])

    def test_keys_name_columns_of_the_scripts_rows(self, tiny_llama, tmp_path):
        keys = {"data.prompt_key": "question", "data.reward_fn_key": "task"}
        rows = [{"question": "a", "task": "sums"}] * 8
        runner = RLRunner(
            str(tiny_llama),
            TrainingArguments(str(tmp_path), report_to="none"),
            train_dataset=rows,
            reward_funcs=len,
            config=keys,
        )
        runner._load({})
        row = json.loads((runner.inputs / "train.jsonl").read_text().splitlines()[0])
        assert row["question"] == "a"
        assert row["task"] == "sums"

    def test_bad_rows(self, tiny_llama, tmp_path):
        one, shifted = ({"input_ids": [1, 2, 3], "labels": labels} for labels in ([1, 2, 3], [2, 3, 4]))
        with pytest.raises(DataError, match="Row 5 of the train data.*labels differ from input_ids"):
            self.runner(tiny_llama, tmp_path, [one] * 5 + [shifted] + [one] * 2).train()  # in a random order
        args = arguments(tmp_path, gradient_accumulation_steps=4)
        with pytest.raises(DataError, match="Row 0 .*has no 'prompt'.*it has question"):
            self.runner(tiny_llama, tmp_path, [{"question": "a"}] * 8, args=args, reward_funcs=len).train()


class TestRewardsOfTRL:
    """The contract of TRL's GRPOTrainer: prompts, completions, completion_ids, the columns of the rows and trainer_state."""

    def train(self, tiny_llama, tmp_path, *functions):
        args = arguments(tmp_path, gradient_accumulation_steps=4, max_steps=2)
        rows = [{"prompt": "a", "level": number} for number in range(16)]
        runner = RLRunner(str(tiny_llama), args, train_dataset=rows, reward_funcs=list(functions))
        runner.train()
        return runner

    def test_arguments_of_a_function(self, tiny_llama, tmp_path):
        calls = []

        def lengths(prompts, completions, completion_ids, trainer_state, level, **columns):
            calls.append((trainer_state.global_step, len(prompts), set(columns)))
            assert len(prompts) == len(completions) == len(completion_ids) == len(level)
            assert all(isinstance(token, int) for ids in completion_ids for token in ids)
            return [float(len(ids)) for ids in completion_ids]

        def of_few(completions):
            return [0.0] * len(completions)

        runner = self.train(tiny_llama, tmp_path, lengths, of_few)
        assert [step for step, _, _ in calls] == [0, 1]
        assert {count for _, count, _ in calls} == {8}
        logged = [
            row["completions/mean_length"] for row in runner.state.log_history if "completions/mean_length" in row
        ]
        assert [row["reward"] for row in runner.state.log_history if "reward" in row] == pytest.approx(logged)

    def test_a_sample_for_which_all_functions_return_none_has_no_score(self, tiny_llama, tmp_path):
        runner = self.train(tiny_llama, tmp_path, lambda completions, **_: [1.0] + [None] * (len(completions) - 1))
        assert {row["reward"] for row in runner.state.log_history if "reward" in row} == {1.0}
        with pytest.raises(RewardError, match="No reward function returned a number"):
            self.train(tiny_llama, tmp_path, lambda completions, **_: [None] * len(completions))


class TestTrainersByName:
    @pytest.mark.seed("E5")
    def test_steps_match_verl_train(self, tiny_overrides, tmp_path):
        from verl.config import load_config
        from verl.run.host import train
        from verl.trainer.rl_trainer import RLTrainer

        settings = [*tiny_overrides, "trainer.resume_mode=disable"]
        assert train(load_config([*settings, f"trainer.default_local_dir={tmp_path / 'a'}"])) == 0
        with RLTrainer([*settings, f"trainer.default_local_dir={tmp_path / 'b'}"]) as trainer:
            rows = [trainer.step(), trainer.step()]
            assert trainer.step() is None
        one, other = runs.Run(tmp_path / "a"), runs.Run(tmp_path / "b")
        assert other.repeatable == one.repeatable
        assert [row["training/global_step"] for row in rows] == [1, 2]
        assert (tmp_path / "b" / "summary.json").exists()

    @pytest.mark.seed("E4")
    def test_log_with(self, tiny_overrides, tmp_path):
        from verl.trainer import PPOTrainer

        settings = [*tiny_overrides, f"trainer.default_local_dir={tmp_path}"]
        assert PPOTrainer(settings, log_with="wandb").config.trainer.logger == ["file", "wandb"]
        with pytest.raises(ConfigError, match="no tracker 'tensorbord' for log_with"):
            PPOTrainer(settings, log_with="tensorbord")
