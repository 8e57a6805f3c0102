"""`verl import-check`: scripts, YAML files and Python files of the existing verl, and every override list of the tests."""

import re
import shlex
from pathlib import Path

import pytest

from tests.compat import script_lists, vision_lists
from tests.config import test_overrides, test_scripts
from tests.house.source import ROOT
from tests.runtime.test_megatron_scripts import SCRIPTS
from tests.seeds.test_yaml import DOCUMENTS
from verl.cli.compat.launch_scripts import read_commands
from verl.cli.main import main

SCRIPT = r"""#!/bin/bash
set -x
export VLLM_USE_V1=1
PROJECT=verl_grpo     # a name
train_bsz=${TRAIN_BSZ:-512}
max_len=$((1024 * 2))
stamp=$(date +%m%d)
gsm8k=$HOME/data/gsm8k/train.parquet
ROLLOUT=(
    actor_rollout_ref.rollout.name=native   # the engine
    # actor_rollout_ref.rollout.name=vllm
    actor_rollout_ref.rollout.n=8
)
EXTRA="trainer.save_freq=20 trainer.test_freq=5"

PYTHONUNBUFFERED=1 python3 -m verl.trainer.main_ppo --config-path=config --config-name=ppo_trainer.yaml \
    algorithm.adv_estimator=grpo \
    data.train_files="$gsm8k" \
    data.val_files="['a b.parquet', 'c.parquet']" \
    data.train_batch_size=$train_bsz \
    data.max_response_length=$((max_len - 24)) \
    custom_reward_function.path=reward.py \
    actor_rollout_ref.actor.clip_ratio_c=10.0 \
    actor_rollout_ref.actor.policy_loss.loss_mode=gspo \
    "${ROLLOUT[@]}" ${EXTRA} \
    trainer.logger='["console","wandb"]' \
    trainer.nnodes=$WORLD_NODES trainer.experiment_name=run_${stamp} \
    trainer.default_local_dir='checkpoints/${trainer.project_name}' \
    trainer.project_name=${PROJECT} $@ 2>&1 | tee log.txt
"""


def test_the_words_of_a_command_are_split_as_by_the_shell(monkeypatch):
    monkeypatch.setenv("HOME", "/h")
    (command,) = read_commands(SCRIPT)
    assert (command.module, command.config_path, command.config_name) == (
        "verl.trainer.main_ppo", "config", "ppo_trainer.yaml",
    )  # fmt: skip
    assert command.overrides == [
        "algorithm.adv_estimator=grpo", "data.train_files=/h/data/gsm8k/train.parquet",
        "data.val_files=['a b.parquet', 'c.parquet']", "data.train_batch_size=512", "data.max_response_length=2024",
        "custom_reward_function.path=reward.py", "actor_rollout_ref.actor.clip_ratio_c=10.0",
        "actor_rollout_ref.actor.policy_loss.loss_mode=gspo", "actor_rollout_ref.rollout.name=native",
        "actor_rollout_ref.rollout.n=8", "trainer.save_freq=20", "trainer.test_freq=5",
        'trainer.logger=["console","wandb"]', "trainer.default_local_dir=checkpoints/${trainer.project_name}",
        "trainer.project_name=verl_grpo",
    ]  # fmt: skip
    assert set(command.unknown.values()) == {"$WORLD_NODES", "$(date +%m%d)"}


@pytest.mark.parametrize(
    "line",
    [
        "ray job submit --address=x --runtime-env=env.yaml -- python -m verl.trainer.main_ppo trainer.nnodes=2",
        "torchrun --nproc_per_node=8 -m verl.trainer.main_ppo trainer.nnodes=2 > log.txt",
        "ray job submit --no-wait \\\n  -- \\\n  python3 -m verl.trainer.main_ppo \\\n  trainer.nnodes=2",
        "CUDA_VISIBLE_DEVICES=0 nohup python -m verl.trainer.main_ppo trainer.nnodes=2 &",
        "for seed in 1 2; do python -m verl.trainer.main_ppo trainer.nnodes=2; done",
        "srun bash -c 'torchrun --rdzv-id=$JOB \\\n  -m verl.trainer.main_ppo trainer.nnodes=2 --dry-run'",
    ],
)
def test_commands_in_other_commands(line):
    (command,) = read_commands(line)
    assert command.overrides == ["trainer.nnodes=2"]


@pytest.fixture
def checked(verl, tmp_path):
    """checked(name, text, code, words): what the check says of a file with this text, with all of these words."""

    def check(name, text, code, words=()):
        (tmp_path / name).write_text(text)
        return verl.ends(code, "import-check", str(tmp_path / name), words=words)

    return check


def test_a_script_that_runs(checked):
    checked("run.sh", SCRIPT, 0, [
        "python -m verl.trainer.main_ppo is available",
        "custom_reward_function.path -> reward.custom_reward_function.path",
        "No effect: actor_rollout_ref.actor.clip_ratio_c=10.0",
        "$WORLD_NODES has no value",
        "All names and keys exist here",
    ])  # fmt: skip


@pytest.mark.parametrize(
    ("module", "key"),
    [("sft_trainer", "model.path"), ("sft_trainer_ray", "model.path"), ("fsdp_sft_trainer", "model.partial_pretrain")],
)
def test_a_fine_tuning_script(module, key, checked):
    text = f"torchrun --nproc_per_node=2 -m verl.trainer.{module} {key}=m data.train_batch_size=8 optim.lrr=1\n"
    available = f"python -m verl.trainer.{module} is available"
    checked("sft.sh", text, 1, [available, "did you mean 'optim.lr'", " known keys: ", "model.path"])


def test_a_script_that_does_not(checked):
    text = "python -m verl.trainer.main_ppo trainer.device=npu data.train_batch_sise=3 trainer.nnodes=x\n"
    words = ["trainer.device=npu", "'data.train_batch_size'", "whole number", "verl.trainer.no_such is not available"]
    checked("run.sh", f"{text}python -m verl.trainer.no_such", 1, words)


def test_a_file_that_is_not_there(verl, tmp_path):
    verl.ends(1, "import-check", str(tmp_path / "none.sh"), words=["there is no file"])


def test_a_yaml_file(checked):
    text = "defaults: [ppo_trainer, _self_]\ntrainer: {nnodes: 1}\ndata: {max_promt_length: 3}\n"
    checked("run.yaml", text, 1, ["did you mean 'data.max_prompt_length'"])


@pytest.mark.parametrize(
    ("text", "code", "words"),
    [
        ("tools: [{class_name: verl.tools.base_tool.BaseTool}]", 0, ["multi_turn.tool_config_path to this file"]),
        ("tools: [{class_name: verl.tools.base_tool.Bass}]", 1, ["verl.tools.base_tool has no 'Bass'"]),
        (
            "interaction: [{name: a, class_name: no_users.A}]",
            0,
            ["interaction_config_path", "no_users is not installed"],
        ),
        ("- {name: mine, _target_: verl.agents.loops.SingleTurnAgentLoop}", 0, ["agent.agent_loop_config_path"]),
        ("- {}\n- 1", 0, ["2 entries"]),
    ],
)
def test_files_of_tools_users_and_loops(text, code, words, checked):
    checked("declared.yaml", text, code, words)


PYTHON = """
import os
from verl import DataProto
from verl.trainer.ppo.core_algos import register_adv_est, no_such_function
from verl.utils.dataset.rl_dataset import RLHFDataset, collate_fn
import verl.no_such_module
import a_package_that_is_not_there
import beside


def compute_score(data_source, solution_str, ground_truth, extra_info=None, weight=1.0):
    return 0.0


def compute_score_of_one(solution_str):
    return 0.0


class Rows(RLHFDataset):
    def __init__(self, data_files, tokenizer, config):
        super().__init__(data_files, tokenizer, config)

    def _build_messages(self, example):
        return []

    def own(self):
        return 1
"""


def test_a_python_file(checked, tmp_path):
    (tmp_path / "beside.py").write_text("")
    said = checked("mine.py", PYTHON, 1, [
        "imports verl.DataProto, verl.trainer.ppo.core_algos.register_adv_est",
        "line 4: verl.trainer.ppo.core_algos has no 'no_such_function'",
        "line 6: verl.no_such_module cannot be imported",
        "line 7: a_package_that_is_not_there is not installed",
        "compute_score(data_source, solution_str, ground_truth, extra_info, weight) can score",
        "compute_score_of_one(solution_str) takes no ground_truth",
        "Rows is a dataset for data.custom_cls; it replaces __init__, _build_messages",
        "own of Rows: verl does not call it",
        "Rows.__init__ takes no processor, max_samples",
    ])  # fmt: skip
    assert "beside is not installed" not in said


@pytest.mark.parametrize("content", [
    "# -*- coding: latin-1 -*-\nfrom verl import DataProto  # \u00e9\n".encode("latin-1"),
    b"\xef\xbb\xbffrom verl import DataProto\n",
])  # fmt: skip
def test_a_python_file_in_another_encoding(content, tmp_path, capsys):
    (tmp_path / "in two\nlines.py").write_bytes(content)
    assert main(["import-check", str(tmp_path)]) == 0
    assert r"pass  in two\nlines.py  runs" in capsys.readouterr().out


def test_a_python_file_that_runs(checked):
    text = "def compute_score(data_source, solution_str, ground_truth, **kwargs):\n    return 1.0\n"
    checked("reward.py", text, 0)


KINDS = {
    "the main file of a recipe": (
        """
import ray
from verl.trainer.main_ppo_v0 import BaseTaskRunner
from verl.trainer.ppo.core_algos import agg_loss, no_such_loss
from verl.trainer.ppo.metric_utils import bootstrap_metric
from verl.trainer.ppo.ray_trainer import RayPPOTrainer, ResourcePoolManager
from verl.utils.profiler import marked_timer
from verl.models.transformers.qwen2 import qwen2_flash_attn_forward

class RecipeTrainer(RayPPOTrainer):
    def fit(self):
        self._load_checkpoint()
        self.total = self.config.trainer.total_epochs + self.global_steps
        for columns in self.train_dataloader:
            self.own(self.total, self.rollout_buffer)

    def own(self, total, buffer): ...

class RecipeWorker(ActorRolloutRefWorker): ...
""",
        ["no_such_loss", "verl.models.transformers.qwen2", "'rollout_buffer'", "RecipeWorker would not be used"],
    ),
    "a reward file": (
        """
import verl.utils.reward_score.math_dapo
from verl.utils.reward_score import default_compute_score, no_such_score
from verl.utils.reward_score.rlla import compute_score as rlla

def compute_score(data_source, solution_str, ground_truth, extra_info=None, reward_router_address=None):
    return 0.0
""",
        ["no_such_score"],
    ),
    "a file of tools": (
        """
from verl.experimental.agent_loop.agent_loop import AgentLoopBase, register
from verl.experimental.agent_loop.utils import resolve_config_path
from verl.tools.image_zoom_in_tool import ImageZoomInTool
from verl.tools.sandbox_fusion_tools import SandboxFusionTool
from verl.tools.schemas import OpenAIFunctionToolSchema, ToolResponse

class CustomTool(SandboxFusionTool):
    async def execute(self, instance_id, parameters, **kwargs):
        return ToolResponse(text="1"), 0.0, {}
""",
        ["verl.tools.image_zoom_in_tool"],
    ),
}


@pytest.mark.parametrize("kind", KINDS)
def test_what_a_public_kind_of_file_lacks_is_named_and_nothing_else(kind, checked):
    text, missing = KINDS[kind]
    said = checked("file.py", text, 1)
    failures = [line for line in said.splitlines() if line.startswith("fail")]
    assert len(failures) == len(missing), said
    assert all(name in line for name, line in zip(missing, failures, strict=True)), said


def test_the_folder_of_a_script_and_the_config_that_it_names_are_read(tmp_path, monkeypatch, capsys):
    """The multi-turn scripts of existing releases take their YAML from `$(pwd)`."""
    monkeypatch.chdir(tmp_path)
    Path("config").mkdir()
    Path("config/multi.yaml").write_text("actor_rollout_ref: {rollout: {multi_turn: {enable: true}}}\n")
    Path("tools.yaml").write_text("tools: []\n")
    Path("run.sh").write_text(
        'DIR="$(pwd)"\npython3 -m verl.trainer.main_ppo --config-path="$DIR/config" --config-name=multi '
        'custom_reward_function.path="$(pwd)/reward.py" '
        "actor_rollout_ref.rollout.multi_turn.tool_config_path=$(pwd)/tools.yaml\n"
    )
    assert main(["import-check", "run.sh", "config/multi.yaml"]) == 0
    said = capsys.readouterr().out
    assert "read with the command of the script that names it" in said
    assert "No effect" not in said


GRPO = ("algorithm.adv_estimator=grpo", "actor_rollout_ref.rollout.n=4", "actor_rollout_ref.model.path=m")
NAMED = dict.fromkeys("model rm tools turns rows parts asks out task kk countdown".split(), "file")
SIZES = {  # of a list that changes one of two sizes, as its tests set the other
    "dapo with its filter": ["data.train_batch_size=2"],
    "qwen2.5-vl long prompts": ["data.max_prompt_length=300", "data.max_response_length=6"],
    "qwen3.5 distillation": ["data.max_prompt_length=300", "data.max_response_length=6"],
}


def grpo(name, text):
    return [*GRPO, *SIZES.get(name, ()), *text.format(**NAMED).split()]


def override_lists():
    """(name, module of verl.trainer, overrides): the lists of scripts in tests."""
    yield from ((name, "main_ppo", overrides) for name, overrides in test_scripts.LISTS.items())
    for override, status, context in test_overrides.FREQUENT:
        if status == "accepted":
            yield override, "main_ppo", [*context.split(), override]
    for kind, lists in script_lists.KINDS.items():
        yield from ((f"{kind}, {name}", "main_ppo", grpo(name, text)) for name, text in lists.items())
    for name, (_, text) in vision_lists.RUNS.items():
        yield name, "main_ppo", grpo(name, text)
    for name, (_, text) in vision_lists.FINE_TUNING.items():
        yield f"fine-tuning, {name}", "sft_trainer", ["model.path=m", *text.format(**NAMED).split()]
    for name, (num_ranks, _, overrides) in SCRIPTS.items():
        yield f"Megatron, {name}", "main_ppo", [*GRPO, f"trainer.n_gpus_per_node={num_ranks}", *overrides]


def script_of(module, overrides):
    return f"python3 -m verl.trainer.{module} {shlex.join(overrides)}\n"


def test_every_override_list_of_a_script_passes(tmp_path, capsys):
    said = {}
    for name, module, overrides in override_lists():
        (tmp_path / "run.sh").write_text(script_of(module, overrides))
        if main(["import-check", str(tmp_path / "run.sh")]) != 0:
            said[name] = [line for line in capsys.readouterr().out.splitlines() if line.startswith("fail")]
    assert not said


@pytest.mark.parametrize("name", script_lists.REFUSED)
def test_a_refused_list_gets_its_sentence(name, tmp_path, capsys):
    text, sentence = script_lists.REFUSED[name]
    (tmp_path / "run.sh").write_text(script_of("main_ppo", grpo(name, text)))
    assert main(["import-check", str(tmp_path / "run.sh")]) == 1
    assert re.search(sentence, capsys.readouterr().out)


def test_files_of_seeds_and_examples_and_commands_of_pages_pass(tmp_path, capsys, monkeypatch):
    monkeypatch.chdir(tmp_path)
    Path("ds_config.json").write_text("{}")
    files = [ROOT / "examples/clusters" / name for name in ("ray_job.sh", "slurm_torchrun.sbatch")]
    files += [*ROOT.glob("examples/**/*.py"), *ROOT.glob("tests/compat/*/*.py")]
    for name, (text, *_) in DOCUMENTS.items():
        files.append(tmp_path / f"{name}.yaml")
        files[-1].write_text(text)
    for page in (ROOT / "docs").glob("*.md"):
        blocks = re.findall(r"^```(?:ba)?sh\n(.*?)^```", page.read_text("utf-8"), re.DOTALL | re.MULTILINE)
        if commands := "".join(block for block in blocks if "-m verl." in block):
            files.append(tmp_path / f"{page.stem}.sh")
            files[-1].write_text(commands.replace(" ...", ""))
    assert main(["import-check", *map(str, files)]) == 0, capsys.readouterr().out


MAIN = "python -m verl.trainer.main_ppo algorithm.adv_estimator=grpo actor_rollout_ref.rollout.n=4"
PROJECTS = {  # layout of a public project: its files -> (runs, runs with notices, stops), words of a stop
    "a fork with its copy of verl": (
        {"verl/__init__.py": "", "verl/a.py": "from verl import gone", "scripts/a.sh": f"{MAIN} trainer.remove_clip=True"},
        (0, 0, 1), "trainer.remove_clip",
    ),
    "a fork whose keys change nothing": (
        {"verl/__init__.py": "", "main_grpo.sh": f"{MAIN} trainer.remove_previous_ckpt=True"}, (0, 1, 0), "",
    ),
    "a scorer with two arguments": (
        {"rewards/countdown.py": "def compute_score(solution_str, ground_truth): return 1"}, (1, 0, 0), "",
    ),
    "a trainer over its own packages": (
        {"ragen/__init__.py": "", "ragen/env.py": "", "train.py": "from verl.protocol import DataProto\nimport ragen.env"},
        (1, 0, 0), "",
    ),
    "packages below a folder of sources": (
        {"src/pkg/__init__.py": "", "src/pkg/a.py": "import pkg\nfrom verl import DataProto"}, (1, 0, 0), "",
    ),
    "a script that names its config": (
        {"run.sh": "python -m verl.trainer.main_ppo --config-path=config --config-name=mine",
         "config/mine.yaml": "algorithm: {adv_estimator: gae}\nactor_rollout_ref:\n  rollout: {n: 2}"}, (1, 0, 0), "",
    ),
    "a config of tools": ({"tools.yaml": "tools:\n- class_name: verl.tools.gone.Tool"}, (0, 0, 1), "verl.tools.gone"),
    "workers of its own": (
        {"w.py": "from verl.workers.fsdp_workers import ActorRolloutRefWorker\nclass W(ActorRolloutRefWorker): pass"},
        (0, 0, 1), "W would not be used",
    ),
    "a name that is missing": ({"m.py": "from verl.trainer.main_ppo import gone"}, (0, 0, 1), "has no 'gone'"),
    "files of other programs and hidden folders": (
        {"a.py": "import json", "b.sh": "ls", "c.yaml": "a: 1", ".git/x.py": "from verl import gone"}, (0, 0, 0),
        "nothing was examined",
    ),
}  # fmt: skip


@pytest.mark.parametrize("layout", PROJECTS)
def test_a_project(layout, tmp_path, capsys, monkeypatch):
    monkeypatch.chdir(tmp_path.parent)  # scripts name paths of the project's folder, wherever the command starts
    files, (runs, noticed, stops), words = PROJECTS[layout]
    for name, text in files.items():
        (tmp_path / name).parent.mkdir(parents=True, exist_ok=True)
        (tmp_path / name).write_text(text)
    code = main(["import-check", tmp_path.name])
    output = capsys.readouterr().out
    assert f"run {runs}, run with notices {noticed}, stop {stops}" in output, output
    assert (code, words in output) == (int(stops > 0), True), output
    assert ("a copy of verl" in output) == ("verl/__init__.py" in files)
