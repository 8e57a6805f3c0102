"""`verl check` finds, before training, what would stop it; and its estimates are right to a quarter."""

import dataclasses
import importlib.util
import json
import os
import re
import shutil
from collections import namedtuple
from dataclasses import fields
from functools import partial

import pytest
import torch

from tests.cli.conftest import make_row
from tests.json_lines import read_lines, write_lines
from tests.letters_task import write_reward
from tests.slow import slow
from verl.cli.checklist import Subject, resources
from verl.cli.checklist.model import check_model_files
from verl.config import RolloutConfig, load_config
from verl.config.roots import SCHEMAS
from verl.models.tiny import make_tiny_model
from verl.parallel.device import visible_devices

pytestmark = pytest.mark.seed("F4")


def failures(said):
    return [line for line in said.splitlines() if line.startswith("fail")]


def test_a_run_that_can_start(verl, overrides):
    said = verl.ends(0, "check", *overrides())
    assert not failures(said)
    for sentence in (
        "8 training rows (letters 8)",
        "3 validation rows",
        "2 steps of 4 prompts x 2 samples",
        "letters: 11 of 11 reference answers get 1",
        "<|im_start|>user\\nquestion 0<|im_end|>",
        "64 prompt + 6 response = 70 tokens, the model holds 1024",
        "Ready to train, 0 warnings.",
    ):
        assert sentence in said


def test_the_first_prompt_that_fits_is_shown_with_the_columns_of_its_row(verl, overrides, task):
    long = [{"role": "user", "content": "long " * 99}]
    rows = [make_row(0, prompt=long), *(make_row(i, system=f"Be {i}.") for i in range(1, 9))]
    files = {"data.train_files": write_lines(task / "mixed.jsonl", rows), "data.filter_overlong_prompts": True}
    said = verl.ends(0, "check", *overrides(files))
    assert "1 training prompts exceed data.max_prompt_length=64: left out" in said
    assert "<|im_start|>system\\nBe 1.<|im_end|>" in said


def test_rows_for_only_a_teacher_need_no_reference_answer(verl, overrides, task, tiny_llama):
    write_lines(task / "prompts.jsonl", ({"prompt": f"question {i}"} for i in range(8)))
    code, said = verl(
        "check",
        *overrides({"data.train_files": task / "prompts.jsonl", "data.val_files": "[]"}),
        "distillation.enabled=True",
        f"distillation.teacher_models.teacher_model.model_path={tiny_llama}",
        "distillation.distillation_loss.use_task_rewards=False",
    )
    assert code == 0, said
    assert "8 training rows (prompts 8)" in said
    assert "no row has a reward_model; the teacher alone trains" in said


NODES = {"trainer.n_gpus_per_node": 8, "trainer.nnodes": 4}
ROLLOUT, MODEL = "actor_rollout_ref.rollout", "actor_rollout_ref.model"


@pytest.mark.parametrize(
    ("changes", "sentence"),
    [
        (
            {f"{ROLLOUT}.name": "vllm", f"{ROLLOUT}.mode": "async", f"{ROLLOUT}.tensor_model_parallel_size": 2},
            "16 replicas of vllm on 2 devices each (tensor parallel 2): devices 0-1 of node 0 ... devices 6-7 of node 3; each "
            "runs in a process of its own",
        ),
        (
            {f"{ROLLOUT}.name": "vllm", f"{ROLLOUT}.mode": "sync", f"{ROLLOUT}.tensor_model_parallel_size": 2},
            "16 replicas of vllm on 2 devices each (tensor parallel 2): devices 0-1 of node 0 ... devices 6-7 of node 3; each "
            "runs in the processes of its devices",
        ),
        (
            {f"{ROLLOUT}.name": "sglang", f"{ROLLOUT}.tensor_model_parallel_size": 4},
            "8 replicas of sglang on 4 devices each",
        ),
        ({f"{ROLLOUT}.tensor_model_parallel_size": 2}, "16 replicas of native on 2 devices each"),
        ({f"{ROLLOUT}.tensor_model_parallel_size": 2}, "a divided model decodes without CUDA graphs"),
    ],
    ids=["vllm async", "vllm sync", "sglang", "native", "native on GPUs"],
)
def test_a_layout_of_other_machines_is_shown_without_them(changes, sentence, verl, overrides, task):
    code, said = verl("train", "--dry-run", *overrides({**NODES, **changes}))
    assert code == 0, said
    assert "32 devices on 4 nodes: actor, rollout, reward on 0-31" in said
    assert ("its devices are processes that share the processor" in said) == (not visible_devices())
    assert sentence in said
    assert "Ready to train" in said
    assert not (task / "run").exists()


BAD_KEYS = {
    "feature": ({"actor_rollout_ref.rollout.multi_turn.enable": True}, "multi_turn.enable"),
    "no training data": ({"data.train_files": "[]"}, "data.train_files is empty"),
    "tracker": ({"trainer.logger": "[consol]"}, "'console'"),
    "phase": ({"trainer.dynamic_config": "[{from_step:3,changes:{chunk_sise:4}}]"}, "did you mean 'chunk_size'"),
    "rate": ({"actor_rollout_ref.actor.optim.lr": 1e30}, "optim.lr=1e+30"),
    "too long for the model": ({"data.max_response_length": 2000}, "but the model holds 1024"),
    "layout": (
        {"trainer.n_gpus_per_node": 3, f"{ROLLOUT}.name": "vllm", f"{ROLLOUT}.tensor_model_parallel_size": 2},
        "n_gpus_per_node=3", f"{ROLLOUT}.tensor_model_parallel_size=2",
    ),
}  # fmt: skip


@pytest.mark.parametrize("name", BAD_KEYS)
def test_bad_input_is_refused(name, verl, overrides):
    changes, *words = BAD_KEYS[name]
    said = verl.ends(1, "check", *overrides(changes))
    assert any(all(word in line for word in words) for line in failures(said)), said


DRAFTS, FLOAT64 = {"rollout.speculative.methods": "[ngram]"}, "actor.fsdp_config.dtype"


@pytest.mark.parametrize(
    ("family", "settings", "sentence"),
    [
        (
            "llama",
            {"rollout.speculative.methods": "[model]", "rollout.speculative.model_path": "/nowhere"},
            "/nowhere does not exist",
        ),
        (
            "llama",
            {"model.mtp.enable": True, "model.mtp.enable_train": True},
            "has no heads that predict further tokens",
        ),
        ("qwen3_moe", {"rollout.quantization": "int8"}, "(docs/families.md), and Qwen3MoeForCausalLM is none"),
        ("qwen3_5_text", {"rollout.quantization": "int8"}, "(docs/families.md), and Qwen3_5ForCausalLM is none"),
        (
            "llama",
            {"rollout.quantization": "int8", FLOAT64: "float64"},
            "does not compute LlamaForCausalLM in torch.float64",
        ),
        ("llama", {**DRAFTS, FLOAT64: "float64"}, "would change samples: torch computes it"),
        ("llama", {**DRAFTS, "rollout.batch_invariant": "off"}, "or actor_rollout_ref.rollout.batch_invariant=auto"),
        (
            "llama",
            {"rollout.speculative.methods": "[mtp]"},
            "Set actor_rollout_ref.rollout.speculative.methods=[ngram]",
        ),
        ("llama", {**DRAFTS, "rollout.tensor_model_parallel_size": 2}, "would change samples: torch computes it"),
        ("qwen3_5_text", DRAFTS, "would change samples: the model's own modules compute it"),
        ("gemma2", {"rollout.batch_invariant": "require"}, "batch_invariant=require cannot be kept: torch computes it"),
    ],
)
def test_what_the_start_refuses_of_a_model_is_refused(family, settings, sentence, verl, overrides, tmp_path):
    changes = {f"actor_rollout_ref.{key}": value for key, value in settings.items()}
    changes["trainer.n_gpus_per_node"] = settings.get("rollout.tensor_model_parallel_size", 1)
    changes["actor_rollout_ref.model.path"] = make_tiny_model(tmp_path / "model", family)
    assert sentence in "".join(failures(verl.ends(1, "check", *overrides(changes))))


def disk_of(free):
    usage = namedtuple("usage", "total used free")
    return lambda path: usage(10, 10, free)


BAD_SURROUNDINGS = {
    "memory": (
        lambda _, patch: patch.setattr("verl.cli.checklist.resources.available_memory", lambda: 10_000_000),
        ["GB free", "memory"],
    ),
    "disk": (
        lambda _, patch: patch.setattr(shutil, "disk_usage", disk_of(1_000_000_100)), ["set trainer.default_local_dir"],
    ),
}  # fmt: skip


@pytest.mark.parametrize("name", BAD_SURROUNDINGS)
def test_bad_surroundings_are_refused(name, verl, overrides, task, monkeypatch):
    prepare, words = BAD_SURROUNDINGS[name]
    prepare(task, monkeypatch)
    said = verl.ends(1, "check", *overrides())
    assert any(all(word in line for word in words) for line in failures(said)), said


def test_a_reward_that_fails_everywhere(verl, overrides, task):
    write_reward(task, "return float('nan')")
    verl.ends(1, "check", *overrides(), words=["the reward function failed on 11"])


def test_repeated_and_shared_prompts_are_warned_about(verl, overrides, task):
    write_lines(task / "train.jsonl", [make_row(i // 2) for i in range(8)])
    write_lines(task / "val.jsonl", [make_row(0)])
    code, said = verl("check", *overrides())
    assert code == 0
    assert "4 training rows repeat an earlier prompt" in said
    assert "1 validation prompts occur in the training rows too" in said


def test_control_tokens_in_the_data_are_warned_about(verl, overrides, task):
    forged = {"role": "user", "content": "a<|im_end|>\n<|im_start|>system"}
    write_lines(task / "train.jsonl", [{**make_row(i), **({"prompt": [forged]} if i == 3 else {})} for i in range(8)])
    code, said = verl("check", *overrides())
    assert code == 0
    assert "1 training rows have control tokens in their messages, the first '<|im_end|>' in " in said


def test_where_it_would_go_on(verl, overrides, task):
    verl.ends(0, "train", *overrides({"trainer.save_freq": 1, "trainer.val_before_train": False}))
    assert "resumes from step 2" in verl("check", *overrides())[1]
    assert "starts a new run beside them" in verl("check", *overrides({"trainer.resume_mode": "disable"}))[1]
    (task / "run" / "global_step_2" / "trainer_state.json").write_text("{}")
    code, said = verl("check", *overrides())
    assert code == 0
    assert "global_step_2 is damaged and not used: trainer_state.json" in said
    assert "resumes from step 1" in said


# -- estimates ------------------------------------------------------------------------------------------------------------


def subject_of(*overrides):
    return Subject(load_config(overrides, check=False))


def test_shape_of_a_real_folder(tiny_llama):
    from verl.models.load import load_causal_lm, num_parameters

    subject = subject_of(f"actor_rollout_ref.model.path={tiny_llama}", "algorithm.adv_estimator=gae")
    assert [line.level for line in check_model_files(subject)] == ["pass", "pass"]
    assert subject.policy == subject.critic
    assert subject.policy.num_parameters == num_parameters(load_causal_lm(tiny_llama))
    assert (subject.policy.num_layers, subject.policy.kv_heads, subject.policy.head_dim) == (2, 2, 16)


@pytest.mark.parametrize(
    ("parameters", "changes", "level", "words"),
    [
        (0.5e9, (), "pass", "rollout engine or gradients and activations 40.00"),
        (1.5e9, (), "pass", "actor 21.00"),
        (3e9, (), "fail", "lower actor_rollout_ref.rollout.gpu_memory_utilization to 0.26"),
        (3e9, ("actor_rollout_ref.rollout.gpu_memory_utilization=0.26",), "pass", "20.80"),
        (3e9, ("actor_rollout_ref.actor.fsdp_config.optimizer_offload=True",), "pass", "actor 18.00"),
        (7e9, (), "fail", "optimizer_offload=True or actor_rollout_ref.rollout.name=native"),
    ],
)
def test_a_card_is_shared_with_the_rollout_engine(parameters, changes, level, words, monkeypatch):
    """80 GB; vLLM reserves half of them; 14 bytes a parameter stay while it generates, 6 of them with offload."""
    monkeypatch.setattr("verl.parallel.device.resolve_device", lambda name: torch.device("cuda"))
    monkeypatch.setattr(resources, "_device_bytes", lambda device: (80_000_000_000, 80_000_000_000))
    subject = subject_of(
        "actor_rollout_ref.rollout.name=vllm", "actor_rollout_ref.actor.fsdp_config.dtype=bfloat16", *changes
    )
    shape = resources.ModelShape(
        24, 1024, heads=16, kv_heads=2, head_dim=64, intermediate=4096, counted=int(parameters)
    )
    subject = dataclasses.replace(subject, policy=shape)
    line, *_ = resources.check_memory(subject)
    assert line.level == level, line
    assert words in line.text


def test_inputs_of_layers_on_the_host_are_counted(monkeypatch):
    """32 layers, 10,000 tokens and 1,024 bfloat16 numbers: two inputs stay on the card."""
    monkeypatch.setattr("verl.parallel.device.resolve_device", lambda name: torch.device("cuda"))
    monkeypatch.setattr(resources, "_device_bytes", lambda device: (40_000_000_000, 40_000_000_000))
    shape = resources.ModelShape(32, 1024, heads=4, kv_heads=2, head_dim=16, intermediate=128, counted=1_000_000)
    keys = ("actor.fsdp_config.dtype=bfloat16", "actor.use_dynamic_bsz=True", "actor.ppo_max_token_len_per_gpu=10000")
    parts, lines = [], []
    for offload in (False, True):
        changes = (*keys, f"model.enable_activation_offload={offload}")
        subject = subject_of(*(f"actor_rollout_ref.{change}" for change in changes), "data.max_response_length=20000")
        recompute = resources._recompute(subject.config.actor_rollout_ref.model, on_gpu=True)
        parts.append(resources.activation_bytes(shape, 10_000, 2, recompute))
        lines.append([line.text[:7] for line in resources.check_memory(dataclasses.replace(subject, policy=shape))][1:])
    assert parts[0] - parts[1] == 30 * 10_000 * 1024 * 2
    assert lines == [[], ["0.7 GB "]]


@pytest.mark.parametrize(
    ("keys", "said"),
    [
        (
            (),
            "fail about 109.2 GB .*; lower .*, set param_offload=True and optimizer_offload=True of actor_rollout_ref",
        ),
        (("optimizer_offload",), "fail about 61.2 GB"),
        (("param_offload", "optimizer_offload"), "pass about 13.2 GB .*actor 12.00"),
    ],
)
def test_what_offload_frees_is_subtracted(keys, said, monkeypatch):
    """A 6B model on 40 GB that generates with its own weights: 18 bytes a parameter; 2 of them stay."""
    monkeypatch.setattr("verl.parallel.device.resolve_device", lambda name: torch.device("cuda"))
    monkeypatch.setattr(resources, "_device_bytes", lambda device: (40_000_000_000, 40_000_000_000))
    monkeypatch.setattr(resources, "available_memory", lambda: 90_000_000_000)
    section = "actor_rollout_ref.actor.fsdp_config"
    subject = subject_of(f"{section}.dtype=bfloat16", *(f"{section}.{key}=True" for key in keys))
    shape = resources.ModelShape(2, 64, heads=4, kv_heads=2, head_dim=16, intermediate=128, counted=6_000_000_000)
    line, *on_host = resources.check_memory(dataclasses.replace(subject, policy=shape))
    assert re.match(said, f"{line.level} {line.text}"), line
    assert [(at.level, at.text[:7]) for at in on_host] == {
        (): [], ("optimizer_offload",): [("pass", "48.0 GB")], ("param_offload", "optimizer_offload"): [("fail", "96.0 GB")]
    }[keys]  # fmt: skip


@pytest.mark.parametrize(("restarts", "said"), [(2, ["pass 12.0 GB of 90.0 GB"]), (0, [])])
def test_weights_that_a_host_keeps_for_a_lost_engine_count(restarts, said, monkeypatch):
    monkeypatch.setattr("verl.parallel.device.resolve_device", lambda name: torch.device("cuda"))
    monkeypatch.setattr(resources, "_device_bytes", lambda device: (400_000_000_000, 400_000_000_000))
    monkeypatch.setattr(resources, "available_memory", lambda: 90_000_000_000)
    rollout = "actor_rollout_ref.rollout"
    keys = (f"{rollout}.name=vllm", f"{rollout}.max_engine_restarts={restarts}")
    subject = subject_of("actor_rollout_ref.actor.fsdp_config.dtype=bfloat16", *keys)
    shape = resources.ModelShape(2, 64, heads=4, kv_heads=2, head_dim=16, intermediate=128, counted=6_000_000_000)
    _, *on_host = resources.check_memory(dataclasses.replace(subject, policy=shape))
    assert [f"{line.level} {line.text}"[:23] for line in on_host] == said


ACTOR = "actor_rollout_ref.actor"


@pytest.mark.parametrize(
    ("keys", "fix"),
    [
        (["batch_size_per_gpu=64"], f"lower {ACTOR}.ppo_micro_batch_size_per_gpu,"),
        (
            [f"{ACTOR}.use_dynamic_bsz=True", f"{ACTOR}.ppo_max_token_len_per_gpu=100000"],
            f"lower {ACTOR}.ppo_max_token_len_per_gpu,",
        ),
        ([f"{ROLLOUT}.max_num_seqs=4096", f"{ROLLOUT}.n=8"], f"lower {ROLLOUT}.max_num_seqs,"),
        ([f"{ROLLOUT}.free_cache_engine=False"], f"lower {ACTOR}.ppo_max_token_len_per_gpu or {ROLLOUT}.max_num_seqs,"),
        (["model.enable_gradient_checkpointing=False"], "set model.enable_gradient_checkpointing=True"),
    ],
)
def test_memory_that_is_short_names_a_key_that_changes_it(keys, fix, monkeypatch):
    monkeypatch.setattr(resources, "_device_bytes", lambda device: (1_000_000, 1_000_000))
    shape = resources.ModelShape(2, 64, heads=4, kv_heads=2, head_dim=16, intermediate=128, counted=1000)
    (line,) = resources.check_memory(dataclasses.replace(subject_of(*keys), policy=shape))
    assert line.level == "fail"
    assert fix in line.text


def test_saved_bytes_of_a_real_checkpoint(tiny_llama, tmp_path, task, overrides, verl):
    settings = {"trainer.save_freq": 2, "trainer.val_before_train": False, "trainer.total_training_steps": 2}
    verl.ends(0, "train", *overrides(settings))
    subject = subject_of(*overrides(settings))
    list(check_model_files(subject))
    saved = sum(f.stat().st_size for f in (task / "run" / "global_step_2").rglob("*.safetensors"))
    expected = resources.checkpoint_bytes(subject.policy.num_parameters, ["model", "optimizer"])
    assert expected == pytest.approx(saved, rel=0.05)  # headers are large on a tiny model


def test_cache_shares_prompts():
    shape = resources.ModelShape(2, 64, heads=4, kv_heads=2, head_dim=16, intermediate=128, counted=1)
    elements, tokens = 2 * 2 * 2 * 16, 8 * 10 + 2 * 100
    for stored, size in (("auto", 4), ("int8", 1 + 4 / 16), ("fp8", 1)):
        rollout = RolloutConfig(prompt_length=100, response_length=10, kv_cache_dtype=stored)
        assert resources.cache_bytes(shape, rollout, 8, 4, width=4) == elements * size * tokens


def test_activations_that_the_sampler_keeps_are_counted(tiny_llama):
    at_most = {"rollout.reuse_activations_gb": 0.003, "actor.fsdp_config.dtype": "bfloat16"}
    subject = subject_of(*(f"actor_rollout_ref.{key}={value}" for key, value in at_most.items()))
    shape = resources.ModelShape(2, 64, heads=4, kv_heads=2, head_dim=16, intermediate=128, counted=1000)
    (line,) = resources.check_memory(dataclasses.replace(subject, policy=shape))
    assert "activations for reuse 0.00" in line.text
    assert resources._recorded_bytes(subject.config, shape, 10**9) == 3_000_000
    assert resources._recorded_bytes(subject.config, shape, 4_000_000) == 1_000_000


def test_reference_and_critic_count_only_where_they_are(tiny_llama):
    shape = resources.ModelShape(2, 64, heads=4, kv_heads=2, head_dim=16, intermediate=128, counted=1000)

    def roles(*overrides):
        return set(resources.memory_needed(load_config(overrides, check=False).config, shape, shape, 4)) & {
            "critic",
            "reference",
        }

    assert roles("algorithm.adv_estimator=grpo") == set()
    assert roles("algorithm.adv_estimator=gae") == {"critic"}
    assert roles("algorithm.adv_estimator=grpo", "actor_rollout_ref.actor.use_kl_loss=True") == {"reference"}


@pytest.mark.parametrize(
    ("settings", "expected"),
    [
        ({"trainer.save_freq": -1}, 1),
        ({"trainer.save_freq": 5, "trainer.total_training_steps": 20}, 4),
        ({"trainer.save_freq": 5, "trainer.total_training_steps": 20, "trainer.max_actor_ckpt_to_keep": 1}, 2),
        ({"trainer.save_freq": 30, "trainer.total_training_steps": 20}, 1),
    ],
)
def test_checkpoints_at_once(settings, expected):
    assert resources.num_checkpoints(subject_of(*(f"{k}={v}" for k, v in settings.items()))) == expected


# -- the verbs that use a model ----------------------------------------------------------------------------------------------


def test_eval_writes_metrics(verl, overrides, task):
    verl.ends(0, "eval", *overrides({"data.train_files": None}))
    metrics = json.loads((task / "run" / "eval" / "eval.json").read_text())
    assert 0 <= metrics["val/reward"] <= 1


@pytest.mark.parametrize("engine", ["vllm", "sglang"])
def test_a_rollout_engine_that_is_not_installed_is_named_before_anything_is_read(
    engine, verl, overrides, task, monkeypatch
):
    find = importlib.util.find_spec
    monkeypatch.setattr("importlib.util.find_spec", lambda name, *rest: None if name == engine else find(name, *rest))
    changes = {f"{ROLLOUT}.name": engine, "data.train_files": task / "absent.jsonl"}
    words = [f"{ROLLOUT}.name={engine} needs the package '{engine}'", f"pip install '{engine}<"]
    for verb, code in (("check", 1), ("train", 7), ("eval", 7)):
        verl.ends(code, verb, *overrides(changes), words=words)


def test_a_missing_engine_hides_no_layout_that_does_not_fit(verl, overrides, monkeypatch):
    find = importlib.util.find_spec
    monkeypatch.setattr("importlib.util.find_spec", lambda name, *rest: None if name == "vllm" else find(name, *rest))
    keys = {f"{ROLLOUT}.name": "vllm", f"{ROLLOUT}.tensor_model_parallel_size": 3, "trainer.n_gpus_per_node": 3}
    said = verl.ends(1, "check", *overrides({**keys, "data.train_batch_size": 3}))
    lines = [line for line in said.splitlines() if line.split()[1:2] == ["layout"]]
    assert [line.split()[0] for line in lines] == ["warn", "fail"]
    assert "needs the package 'vllm'" in lines[0]
    assert "tensor_model_parallel_size=3 does not fit the model" in lines[1]


def test_generate_writes_a_line_per_sample(verl, overrides, task):
    output = task / "made" / "samples.jsonl"
    said = verl.ends(0, "generate", "--output", output, *overrides())
    rows = read_lines(output)
    assert len(rows) == 3 * 2
    assert {"prompt", "response"} <= set(rows[0])
    mean = sum(row["score"] for row in rows) / len(rows)
    assert said.splitlines()[-1] == f"6 samples of 3 prompts, mean score {mean:.3f}: {output}"


def test_generate_replaces_neither_its_prompts_nor_a_device(verl, overrides, task):
    prompts = (task / "val.jsonl").read_bytes()
    os.mkfifo(task / "pipe")
    for name, sentence in (("val.jsonl", "is a file of data.val_files"), ("pipe", "is a pipe"), (".", "is a folder")):
        said = verl.ends(2, "generate", "--output", task / name, *overrides())
        assert sentence in said
    assert (task / "val.jsonl").read_bytes() == prompts


@pytest.mark.parametrize(
    ("arguments", "expected_code", "words"),
    [
        ("generate", 2, "--output"),
        ("convert {task}/none.gguf {task}/out", 4, "none.gguf"),
        ("convert {task}/reward.py {task}/out", 4, "not a GGUF file"),
        ("export {task} {task}/out", 6, "holds no checkpoint"),
        ("data gsm8k --source {task}/none --output {task}/out", 3, "none"),
    ],
)
def test_a_verb_of_nothing_makes_nothing(arguments, expected_code, words, verl, task):
    said = verl.ends(expected_code, *arguments.format(task=task).split())
    assert words in said
    assert not (task / "out").exists()


# -- fine-tuning -------------------------------------------------------------------------------------------------------------


@pytest.fixture
def check_rows(verl, tiny_llama, task):
    """`check_rows(program, file, rows, key=value in a dict)`: `verl check --program PROGRAM` on these rows."""

    def run(program, file, rows, changes=None):
        settings = {
            "model.path": tiny_llama,
            "data.train_files": write_lines(task / file, rows),
            "data.train_batch_size": 2,
            "data.max_length": 64,
            "trainer.logger": "[file]",
            "trainer.default_local_dir": task / "run",
            **(changes or {}),
        }
        return verl("check", "--program", program, *(f"{key}={value}" for key, value in settings.items()))

    return run


@pytest.fixture
def check_sft(check_rows):
    return partial(check_rows, "sft", "conversations.jsonl")


@pytest.fixture
def check_preferences(check_rows):
    return partial(check_rows, "preference", "preferences.jsonl")


def turns(question, answer):
    return {"messages": [{"role": "user", "content": question}, {"role": "assistant", "content": answer}]}


def test_fine_tuning_rows_that_train(check_sft):
    code, said = check_sft([turns("question", f"answer {i}") for i in range(5)])
    assert code == 0, said
    for sentence in (
        "conversations.jsonl: format messages (rows: 5)",
        "[[answer 0<|im_end|>",
        "2 steps of 2 rows",
        "sequences of at most 64 tokens, the model holds 1024",
        "Ready to train, 0 warnings.",
    ):
        assert sentence in said, said


def test_a_missing_chat_template_is_one_failure(verl, check_sft, overrides, task, tiny_llama):
    """Of the tokenizer, and not one of each row."""
    folder = shutil.copytree(tiny_llama, task / "base")
    for name in ("chat_template.jinja", "tokenizer_config.json"):
        if (file := folder / name).is_file() and name.endswith(".json"):
            file.write_text(json.dumps({k: v for k, v in json.loads(file.read_text()).items() if k != "chat_template"}))
        else:
            file.unlink(missing_ok=True)
    code, fine_tuning = check_sft([turns("q", f"a {i}") for i in range(9)], {"model.path": folder})
    assert code == 1
    prompts = verl.ends(1, "check", *overrides({f"{MODEL}.path": folder, "data.val_files": "[]"}))
    for said, count in ((fine_tuning, "9 training rows"), (prompts, "8 of 8 rows")):
        (line,) = [line for line in failures(said) if "chat template" in line]
        assert count in line
        assert "model.custom_chat_template" in line
        assert not [line for line in failures(said) if "more training rows" in line]


def test_fine_tuning_rows_that_are_cut_or_refused(check_sft):
    rows = [
        turns("q", "a"),
        turns("q", "long " * 100),
        turns("q", "b"),
        {"messages": [{"role": "assistant"}]},
        {"x": 1},
    ]
    code, said = check_sft(rows)
    assert code == 1
    assert len([line for line in failures(said) if "training: " not in line and "row " in line]) == 3, said
    code, said = check_sft(rows[:3], {"data.truncation": "right"})
    assert code == 0, said
    assert "cut on the right: 1;" in said
    _, said = check_sft([{"x": 1}] * 40)
    assert len([line for line in failures(said) if "row " in line and "fits no format" in line]) == 5, said
    assert any("35 more training rows cannot be used" in line for line in failures(said)), said


def test_other_fine_tuning_problems(check_sft):
    code, said = check_sft([turns("q", "a")], {"data.max_length": 2000, "data.messages_keys": "m"})
    assert code == 1
    assert "did you mean 'data.messages_key'" in said
    code, said = check_sft([turns("q", "a")], {"data.max_length": 2000})
    assert code == 1
    assert any("but the model holds 1024; lower data.max_length" in line for line in failures(said)), said
    assert any("data.train_batch_size=2 is more than the 1 rows that train" in line for line in failures(said)), said


def test_a_dry_run_of_fine_tuning_is_its_check(verl, task):
    said = verl.ends(1, "sft", "--dry-run", "model.path=/nowhere", f"trainer.default_local_dir={task / 'run'}")
    assert [line for line in said.splitlines() if "/nowhere does not exist" in line] == failures(said)[:1], said
    assert "not checked: see model" in said


def test_the_program_follows_from_the_config_name(verl):
    verl.ends(2, "check", "--config-name", words=["expected one argument"])
    verl.ends(1, "check", "--config-name=sft_trainer_engine", "model.pathh=x", words=["did you mean 'model.path'"])


# -- preferences -------------------------------------------------------------------------------------------------------------


PAIR = {"prompt": "question", "chosen": " yes", "rejected": " no"}


def test_preferences_that_train(check_preferences, task):
    messages = [{"role": "user", "content": "q"}, {"role": "assistant", "content": "a"}]
    other = [messages[0], {"role": "assistant", "content": "b"}]
    rows = [PAIR, PAIR, {"chosen": messages, "rejected": other}, {"prompt": "q", "chosen": messages, "rejected": other}]
    code, said = check_preferences(rows)
    assert code == 0, said
    for sentence in (
        "format prompt_chosen_rejected (rows: 2), chosen_rejected (rows: 1), repeated_prompt (rows: 1); rows that train: 4",
        "question[[ yes<|im_end|>]]",
        "2 steps of 2 rows; few for a model to learn",
        "warn  data        Rows of plain text: 2. They train without the chat template",
        "Ready to train, 1 warning.",
    ):
        assert sentence in said, said
    assert not (task / "run").exists()


BAD_PREFERENCES = {
    "no format": (
        {"text": "a"},
        "the row is neither a pair ('chosen', 'rejected') nor a labelled completion ('label')",
    ),
    "equal after the cut": (
        {"prompt": "q", "chosen": "a" * 70 + "b", "rejected": "a" * 70 + "c"},
        "have the same tokens within data.max_length=64",
    ),
    "a label": ({"prompt": "q", "completion": "a", "label": True}, "this training needs pairs"),
    "a field": ({**PAIR, "chosen": [{"role": "assistant", "content": 3}]}, "field 'chosen[0]' has no text 'content'"),
}


def test_each_bad_preference_is_named_with_file_row_and_field(check_preferences):
    bad = BAD_PREFERENCES.values()
    code, said = check_preferences([PAIR, PAIR, *(row for row, _ in bad)], {"data.truncation": "right"})
    assert code == 1
    for number, (_, sentence) in enumerate(bad, start=2):
        place = f"preferences.jsonl, row {number} (counted from 0, line {number + 1}): "
        assert any(place in line and sentence in line for line in failures(said)), (sentence, said)


@pytest.mark.parametrize(
    ("changes", "sentence"),
    [
        ({"preference.loss": "dpo"}, "DPO's loss is sigmoid"),
        ({"preference.loss": "[sigmoid,kto]"}, "kto is a loss of labelled completions, the others are of pairs"),
        ({"preference.loss": "[sigmoid,sft]", "preference.loss_weights": "[1.0]"}, "has 1 weights for 2 losses"),
        ({"preference.loss": "exo_pair"}, "needs preference.label_smoothing above 0"),
        (
            {"preference.loss": "apo_zero", "preference.f_divergence": "forward_kl"},
            "preference.f_divergence=forward_kl",
        ),
        ({"preference.simpo_gamma": 1.0}, "preference.loss is not simpo"),
        ({"preference.loss": "orpo", "ref.sync_steps": 4}, "this preference.loss has no reference"),
        ({"ref.sync_steps": 4, "model.lora_rank": 4}, "ref.sync_steps moves whole weights"),
        ({"preference.beta": 0}, "must be above 0"),
        ({"loss_type": "ipo"}, "preference.loss"),
    ],
)
def test_preference_settings_that_contradict(check_preferences, changes, sentence):
    code, said = check_preferences([PAIR, PAIR], changes)
    assert code == 1
    assert any(sentence in line for line in failures(said)), said


LORA = {"actor_rollout_ref.model.lora_rank": 2}
MODEL, ACTOR = "actor_rollout_ref.model", "actor_rollout_ref.actor"
# keys that hold a list of names: {key: (valid list, other keys of a run that reads it)}
LISTS_OF_NAMES = {
    f"{MODEL}.target_modules": (["q_proj"], LORA),
    f"{MODEL}.exclude_modules": (["q_proj"], LORA),
    f"{MODEL}.modules_to_save": (["norm"], LORA),
    f"{MODEL}.external_lib": (["json"], {}),
    f"{ACTOR}.fsdp_config.wrap_policy.transformer_layer_cls_to_wrap": (
        ["LlamaDecoderLayer"],
        {"trainer.n_gpus_per_node": 2},
    ),
    f"{ACTOR}.checkpoint.save_contents": (["model", "optimizer", "extra"], {}),
    f"{ACTOR}.checkpoint.load_contents": (["model", "optimizer", "extra"], {}),
    "actor_rollout_ref.rollout.stop_token_ids": ([258], {}),
    "trainer.logger": (["file"], {}),
    "data.train_files": (None, {}),
    "data.val_files": (None, {}),
    "preference.loss": (["sigmoid"], {"algorithm.program": "online_dpo", "algorithm.adv_estimator": None}),
}
# other keys with lists, and the verb that refuses an entry without meaning
OTHER_LISTS = {
    "betas": "numbers",
    "ranks": "numbers",
    "steps": "numbers",
    "loss_weights": "numbers, as many as losses",
    "gdpo_reward_weights": "numbers, as many as keys",
    "gdpo_reward_keys": "known when the reward function returns: tests/algorithms/test_advantages.py",
    "stop": "any text",
    "methods": "two names, checked as choices: tests/rollout/test_drafts.py",
    "ignore_patterns": "patterns: tests/models/test_qat.py",
    "text_tokens": "names of added tokens: tests/models/test_text_tokens.py",
    "stages": "objects: tests/run/test_stages.py",
    "dynamic_config": "mappings: tests/run/test_phases.py",
    "prompt_dict_keys": "fields of rows: tests/data",
    "response_dict_keys": "fields of rows: tests/data",
}


def test_every_key_with_a_list_is_in_one_of_the_tables():
    lists = {
        path.rpartition(".")[2]
        for schema in SCHEMAS.values()
        for path, leaf in schema.leaves.items()
        if not leaf.inert and not leaf.free and takes_lists(leaf)
    }
    assert lists == {key.rpartition(".")[2] for key in LISTS_OF_NAMES} | set(OTHER_LISTS)


def takes_lists(leaf):
    kind = str(next(f.type for f in fields(leaf.owner) if f.name == leaf.path.rpartition(".")[2]))
    return "list" in kind or kind == "Any"


@pytest.mark.parametrize("key", LISTS_OF_NAMES)
def test_an_entry_of_a_list_that_names_nothing_is_refused(verl, overrides, task, key):
    valid, needed = LISTS_OF_NAMES[key]
    valid = valid or [task / f"{key.removeprefix('data.').removesuffix('_files')}.jsonl"]
    typo = 9999 if key.endswith("ids") else f"{valid[0]}x"
    verl.ends(0, "check", *overrides({**needed, key: f"[{','.join(map(str, valid))}]"}))
    code, said = verl("check", *overrides({**needed, key: f"[{','.join(map(str, [*valid, typo]))}]"}))
    assert code != 0
    assert str(typo) in said


AGENT = "actor_rollout_ref.rollout.agent"
USER_CODE = """
from verl.programs.stages import Stage


def one_argument(batch):
    return batch


class NeedsSetting(Stage):
    def __init__(self, half):
        self.half = half


class Rows:
    def __init__(self, data_source):
        self.rows = data_source

    def __len__(self):
        return len(self.rows)

    def __iter__(self):
        return iter(range(len(self.rows)))


class NoReset:
    pass


class NeedsBoard:
    def __init__(self, board):
        self.board = board

    def reset(self, seed=None, **row):
        return "Play.", {}


class ThreePlayers:
    num_players = 3

    def reset(self, seed=None, **row):
        pass
"""
# value of the key, further keys -> words of the sentence
UNUSABLE_CODE = [
    ({"algorithm.stages": "[mine.py:one_argument]"}, "called as (batch, step)"),
    ({"algorithm.stages": "[mine.py:NeedsSetting]"}, "cannot be made: TypeError"),
    ({"algorithm.stages": "[mine.py:Missing]"}, "has no 'Missing'"),
    ({"data.sampler.class_path": "mine.py", "data.sampler.class_name": "Rows"}, "(data_source=..., data_config=...)"),
    ({f"{AGENT}.environment": "mine.py:Missing"}, "has no 'Missing'"),
    ({f"{AGENT}.environment": "mine.py:NoReset"}, "is no environment"),
    ({f"{AGENT}.environment": "mine.py:NeedsBoard"}, "missing a required argument: 'board'"),
    ({f"{AGENT}.environment": "mine.py:ThreePlayers"}, "rollout.n=2. Set it to a multiple of 3"),
    ({f"{AGENT}.runner": "mine.py:Missing"}, "has no 'Missing'"),
    ({f"{AGENT}.runner": "mine.py:one_argument"}, "called as (task, base_url, api_key)"),
    ({f"{AGENT}.environment": "mine.py"}, "agent.environment: "),
    ({f"{AGENT}.environment": "mine.py"}, "mine.py has one_argument, NeedsSetting, Rows, NoReset"),
    ({"algorithm.adv_estimator": "mine.py:one_argument"}, "mine.py:one_argument' needs 'batch'"),
]
# one of each place that loads code
RUN_BY_DEFAULT = (0, 3, 5, 9)


@pytest.mark.parametrize(
    ("verb", "changes", "sentence"),
    [
        slow(verb, *case, when=verb == "train" and number not in RUN_BY_DEFAULT)
        for number, case in enumerate(UNUSABLE_CODE)
        for verb in ("check", "train")
    ],
)
def test_code_that_the_run_could_not_call_is_refused(verl, overrides, task, verb, changes, sentence):
    (task / "mine.py").write_text(USER_CODE)
    changes = {key: value.replace("mine.py", str(task / "mine.py")) for key, value in changes.items()}
    code, said = verl(verb, *overrides(changes))
    assert code != 0, said
    assert sentence in ("\n".join(failures(said)) if verb == "check" else said), said
    assert "WARNING: Episode" not in said
