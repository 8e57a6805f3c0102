"""RLRunner in the place of TRL's classes: TRL's scripts in TRL's environment, and what they ask of a trainer."""

import itertools
import json
import re
import site
import subprocess
import threading
from types import SimpleNamespace

import pytest
from transformers import AutoModelForCausalLM, AutoTokenizer, TrainerCallback

from tests.compat.test_runner import SCRIPTS, rows, tokenizer, trl  # noqa: F401
from tests.house.source import ROOT
from tests.json_lines import write_lines
from tests.run.trl_oracle import peer_env, python_of
from verl import RLRunner
from verl.errors import ConfigError

TEMPLATE = (
    "{% for m in messages %}<|im_start|>{{ m['role'] }}\n{{ m['content'] }}<|im_end|>\n{% endfor %}"
    "{% if add_generation_prompt %}<|im_start|>assistant\n{% endif %}"
)


def asks(number):
    return [{"role": "user", "content": f"Say {number}."}]


def answers(text):
    return [{"role": "assistant", "content": text}]


ROWS = {
    "sft": lambda i: {"messages": asks(i) + answers(f"It is {3 * i}.")},
    "dpo": lambda i: {"prompt": asks(i), "chosen": answers(f"It is {i}."), "rejected": answers(f"No {7 * i}!")},
    "kto": lambda i: {"prompt": asks(i), "completion": answers(f"It is {i}."), "label": bool(i % 2)},
    "reward": lambda i: {"chosen": asks(i) + answers(f"It is {i}."), "rejected": asks(i) + answers(f"No {7 * i}!")},
    "grpo": lambda i: {"prompt": asks(i), "solution": str(i)},
    "rloo": lambda i: {"prompt": asks(i), "solution": str(i)},
}
PACKING = {f"sft {strategy}": strategy for strategy in ("bfd", "bfd_split", "wrapped")}
CLASSES = {name: f"{name.upper()}Trainer" for name in ROWS} | {"reward": "RewardTrainer"}
SAMPLES = "--num_generations 4 --max_completion_length 8 --reward_funcs think_format_reward".split()


@pytest.fixture
def chat_model(tiny_llama, tmp_path):
    folder = tmp_path / "model"
    AutoModelForCausalLM.from_pretrained(tiny_llama).save_pretrained(folder)
    chat = AutoTokenizer.from_pretrained(tiny_llama)
    chat.chat_template = TEMPLATE
    chat.save_pretrained(folder)
    return folder


def reward_model(folder):
    """The model with a head for one score, whose weights both sides read."""
    from transformers import AutoModelForSequenceClassification

    model = AutoModelForSequenceClassification.from_pretrained(folder, num_labels=1)
    model.config.pad_token_id = AutoTokenizer.from_pretrained(folder).pad_token_id
    model.save_pretrained(folder)


def run_script(python, command, history, folder, prints=""):
    """The history that a script writes in TRL's environment, with verl and what it needs behind TRL's packages."""
    code = f"import runpy, sys; sys.path += [{str(ROOT)!r}, *{site.getsitepackages()!r}]; sys.argv = sys.argv[1:]; "
    code += "runpy.run_path(sys.argv[0], run_name='__main__')"
    environment = peer_env.clean_environment() | {"HF_HUB_OFFLINE": "1", "HF_DATASETS_CACHE": str(folder / "cache")}
    done = subprocess.run(
        list(map(str, [python, "-c", code, *command])), env=environment, capture_output=True, text=True, timeout=580
    )
    assert not done.returncode, done.stderr[-3000:]
    assert prints in done.stdout
    return json.loads(history.read_text())


def test_the_page_has_each_script():
    page = (ROOT / "docs" / "coming-from-trl.md").read_text(encoding="utf-8")
    listed = dict(re.findall(r"^\| `(\w+)\.py` \| `(\w+)` \| (?:losses|runs)", page, re.MULTILINE))
    assert listed == CLASSES


@pytest.mark.slow
@pytest.mark.parametrize("name", [*ROWS, *PACKING])
def test_a_script_of_trl_with_its_class_replaced_has_its_losses(name, chat_model, tmp_path):
    python, script = python_of("trl"), name.split()[0]
    packs = ["--packing", "--packing_strategy", PACKING[name], "--max_length", "60"] if name in PACKING else []
    if script == "reward":
        reward_model(chat_model)
    (tmp_path / "data").mkdir()
    write_lines(tmp_path / "data" / "train.jsonl", [ROWS[script](i) for i in range(24)])
    common = (
        f"--model_name_or_path {chat_model} --dataset_name {tmp_path / 'data'} --per_device_train_batch_size 4 "
        "--max_steps 3 --learning_rate 1e-3 --lr_scheduler_type constant --logging_steps 1 --report_to none --use_cpu "
        "--save_strategy no --dtype float32 --bf16 False --gradient_checkpointing False"
    ).split() + packs
    histories = {}
    for side in ("trl", "verl"):
        file = tmp_path / f"{side}.json"
        more = ["--output_dir", str(tmp_path / side), *(SAMPLES if script in ("grpo", "rloo") else ())]
        command = [SCRIPTS / "trl_script.py", script, CLASSES[script], side, file, *common, *more]
        histories[side] = run_script(python, command, file, tmp_path, prints="Training completed.")
    assert len(histories["verl"]) == len(histories["trl"]) == 3
    for ours, theirs in zip(histories["verl"], histories["trl"], strict=True):
        if script not in ("grpo", "rloo"):  # whose samples are others
            assert float(ours["loss"]) == pytest.approx(float(theirs["loss"]), rel=1e-4)
            assert float(ours["grad_norm"]) == pytest.approx(float(theirs["grad_norm"]), rel=1e-3)


@pytest.mark.slow
def test_distillation_of_trl_has_its_losses(chat_model, tmp_path):
    """GKDTrainer on the answers of the rows; samples of its own differ."""
    python = python_of("trl")
    teacher = AutoModelForCausalLM.from_pretrained(chat_model)
    for parameter in teacher.parameters():
        parameter.data.mul_(1.5)
    teacher.save_pretrained(tmp_path / "teacher")
    write_lines(tmp_path / "rows.jsonl", [ROWS["sft"](i) for i in range(24)])
    histories = {}
    for side in ("trl", "verl"):
        more = [
            chat_model,
            tmp_path / "teacher",
            tmp_path / "rows.jsonl",
            side,
            tmp_path / f"{side}.json",
            tmp_path / side,
        ]
        histories[side] = run_script(python, [SCRIPTS / "gkd.py", *more], tmp_path / f"{side}.json", tmp_path)
    assert len(histories["verl"]) == len(histories["trl"]) == 3
    for ours, theirs in zip(histories["verl"], histories["trl"], strict=True):
        assert float(ours["loss"]) == pytest.approx(float(theirs["loss"]), rel=1e-4)
        assert float(ours["grad_norm"]) == pytest.approx(float(theirs["grad_norm"]), rel=1e-3)


@pytest.mark.parametrize(
    ("kind", "fields", "algorithm", "keys"),
    [
        ("KTOConfig", {"beta": 0.2, "undesirable_weight": 2.0}, "kto", {
            "preference.loss": "kto", "preference.beta": "0.2", "preference.undesirable_weight": "2.0",
            "data.train_on_line_end": "True",
        }),
        ("RewardConfig", {"center_rewards_coefficient": 0.01}, "reward", {
            "rm.center_rewards_coefficient": "0.01", "data.truncation": "error",
        }),
        ("RLOOConfig", {"num_generations": 2, "beta": 0.05}, "rloo", {
            "algorithm.adv_estimator": "rloo", "algorithm.use_kl_in_reward": "True", "algorithm.kl_ctrl.kl_coef": "0.05",
            "actor_rollout_ref.actor.loss_agg_mode": "seq-mean-token-sum", "actor_rollout_ref.rollout.n": "2",
        }),
    ],
)  # fmt: skip
def test_the_class_of_the_arguments_names_the_algorithm(trl, tiny_llama, tmp_path, kind, fields, algorithm, keys):  # noqa: F811
    args = getattr(trl, kind)(str(tmp_path), use_cpu=True, report_to="none", **fields)
    rewards = {"reward_funcs": lambda completions, **_: [0.0]} if algorithm == "rloo" else {}
    data = [ROWS[algorithm](i) for i in range(16)]
    runner = RLRunner(str(tiny_llama), args, train_dataset=data, quantization_config=None, **rewards)
    assert runner.algorithm == algorithm
    mapped = dict(text.split("=", 1) for text in runner._mapped.overrides())
    assert keys.items() <= mapped.items()


def test_what_scripts_of_trl_ask_of_a_trainer(trl, tiny_llama, tmp_path, rows, capsys, monkeypatch):  # noqa: F811
    args = trl.SFTConfig(
        str(tmp_path), use_cpu=True, report_to="none", push_to_hub=True, hub_model_id="me/it", eos_token="<|im_start|>"
    )
    args.model_init_kwargs = {"revision": "main", "trust_remote_code": False, "attn_implementation": None}
    runner = RLRunner(model=str(tiny_llama), args=args, train_dataset=rows, quantization_config=None, peft_config=None)
    assert runner.model.config.eos_token_id == runner.processing_class.convert_tokens_to_ids("<|im_start|>")
    runner.accelerator.print("done")
    runner.end()
    assert capsys.readouterr().out.endswith("done\n")
    pushed = []

    def push_to_hub(self, name, **settings):
        pushed.append((type(self).__name__, name, settings["commit_message"]))
        return SimpleNamespace(repo_url=SimpleNamespace(repo_id=name))

    monkeypatch.setattr(type(runner.model), "push_to_hub", push_to_hub)
    monkeypatch.setattr(type(runner.processing_class), "push_to_hub", push_to_hub)
    runner.push_to_hub(dataset_name="theirs")
    assert runner.hub_model_id == "me/it"
    assert [message for _, _, message in pushed] == ["End of training"] * 2


@pytest.mark.parametrize("name", ["null", "1e-4", " [a, b] ", "lr=1e-4 ${oc.env:HOME}", "a'b\\"])
def test_names_of_a_script_are_kept_as_they_are(trl, tiny_llama, tmp_path, rows, name):  # noqa: F811
    folder = tmp_path / f"{name} $HOME"
    args = trl.SFTConfig(str(folder), run_name=name, use_cpu=True, report_to="none", max_steps=1)
    trainer = RLRunner(str(tiny_llama), args, train_dataset=rows)._load({}).config.trainer
    assert (trainer.experiment_name, trainer.default_local_dir) == (name, str(folder))


def test_data_sets_of_a_script(trl, tiny_llama, tmp_path):  # noqa: F811
    """An endless one gives what max_steps takes, in its order; formatting_func gives texts."""
    args = trl.SFTConfig(
        str(tmp_path), use_cpu=True, report_to="none", max_steps=2, per_device_train_batch_size=3, save_strategy="no"
    )
    endless = ({"question": number} for number in itertools.count())
    runner = RLRunner(
        str(tiny_llama), args, train_dataset=endless, formatting_func=lambda row: f"Say {row['question']}."
    )
    assert runner.train_dataset == [{"text": f"Say {number}."} for number in range(6)]
    runner.train()
    assert [json.loads(line)["text"] for line in (runner.inputs / "train.jsonl").open()] == [
        f"Say {number}." for number in range(6)
    ]
    for name in ("train_dataset", "eval_dataset"):
        with pytest.raises(ConfigError, match=f"{name} has several data sets: a, b. Give one of them"):
            RLRunner(str(tiny_llama), args, **{name: {"a": [], "b": []}})


def test_a_run_in_another_thread_and_one_in_a_callback(trl, tiny_llama, tmp_path, rows):  # noqa: F811
    def runner(name, callbacks=()):
        settings = {"use_cpu": True, "report_to": "none", "max_steps": 2, "logging_steps": 1, "save_strategy": "no"}
        args = trl.SFTConfig(str(tmp_path / name), per_device_train_batch_size=4, **settings)
        return RLRunner(str(tiny_llama), args, train_dataset=rows, eval_dataset=rows[:4], callbacks=callbacks)

    class Evaluates(TrainerCallback):
        def on_step_end(self, args, state, control, **kwargs):
            other.evaluate()

    other = runner("other")
    runners = [runner("a", [Evaluates()]), runner("b")]
    threads = [threading.Thread(target=each.train) for each in runners]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    a, b = ([row["loss"] for row in each.state.log_history if "loss" in row] for each in runners)
    assert (len(a), a) == (2, b)
    assert len(other.state.log_history) == 2


def test_adapters_of_a_model_by_its_path(trl, tiny_llama, tmp_path, rows):  # noqa: F811
    peft = pytest.importorskip("peft")
    args = trl.SFTConfig(str(tmp_path), use_cpu=True, report_to="none", max_steps=1)

    def runner(reward_funcs=None, **settings):
        peft_config = peft.LoraConfig(r=4, target_modules="all-linear", task_type="CAUSAL_LM", **settings)
        return RLRunner(str(tiny_llama), args, train_dataset=rows, peft_config=peft_config, reward_funcs=reward_funcs)

    assert sum(p.requires_grad for p in runner().model.parameters()) > 0
    assert not all(p.requires_grad for p in runner().model.parameters())
    assert runner(lora_dropout=0.05)._load({}).config.model.lora_dropout == 0.05
    pairs = [{"prompt": "a", "chosen": "b", "rejected": "c"}] * 8
    args = trl.DPOConfig(str(tmp_path), use_cpu=True, report_to="none", max_steps=1)  # it turns dropout off
    dropped = peft.LoraConfig(r=4, target_modules="all-linear", task_type="CAUSAL_LM", lora_dropout=0.05)
    pair_runner = RLRunner(str(tiny_llama), args, train_dataset=pairs, peft_config=dropped)
    assert pair_runner._load({}).config.model.lora_dropout == 0
    args = trl.GRPOConfig(str(tmp_path), use_cpu=True, report_to="none", max_steps=1, num_generations=2)
    with pytest.raises(ConfigError, match=r"lora_dropout=0.05 .* Set lora_dropout=0 \(--lora_dropout 0\), or"):
        runner(lora_dropout=0.05, reward_funcs=[lambda completions, **_: [0.0] * len(completions)])


@pytest.mark.parametrize(("strategy", "blocks"), [("bfd", [[7], [4, 3]]), ("wrapped", [None, None])])
def test_packed_rows_are_blocks_of_trl(trl, tiny_llama, tmp_path, strategy, blocks):  # noqa: F811
    sequences = [{"input_ids": list(range(1, 1 + n)), "labels": [-100, *range(2, 1 + n)]} for n in (4, 8, 3)]
    args = trl.SFTConfig(
        str(tmp_path), use_cpu=True, report_to="none", max_steps=1, per_device_train_batch_size=1, max_length=7, packing=True,
        packing_strategy=strategy,
    )  # fmt: skip
    runner = RLRunner(str(tiny_llama), args, train_dataset=sequences, eval_dataset=sequences[:1])
    packed = runner.train_dataset
    assert [row.get("seq_lengths") for row in packed] == blocks  # without the last token, which nothing predicts
    assert all(len(row["input_ids"]) <= 7 for row in packed)
    loaded = runner._load({})
    assert loaded.config.data.train_batch_size == 1
    assert len(runner.eval_dataset) == 1
    with pytest.raises(ConfigError, match="RLRunner has no data_collator for packing=True"):
        RLRunner(str(tiny_llama), args, data_collator=lambda rows: rows[0], train_dataset=sequences)
    args.max_length = None
    with pytest.raises(ConfigError, match="Set max_length"):
        RLRunner(str(tiny_llama), args, train_dataset=sequences)


def test_what_a_script_of_trl_cannot_have(trl, tiny_llama, tmp_path, rows):  # noqa: F811
    args = trl.SFTConfig(str(tmp_path), use_cpu=True, report_to="none", eos_token="<nothing>")
    with pytest.raises(ConfigError, match="eos_token='<nothing>' is no token of this model's vocabulary"):
        RLRunner(str(tiny_llama), args, train_dataset=rows)
    args.eos_token = None
    for positional, named in (((len, args), {}), ((None, args), {}), ((None,), {"args": args})):  # as trainers of TRL
        with pytest.raises(ConfigError, match="Name the arguments behind"):
            RLRunner(str(tiny_llama), *positional, **named)
    with pytest.raises(ConfigError, match="RLRunner reads no argument tools"):
        RLRunner(str(tiny_llama), args, train_dataset=rows, tools=[len], rollout_func=None)
    with pytest.raises(ConfigError, match="RLRunner reads no quantization_config"):
        RLRunner(str(tiny_llama), args, train_dataset=rows, quantization_config={"load_in_4bit": True})
