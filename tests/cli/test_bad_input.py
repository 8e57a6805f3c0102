"""Bad input through the command line: a sentence with cause, place and fix, a code that is not 0, and nothing lost."""

import errno
import hashlib
import json
import shutil

import pytest

from tests.cli.conftest import make_row, overrides_of, write_task
from tests.json_lines import read_lines, write_lines
from tests.letters_task import write_reward
from tests.run.conftest import Run
from verl.cli.main import main

MODEL = "actor_rollout_ref.model.path"
LOSS_MODE = "actor_rollout_ref.actor.policy_loss.loss_mode"
PROGRAM = "algorithm.program"
SAMPLER = """from verl.experimental.dataset.sampler import AbstractSampler
class Mine(AbstractSampler):
    def __init__(self, data_source, data_config): pass
    def __iter__(self): return iter(range(1000, 1008))
    def __len__(self): return 8
"""
SCORED_BY = "reward.reward_model"
CLASSIFIER = {f"{SCORED_BY}.enable": True, "reward.custom_reward_function.path": None}
REWARD_PATH = "reward.custom_reward_function.path"
NUM_STEPS = 2
SETTINGS = {
    "trainer.save_freq": 1,
    "trainer.test_freq": -1,
    "trainer.val_before_train": False,
    "trainer.total_training_steps": NUM_STEPS,
}
LONGER = {**SETTINGS, "trainer.total_training_steps": NUM_STEPS + 1}


@pytest.fixture(scope="module")
def finished(tmp_path_factory, tiny_llama):
    """Run folder of two steps with their checkpoints."""
    task = write_task(tmp_path_factory.mktemp("finished"))
    assert main(["train", *overrides_of(task, tiny_llama, {"data.val_files": "[]", **SETTINGS})]) == 0
    return Run(task / "run")


@pytest.fixture
def earlier(finished, task):
    """The same in the run folder of this test."""
    shutil.copytree(finished.folder, task / "run")
    return Run(task / "run")


def contents(folder):
    """Digest of every file that a run leaves; its logs, its lock and its heartbeat may change."""
    passing = ("run.lock", "heartbeat.json")
    files = [f for f in folder.rglob("*") if f.is_file() and f.name not in passing]
    compared = [f for f in files if f.relative_to(folder).parts[0] != "logs"]
    return {str(f.relative_to(folder)): hashlib.sha256(f.read_bytes()).hexdigest() for f in compared}


def damage(folder, step):
    file = folder / f"global_step_{step}/actor/huggingface/model.safetensors"
    content = bytearray(file.read_bytes())
    content[-5] ^= 1
    file.write_bytes(content)


def bad_rows(task, number, **changes):
    rows = [make_row(i) for i in range(8)]
    rows[number] = make_row(number, **changes)
    return {"data.train_files": write_lines(task / "bad.jsonl", rows)}


def text(task, name, content, key, ending=""):
    (task / name).write_text(content)
    return {key: f"{task / name}{ending}"}


def classifier(task, model):
    folder = shutil.copytree(model, task / "classifier")
    settings = json.loads((folder / "config.json").read_text())
    (folder / "config.json").write_text(json.dumps({**settings, "architectures": ["LlamaForSequenceClassification"]}))
    return folder


def model_folder(task, model, change):
    folder = shutil.copytree(model, task / "model")
    change(folder)
    return {MODEL: folder}


def without_weights(folder):
    (folder / "model.safetensors").unlink()


def with_gguf(folder):
    (folder / "model.safetensors").rename(folder / "model.gguf")


def with_half_the_weights(folder):
    content = (folder / "model.safetensors").read_bytes()
    (folder / "model.safetensors").write_bytes(content[: len(content) // 2])


# name -> (overrides of a task folder and a model, exit code, words that the sentence must have)
CASES = {
    "unknown key": (lambda t, m: {"data.train_batch_sise": 4}, 2, ["data.train_batch_sise", "'data.train_batch_size'"]),
    "unread key": (
        lambda t, m: {"actor_rollout_ref.rollout.service.api": "vllm"}, 2, ["service.api=vllm", "not read", "rollout.name"],
    ),
    "wrong type": (lambda t, m: {"trainer.total_epochs": "many"}, 2, ["trainer.total_epochs", "whole number", "'many'"]),
    "unknown name": (lambda t, m: {"algorithm.adv_estimator": "grop"}, 2, ["'grop'", "did you mean 'grpo'"]),
    "missing file": (
        lambda t, m: {"data.train_files": t / "trian.jsonl"}, 3, ["trian.jsonl", "does not exist", "'train.jsonl'"],
    ),
    "file of another kind": (
        lambda t, m: text(t, "notes.jsonl", "some notes\n", "data.train_files"), 3, ["notes.jsonl", "line 1"],
    ),
    "row without a prompt": (lambda t, m: bad_rows(t, 5, prompt=None), 3, ["bad.jsonl", "row 5", "'prompt'", "prompt_key"]),
    "row without a reference": (
        lambda t, m: bad_rows(t, 6, reward_model=None), 3, ["bad.jsonl", "row 6", "'reward_model'", "ground_truth"],
    ),
    "row without a source": (lambda t, m: bad_rows(t, 7, data_source=None), 3, ["bad.jsonl", "row 7", "'data_source'"]),
    "long prompt": (
        lambda t, m: bad_rows(t, 3, prompt=[{"role": "user", "content": "word " * 100}]), 3,
        ["bad.jsonl", "row 3", "data.max_prompt_length=64", "filter_overlong_prompts=True", "data.truncation"],
    ),
    "failing template": (
        lambda t, m: text(
            t, "chat.jinja", "{{ raise_exception('roles must alternate') }}", "actor_rollout_ref.model.custom_chat_template",
        ), 3, ["train.jsonl", "row 0", "template", "roles must alternate"],
    ),
    "too few rows": (
        lambda t, m: {"data.train_batch_size": 16}, 2, ["data.train_batch_size=16", "8 rows that train", "Lower it"],
    ),
    "reward file missing": (lambda t, m: {REWARD_PATH: t / "gone.py"}, 5, ["gone.py", "does not exist"]),
    "reward function missing": (
        lambda t, m: {"reward.custom_reward_function.name": "compute_scroe"}, 5, ["reward.py", "did you mean 'compute_score'"],
    ),
    "reward signature": (
        lambda t, m: text(t, "two.py", "def compute_score(answer, truth): return 1.0\n", REWARD_PATH), 5,
        ["two.py", "(answer, truth)", "compute_score(data_source, solution_str, ground_truth"],
    ),
    "reward file not Python": (
        lambda t, m: text(t, "broken.py", "def compute_score(:\n", REWARD_PATH), 5, ["broken.py", "SyntaxError", "line 1"],
    ),
    "no scorer": (lambda t, m: {REWARD_PATH: None}, 5, ["'letters'", "custom_reward_function"]),
    "model missing": (lambda t, m: {MODEL: "/nowhere/model"}, 4, ["/nowhere/model", "does not exist"]),
    "model without weights": (
        lambda t, m: model_folder(t, m, without_weights), 4, ["/model has no weights", "download or convert"],
    ),
    "model in GGUF": (lambda t, m: model_folder(t, m, with_gguf), 4, ["model.gguf", "verl convert"]),
    "model cut short": (lambda t, m: model_folder(t, m, with_half_the_weights), 4, ["damaged", "again"]),
    "full disk": (
        lambda t, m: {"trainer.min_free_disk_gb": 1e6}, 6, ["trainer.min_free_disk_gb", "GB free", "default_local_dir"],
    ),
    "run folder is a file": (
        lambda t, m: {"trainer.default_local_dir": t / "val.jsonl"}, 2, ["val.jsonl", "cannot be written", "default_local_dir"],
    ),
    "samples to a file": (
        lambda t, m: {"trainer.rollout_data_dir": t / "val.jsonl"}, 2, ["rollout_data_dir", "val.jsonl is not a folder"],
    ),
    "held-out samples below a file": (
        lambda t, m: {"trainer.validation_data_dir": t / "val.jsonl/x"}, 2, ["validation_data_dir", "is not a folder that"],
    ),
    "traces below a file": (
        lambda t, m: {"global_profiler.save_path": t / "val.jsonl/x", "global_profiler.steps": "[1]"}, 2,
        ["global_profiler.save_path", "is not a folder that"],
    ),
    "a folder in place of a file": (
        lambda t, m: {"actor_rollout_ref.rollout.prometheus.file": t}, 2, ["prometheus.file", "is not a file that"],
    ),
    "program missing": (lambda t, m: {PROGRAM: f"{t}/mine.py:Mine"}, 2, ["mine.py", "does not exist"]),
    "no program": (
        lambda t, m: text(t, "mine.py", "class Mine: pass\n", PROGRAM, ":Mine"), 2,
        ["has no method", "verl.programs.api.Program"],
    ),
    "half a program": (
        lambda t, m: text(t, "half.py", "from verl.programs.api import *\nclass Mine(Program): pass\n", PROGRAM, ":Mine"), 2,
        ["half.py:Mine' has no method", "verl.programs.api.Program"],
    ),
    "estimator that is no function": (
        lambda t, m: text(t, "mine.py", "class Mine: pass\n", "algorithm.adv_estimator", ":Mine"), 2,
        ["mine.py:Mine' is no function"],
    ),
    "engine without the methods of one": (
        lambda t, m: text(t, "mine.py", "class Mine: pass\n", "actor_rollout_ref.rollout.name", ":Mine"), 2,
        ["rollout engine", "mine.py:Mine' has no method", "verl.rollout.api.RolloutEngine"],
    ),
    "loss with an argument that it does not get": (
        lambda t, m: text(t, "mine.py", "def loss(log_prob, foo): pass\n", LOSS_MODE, ":loss"), 2,
        ["mine.py:loss' has the signature (log_prob, foo)", "missing a required argument: 'foo'"],
    ),
    "reward model missing": (lambda t, m: {**CLASSIFIER, f"{SCORED_BY}.model_path": t / "none"}, 4, ["/none does not exist"]),
    "reward model without a head": (
        lambda t, m: {**CLASSIFIER, f"{SCORED_BY}.model_path": m}, 4, ["is a causal language model", "judge_template"],
    ),
    "judge's template missing": (
        lambda t, m: {**CLASSIFIER, f"{SCORED_BY}.model_path": m, f"{SCORED_BY}.judge_template": "none.txt"}, 2,
        ["judge_template none.txt does not exist"],
    ),
    "a reward without the reward model's score": (
        lambda t, m: {f"{SCORED_BY}.enable": True, f"{SCORED_BY}.model_path": classifier(t, m)}, 5,
        ["reward.py", "has no parameter 'reward_model_score'"],
    ),
    "rows of a class that takes other arguments": (
        lambda t, m: {
            "data.custom_cls.name": "Mine",
            **text(t, "rows.py", "class Mine(list):\n    def __init__(self, files): pass\n", "data.custom_cls.path"),
        }, 2, ["data.custom_cls: Mine has the signature (files)", "data_files=..."],
    ),
    "a reward manager that cannot be made": (
        lambda t, m: {
            "reward.reward_manager.source": "importlib", "reward.reward_manager.name": "Mine",
            **text(t, "mine.py", "class Mine:\n    def __call__(self, batch): pass\n", "reward.reward_manager.module.path"),
        }, 5, ["reward manager Mine cannot be made", "takes no arguments"],
    ),
    "a sampler of rows that do not exist": (
        lambda t, m: {"data.sampler.class_name": "Mine", **text(t, "order.py", SAMPLER, "data.sampler.class_path")}, 3,
        ["data.sampler: Mine gave row 1000; there are 8 rows"],
    ),
    "no such checkpoint": (
        lambda t, m: {"trainer.resume_mode": "resume_path", "trainer.resume_from_path": t / "run/global_step_9"}, 2,
        ["global_step_9", "resume_from_path"],
    ),
    "checkpoint of another algorithm": (
        lambda t, m: {"algorithm.adv_estimator": "gae"}, 6, ["global_step_2", "no critic", "resume_mode=disable"],
    ),
    "checkpoint without adapters": (
        lambda t, m: {"actor_rollout_ref.model.lora_rank": 4}, 6, ["global_step_2", "without LoRA", "lora_rank to 0"],
    ),
}  # fmt: skip


@pytest.mark.parametrize("name", CASES)
def test_a_sentence_before_anything_is_lost(name, verl, overrides, task, tiny_llama, earlier):
    changes, code, words = CASES[name]
    arguments = overrides({**LONGER, **changes(task, tiny_llama)})
    before = contents(earlier.folder)
    ended, said = verl("train", *arguments)
    assert ended == code, said
    sentence = said[said.index("verl train: ") :]
    assert all(word in sentence for word in words), sentence
    assert sentence.count("\n") == 1, sentence
    assert "Traceback" not in said
    ended, said = verl("check", *arguments)
    failed = [line for line in said.splitlines() if line.startswith("fail")]
    assert any(all(word in line for word in words) for line in failed), said
    assert ended == bool(failed)
    assert contents(earlier.folder) == before


@pytest.mark.parametrize("verb", ["eval", "generate"])
@pytest.mark.parametrize("name", ["unknown key", "reward signature", "model without weights"])
def test_the_other_verbs_say_the_same(name, verb, verl, overrides, task, tiny_llama):
    changes, code, words = CASES[name]
    output = ["--output", task / "samples.jsonl"] if verb == "generate" else []
    ended, said = verl(verb, *output, *overrides(changes(task, tiny_llama)))
    assert ended == code
    assert all(word in said for word in words), said


# -- harm that only a running step can meet ------------------------------------------------------------------------------


HARM = {
    "not a number": ("float('nan')", "nan"),
    "raises": ("1 / 0", "ZeroDivisionError"),
    "ends its process": ("__import__('os')._exit(3)", "exit code 3"),
}


@pytest.mark.parametrize("harm", HARM)
def test_a_scorer_that_fails_costs_its_samples_only(harm, verl, overrides, task):
    expression, cause = HARM[harm]
    write_reward(task, f"return 1.0 if int(ground_truth) % 2 else {expression}")
    said = verl.ends(0, "train", *overrides({**SETTINGS, "reward.debug": False}), "reward.default_score=0")
    assert cause in said
    assert "gets the default score 0" in said
    run = Run(task / "run")
    samples = [sample for file in run.folder.glob("samples/train/*") for sample in read_lines(file)]
    assert len(samples) == NUM_STEPS * 4 * 2
    assert all(s["score"] == int(s["ground_truth"]) % 2 for s in samples)
    assert sum(row["reward/num_defaulted"] for row in run.training_rows()) == sum(s["score"] == 0 for s in samples)


def test_a_disk_that_fills_while_a_checkpoint_is_written(verl, overrides, task, finished):
    resource = pytest.importorskip("resource")
    soft, hard = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(
        resource.RLIMIT_FSIZE, (200_000, hard)
    )  # the only refusal of the file system that a test can cause
    try:
        code, said = verl("train", *overrides(SETTINGS))
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, (soft, hard))
    assert code == 6, said
    assert "Checkpoint 1 could not be saved" in said
    assert "run the same command again" in said
    assert not list((task / "run").glob("*global_step*"))
    assert_goes_on(verl, overrides, task, finished)


def test_a_disk_that_fills_while_a_row_is_written(verl, overrides, task, finished, monkeypatch):
    from verl.tracking import tracker

    def append(path, rows, real=tracker.append_rows):
        if rows[0]["step"] == 2:
            raise OSError(errno.ENOSPC, "No space left on device", str(path))
        real(path, rows)

    with monkeypatch.context() as disk:
        disk.setattr(tracker, "append_rows", append)
        code, said = verl("train", *overrides(SETTINGS))
    assert code == 1
    assert "metrics.jsonl failed: No space left on device. Free some space, and run the same command again." in said
    assert "Traceback" not in said
    assert_goes_on(verl, overrides, task, finished)


def assert_goes_on(verl, overrides, task, finished):
    """The same command again, with free space, ends with the result of the unbroken run."""
    verl.ends(0, "train", *overrides(SETTINGS))
    assert Run(task / "run").repeatable == finished.repeatable


# -- resuming --------------------------------------------------------------------------------------------------------------


def test_when_all_are_damaged_nothing_is_started_over_them(verl, overrides, earlier):
    for step in (1, 2):
        damage(earlier.folder, step)
    before = contents(earlier.folder)
    verl.ends(6, "train", *overrides(LONGER), words=["No checkpoint in", "set trainer.resume_mode=disable"])
    assert contents(earlier.folder) == before
    assert verl("check", *overrides(LONGER))[0] == 1


def test_a_new_start_sets_the_records_of_the_earlier_run_aside(verl, overrides, earlier):
    metrics = earlier.folder.joinpath("metrics.jsonl").read_text()
    said = verl.ends(0, "train", *overrides({**SETTINGS, "trainer.resume_mode": "disable"}))
    (aside,) = [folder for folder in earlier.folder.glob("superseded_*") if (folder / "metrics.jsonl").exists()]
    assert str(aside) in said
    assert (aside / "metrics.jsonl").read_text() == metrics
    assert {p.name for p in aside.iterdir()} >= {"config.yaml", "summary.json", "samples"}
    assert [row["step"] for row in earlier.rows] == [1, 2]


# -- files that the other verbs must not destroy -----------------------------------------------------------------------------


def test_generate_replaces_its_file_only_when_it_is_whole(verl, overrides, task):
    output = task / "samples.jsonl"
    output.write_text("samples of yesterday\n")
    code, said = verl("generate", "--output", output, *overrides({"data.max_response_length": 5000}))
    assert code == 4
    assert "max_position_embeddings (1024)" in said
    assert "data.max_response_length" in said
    assert output.read_text() == "samples of yesterday\n"


def test_export_of_a_damaged_run_makes_nothing(verl, earlier, task):
    for step in (1, 2):
        damage(earlier.folder, step)
    code, said = verl("export", earlier.folder, task / "out")
    assert code == 6
    assert "is damaged (global_step_2: actor/huggingface/model.safetensors" in said
    assert verl("export", earlier.folder, task / "out", "--step=1")[0] == 6
    assert not (task / "out").exists()


@pytest.mark.parametrize("model", ["./missing", "nobody/has-this"])
def test_a_model_that_is_missing_is_refused_before_a_page_has_an_address(model, tmp_path, monkeypatch, capsys):
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("HF_HUB_OFFLINE", "1")
    assert main(["sft", f"model.path={model}", "data.train_files=rows.jsonl", "trainer.page.enable=True"]) == 4
    said = capsys.readouterr().err
    assert "model folder" in said
    assert "page:" not in said


def test_a_prompt_of_a_command_is_named_by_its_number(tiny_llama, capsys):
    assert main(["generate", str(tiny_llama), "--prompt", "hi", "--prompt", ""]) == 3
    assert "verl generate: --prompt 1 (counted from 0): field 'prompt' is an empty text" in capsys.readouterr().err
