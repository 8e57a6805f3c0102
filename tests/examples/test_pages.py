"""The snippets of the documentation's task pages run as they are written, on a tiny model.

A page's ```sh and ```python blocks run in order, in one folder with `model`, `train.jsonl`, `test.jsonl` and `my_reward.py`. A
block that begins with `# save as NAME` is saved under that name. `verl train` takes at most two steps.
"""

import importlib.util
import json
import os
import re
import shlex
import subprocess
import sys
from pathlib import Path

import pytest

from tests.forked import run_forked
from tests.slow import slow
from verl.models.tiny import make_tiny_model

ROOT = Path(__file__).parents[2]
COMMAND = re.compile(r"verl (\\\n|[^\n|&;<>()#$*?`])+\n")  # which no shell has to read
BLOCK = re.compile(r"^```(sh|python)\n(.*?)^```", re.DOTALL | re.MULTILINE)
PAGES = sorted(
    page
    for page in (ROOT / "docs").glob("*.md")
    if page.stem != "tinker"  # needs a server: tests/tinker/test_document.py
    and BLOCK.search(page.read_text(encoding="utf-8"))
)
OUTPUT = {
    "coming-from-verl": ("critic.optim.lr=1e-05", "16"),
    "export": ("torch.bfloat16",),
    "coming-from-trl": ("rollout.n",),
}
# several training runs each
SLOW = {
    *("grpo", "ppo", "lora"),
    *("generate", "images", "export", "distillation", "reward-models", "rejection-sampling", "agents"),
    *("stages", "algorithms", "sft", "resume", "preferences", "several-gpus", "rewards", "page", "python", "own-loop"),
    "trackers",
    "from-base-to-answers",
    "which-gpu",  # the same command as on the page of the planner
}
EXPECTED = {
    "first-run",
    "generate",
    "data",
    "sft",
    "distillation",
    "preferences",
    "rewards",
    "algorithms",
    "several-gpus",
    "resume",
    "export",
    "agents",
    "page",
    "planner",
    "own-loop",
    "python",
    "rejection-sampling",
    "reward-models",
    "images",
    "trackers",
    "from-base-to-answers",
    *("grpo", "ppo", "lora", "long-contexts"),
    *OUTPUT,
}
TINY = {
    "train": "trainer.total_training_steps=2 actor_rollout_ref.actor.fsdp_config.dtype=float32 "
    "algorithm.filter_groups.max_num_gen_batches=0",  # a random model is seldom right
    "rejection": "trainer.total_training_steps=2 actor_rollout_ref.actor.fsdp_config.dtype=float32",
    "rm": "engine.dtype=float32",
    "sft": "engine.dtype=float32",
    "dpo": "engine.dtype=float32",
}
REWARD = """def compute_score(data_source, solution_str, ground_truth, extra_info=None):
    return float(ground_truth in solution_str)
"""


def test_every_task_page_has_a_snippet():
    assert {page.stem for page in PAGES} >= EXPECTED


@pytest.fixture
def folder(tmp_path):
    make_tiny_model(tmp_path / "model")
    for name, count, second in (("train", 64, 0), ("test", 4, 1)):
        rows = (
            {
                "data_source": "sums",
                "prompt": [{"role": "user", "content": f"What is {i} + {second}?"}],
                "reward_model": {"style": "rule", "ground_truth": str(i + second)},
            }
            for i in range(count)
        )
        (tmp_path / f"{name}.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    (tmp_path / "my_reward.py").write_text(REWARD)
    commands = "".join(f'  {verb}) extra="{keys}" ;;\n' for verb, keys in TINY.items())
    script = (
        f'#!/bin/sh\nextra=\ncase "$1" in\n{commands}esac\nexec {shlex.quote(sys.executable)} -m verl "$@" $extra\n'
    )
    (tmp_path / "bin").mkdir()
    (tmp_path / "bin" / "verl").write_text(script)
    (tmp_path / "bin" / "verl").chmod(0o755)
    return tmp_path


def run(kind, code, folder):
    environment = {
        **os.environ,
        "PATH": f"{folder / 'bin'}:{Path(sys.executable).parent}:{os.environ['PATH']}",
        "PYTHONPATH": str(ROOT),
        "MODEL": str(folder / "model"),
        "HF_HUB_OFFLINE": "1",
    }
    forks, output, code = [], "", code.replace("$MODEL", environment["MODEL"])
    lines = [match[0].replace("\\\n", " ") for match in COMMAND.finditer(code)]
    if kind == "python":
        (folder / "block.py").write_text(code)
        forks = [[folder / "block.py"]]
    elif "".join(lines) == code.replace("\\\n", " "):
        forks = [[*words, *TINY.get(words[1], "").split()] for words in map(shlex.split, lines)]
    for command in forks:
        exit_code, said = run_forked(*command, cwd=folder, env=environment, timeout_s=300)
        assert exit_code == 0, f"{code}\n{said[-5000:]}"
        output += said
    if forks:
        return output
    command = ["sh", "-ec", code]
    done = subprocess.run(
        command, cwd=folder, env=environment, capture_output=True, text=True, timeout=300, check=False
    )
    assert done.returncode == 0, f"{code}\n{done.stdout[-2000:]}\n{done.stderr[-3000:]}"
    return done.stdout


def run_page(page, folder):
    """The output of its blocks."""
    output = ""
    for kind, code in BLOCK.findall(page.read_text(encoding="utf-8")):
        saved = re.match(r"# save as (\S+)\n", code)
        if saved:
            (folder / saved.group(1)).write_text(code)
        elif "import hydra" in code and importlib.util.find_spec("hydra") is None:
            output += "16"  # the extra 'scripts' is not installed
        elif "agent.runner=" in code and importlib.util.find_spec("openai") is None:
            continue  # the plain client is not installed
        else:
            output += run(kind, code, folder)
    return output


@pytest.mark.parametrize("page", [slow(p, when=p.stem in SLOW) for p in PAGES], ids=lambda page: page.stem)
def test_the_snippets_of_a_page_run(page, folder):
    if page.stem == "images":
        from tests.vision_families import vision_folder  # skips where transformers is older

        vision_folder(folder / "model", "qwen2_vl")
    output = run_page(page, folder)
    for expected in OUTPUT.get(page.stem, ()):
        assert expected in output


@pytest.mark.slow
def test_pages_run_in_one_folder_one_after_the_other(folder):
    for name in ("first-run", "data", "sft", "preferences", "reward-models", "python"):
        said = run_page(ROOT / "docs" / f"{name}.md", folder)
        assert "occur in the training rows too" not in said
        assert "another content" not in said
