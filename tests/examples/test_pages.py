"""The snippets of the documentation's task pages run as they are written, on a tiny model that says digits and vowels at
random: so every run has a gradient, and unequal rewards.

A page's ```sh and ```python blocks run in order, in one folder with `model`, `train.jsonl`, `test.jsonl` and `my_reward.py`. A
block that begins with `# save as NAME` is saved under that name. `verl train` takes at most two steps.
"""

import importlib.util
import os
import re
import shlex
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

from tests.commands import ran
from tests.forked import run_forked
from tests.json_lines import read_lines, write_lines
from tests.slow import slow
from verl.models.tiny import make_tiny_model

ROOT = Path(__file__).parents[2]
COMMAND = re.compile(r"verl (\\\n|[^\n|&;<>()#$*?`])+\n")  # no shell has to read it
BLOCK = re.compile(r"^```(sh|python)\n(.*?)^```", re.DOTALL | re.MULTILINE)
PAGES = sorted(
    page
    for page in (ROOT / "docs").glob("*.md")
    if page.stem not in ("tinker", "api")  # needs a server: tests/tinker/test_document.py; signatures do not run
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
    *("trackers", "coming-from-verl", "planner", "environments"),
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
    "environments",
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


CHARACTERS = "01234567890123456789aeiou"


@pytest.fixture(scope="session")
def speaking_model(tmp_path_factory):
    """A tiny model; its responses are random characters of CHARACTERS."""
    import torch
    from transformers import AutoModelForCausalLM, AutoTokenizer

    place = make_tiny_model(tmp_path_factory.mktemp("speaking") / "model")
    model, tokenizer = AutoModelForCausalLM.from_pretrained(place), AutoTokenizer.from_pretrained(place)
    question = [{"role": "user", "content": "What is 3 + 4?"}]
    prompt = tokenizer.apply_chat_template(question, add_generation_prompt=True, return_dict=True)["input_ids"]
    characters = torch.tensor([*tokenizer.convert_tokens_to_ids(list(CHARACTERS)), tokenizer.eos_token_id])
    optimizer, generator = torch.optim.AdamW(model.parameters(), lr=3e-3), torch.Generator().manual_seed(0)
    for _ in range(40):
        answers = characters[torch.randint(len(characters), (16, 24), generator=generator)]
        ids = torch.cat([torch.tensor(prompt).expand(16, -1), answers], dim=1)
        labels = ids.masked_fill(torch.arange(ids.shape[1]) < len(prompt), -100)
        model(input_ids=ids, labels=labels).loss.backward()
        optimizer.step()
        optimizer.zero_grad()
    model.save_pretrained(place)
    return place


def runs_that_train_nothing(folder):
    """The runs without a gradient, or with equal rewards, in all steps."""
    nothing = []
    for metrics in folder.rglob("metrics.jsonl"):
        steps = read_lines(metrics)
        gradients = [step[n] for step in steps for n in ("actor/grad_norm", "train/grad_norm") if n in step]
        spreads = [s["critic/score/max"] - s["critic/score/min"] for s in steps if "critic/score/max" in s]
        if (gradients and not max(gradients)) or (spreads and not max(spreads)):
            nothing.append((str(metrics.parent.relative_to(folder)), gradients, spreads))
    return nothing


@pytest.fixture
def folder(tmp_path, speaking_model):
    shutil.copytree(speaking_model, tmp_path / "model")
    for name, count, second in (("train", 64, 0), ("test", 4, 1)):
        rows = (
            {
                "data_source": "sums",
                "prompt": [{"role": "user", "content": f"What is {i} + {second}?"}],
                "reward_model": {"style": "rule", "ground_truth": str(i + second)},
            }
            for i in range(count)
        )
        write_lines(tmp_path / f"{name}.jsonl", rows)
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
    done = ran(*command, cwd=folder, env=environment, timeout=300, stdin=subprocess.DEVNULL)
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
        elif "verifiers:" in code and importlib.util.find_spec("verifiers") is None:
            continue  # the package is not installed
        elif "agent.runner=" in code and importlib.util.find_spec("openai") is None:
            continue  # the plain client is not installed
        elif "json:sums" in code and importlib.util.find_spec("datasets") is None:
            continue  # the extra 'datasets' is not installed
        else:
            output += run(kind, code, folder)
    return output


@pytest.mark.parametrize("page", [slow(p, when=p.stem in SLOW) for p in PAGES], ids=lambda page: page.stem)
def test_the_snippets_of_a_page_run(page, folder):
    if page.stem == "images":
        from tests.vision_families import vision_folder  # skips if transformers is older

        vision_folder(folder / "model", "qwen2_vl")
    output = run_page(page, folder)
    for expected in OUTPUT.get(page.stem, ()):
        assert expected in output
    assert not runs_that_train_nothing(folder)


@pytest.mark.slow
def test_pages_run_in_one_folder_one_after_the_other(folder):
    for page in PAGES:
        if page.stem != "images":  # it has another model of the name `model`
            said = run_page(page, folder)
            assert "occur in the training rows too" not in said
            assert "another content" not in said
    assert not runs_that_train_nothing(folder)
