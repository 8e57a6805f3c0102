"""The examples run as written: the numbered ones each in its own folder, the files of examples/agents as their first lines say,
and the preparation scripts (with the extra 'scripts')."""

import importlib.util
import json
import os
import re
import shlex
import subprocess
import sys
from pathlib import Path

import pytest

from tests.commands import python
from tests.data.rows import config
from tests.forked import run_forked
from tests.json_lines import read_lines, write_lines
from tests.slow import slow
from verl.data.dataset import load_dataset
from verl.models.tiny import make_tiny_model, make_tokenizer
from verl.rewards.scorers.route import default_compute_score

ROOT = Path(__file__).parents[2]
EXAMPLES = ROOT / "examples"
SCRIPTS = sorted(EXAMPLES.glob("0*.py"))


def test_there_are_nine_and_the_readme_lists_them():
    assert len(SCRIPTS) == 9
    listed = (EXAMPLES / "README.md").read_text()
    assert all(script.name in listed for script in SCRIPTS)


def without_numbers(line):
    """A line that measures, by its names; any other as it is."""
    return re.sub(r"-?\d[\d.]*(?:e[-+]\d+)?(?: m?s\b)?", "#", line) if "=" in line or " -> " in line else line


def fresh(script, folder):
    """(exit code, output) as a user runs it, from the first import."""
    done = subprocess.run(
        [sys.executable, str(script)], cwd=folder, text=True, timeout=180, check=False,
        stdout=subprocess.PIPE, stderr=subprocess.STDOUT,
    )  # fmt: skip
    return done.returncode, done.stdout


def forked(script, folder):
    return run_forked(script, cwd=folder, env=os.environ, timeout_s=180)


@pytest.mark.seed("A6")
@pytest.mark.parametrize(
    ("script", "start"),
    [(SCRIPTS[0], forked), slow(SCRIPTS[0], fresh), *(slow(script, forked) for script in SCRIPTS[1:])],
    ids=lambda value: getattr(value, "stem", None) or value.__name__,
)
def test_example_runs(script, start, tmp_path):
    number = script.name[:2]
    code, said = start(script, tmp_path)
    assert code == 0, said[-4500:]
    if number == "01":
        before, after = (float(x) for x in said.rsplit("reward ", 1)[1].split(";")[0].split(" -> "))
        assert after > before + 0.2  # the tiny model has visibly learnt
        (documented,) = re.findall(
            r"^```text\n(batch: .*?)^```", (ROOT / "README.md").read_text("utf-8"), re.DOTALL | re.MULTILINE
        )
        printed = {without_numbers(line) for line in said.splitlines()}
        assert {without_numbers(line) for line in documented.splitlines()} - printed == {"..."}
    runs = [tmp_path / f"outputs/example_{number}/run"]
    if number == "08":
        runs = sorted(runs[0].iterdir())
        assert [run.name for run in runs] == ["1_reward_model", "2_ppo", "3_rejection"]
        words = [line.split() for line in said.splitlines() if "held-out reward" in line and ", digits " in line]
        reward, kl = ([float(w[w.index(name) + 1].rstrip(",")) for w in words] for name in ("reward", "KL"))
        assert reward[0] < reward[1] < reward[2]
        assert abs(kl[0]) < 0.01
        assert min(kl[1:]) > 1  # rejection sampling leads further away with some seeds, back with others
    for run in runs:
        assert (run / "summary.json").exists()


@pytest.mark.slow
def test_the_dataflow_as_a_chain_learns(tmp_path):
    code, said = forked(EXAMPLES / "dataflow_chain.py", tmp_path)
    assert code == 0, said[-4500:]
    rewards = [row["critic/score/mean"] for row in read_lines(tmp_path / "outputs/dataflow_chain/run/metrics.jsonl")]
    assert len(rewards) == 15
    assert rewards[-1] > rewards[0] + 0.1


RUN_BY = {  # the test that runs each part of examples/, besides the numbered files
    "agents": "tests/examples/test_examples.py",
    "data_preprocess": "tests/examples/test_examples.py",
    "dataflow_chain.py": "tests/examples/test_examples.py",
    "ppo_simple.py": "tests/runtime/test_example.py",
    "recipes": "tests/run/test_recipes.py",
    "shapes": "Makefile",  # the main jobs on pictures,
}


def test_every_example_has_a_test_that_runs_it():
    names = {file.relative_to(EXAMPLES).parts[0] for file in EXAMPLES.rglob("*.py")}
    assert names - {script.name for script in SCRIPTS} == set(RUN_BY)
    assert not [name for name, test in RUN_BY.items() if name not in (ROOT / test).read_text()]


AGENTS = ROOT / "examples/agents"
LINES = {"tool.py": 30, "environment.py": 40}


def test_they_are_short():
    for name, max_lines in LINES.items():
        assert len((AGENTS / name).read_text().splitlines()) <= max_lines


@pytest.mark.slow
@pytest.mark.parametrize("name", ["tool", "environment", "openai_agent"])
def test_they_train(name, tmp_path, monkeypatch):
    from verl.cli.main import main

    if name == "openai_agent" and not all(map(importlib.util.find_spec, ("openai", "uvicorn"))):
        pytest.skip("needs openai and the extra agents")
    monkeypatch.chdir(ROOT)
    make_tiny_model(tmp_path / "model")
    rows = [
        {
            "data_source": "powers",
            "prompt": [{"role": "user", "content": f"What is 2 to the power of {i}?"}],
            "reward_model": {"style": "rule", "ground_truth": str(2**i)},
        }
        for i in range(8)
    ]
    write_lines(tmp_path / "rows.jsonl", rows)
    text = (AGENTS / f"{name}.py").read_text()
    command = re.split(r'\n\n|"""', text[text.index("verl train") :])[0].replace("\\\n", " ")
    names = {"MODEL": f"{tmp_path}/model", "ROWS": f"{tmp_path}/rows.jsonl"}
    for shipped, value in names.items():
        command = command.replace(f"={shipped}", f"={value}")
    words = [word.replace("command:python", f"command:{sys.executable}") for word in shlex.split(command)[1:]]
    code = main(
        [
            *words,
            "data.train_batch_size=4",
            "data.max_prompt_length=600",
            "data.max_response_length=120",
            "actor_rollout_ref.rollout.n=2",
            "actor_rollout_ref.rollout.stop=['\\n']",
            "actor_rollout_ref.actor.ppo_mini_batch_size=4",
            "trainer.total_training_steps=1",
            f"trainer.default_local_dir={tmp_path}/run",
        ]
    )
    assert code == 0
    episodes = [
        record
        for line in (tmp_path / "run/episodes/step_000001.rank0.jsonl").read_text().splitlines()
        if (record := json.loads(line))["kind"] == "episode"
    ]
    assert len(episodes) == 8
    assert not [record["error"] for record in episodes if record["error"]]


PREPARATION = {
    "gsm8k": ({"question": "What is 40 + 2?", "answer": "40 + 2 = 42\n#### 42"}, "42", "so\n#### 42"),
    "math_dataset": (
        {"problem": "What is $\\frac{1}{2} + \\frac14$?", "solution": "It is $\\boxed{\\frac{3}{4}}$."},
        "\\frac{3}{4}",
        "thus \\boxed{\\frac{3}{4}}",
    ),
}


def test_there_is_one_row_for_each_script():
    assert {file.stem for file in (ROOT / "examples/data_preprocess").glob("*.py")} == set(PREPARATION)


@pytest.mark.skipif(importlib.util.find_spec("datasets") is None, reason="needs the extra 'scripts' (datasets)")
@pytest.mark.parametrize("name", PREPARATION)
def test_a_preparation_script_makes_rows_that_train(name, tmp_path):
    row, truth, answer = PREPARATION[name]
    for split, number in (("train", 5), ("test", 2)):
        (tmp_path / f"{split}.jsonl").write_text((json.dumps(row) + "\n") * number)
    folders = {
        "--local_dataset_path": tmp_path,
        "--local_save_dir": tmp_path / "out",
        "--hdfs_dir": tmp_path / "shared",
    }
    offline = {"PYTHONPATH": str(ROOT), "HF_HOME": str(tmp_path / "cache"), "HF_HUB_OFFLINE": "1"}
    script = ROOT / f"examples/data_preprocess/{name}.py"
    python(script, *(word for pair in folders.items() for word in pair), env={**os.environ, **offline}, timeout=180)
    assert (tmp_path / "shared/out/test.parquet").exists()
    rows = load_dataset(str(tmp_path / "out/train.parquet"), make_tokenizer(), config(max_prompt_length=500))
    assert len(rows) == 5
    assert rows[3]["reward_model"] == {"style": "rule", "ground_truth": truth}
    assert rows[3]["index"] == 3
    scored = default_compute_score(rows[3]["data_source"], answer, truth, rows[3]["extra_info"])
    assert (scored["score"] if isinstance(scored, dict) else scored) == 1


@pytest.mark.slow
@pytest.mark.parametrize(("name", "branches", "gain"), [
    ("helper", "all", 0.15), ("drafts", "all", 0.1), ("react", "longest", 0.1), ("schema", "longest", 0.3),
])  # fmt: skip
def test_agents_with_several_conversations_learn(tmp_path, name, branches, gain):
    if importlib.util.find_spec("openai") is None or (
        name == "schema" and importlib.util.find_spec("xgrammar") is None
    ):
        pytest.skip("needs openai and the extras agents and schemas")
    script = AGENTS / "conversations.py"
    done = subprocess.run(
        [sys.executable, str(script), name, branches], cwd=tmp_path, text=True, timeout=600, check=False,
        stdout=subprocess.PIPE, stderr=subprocess.STDOUT,
    )  # fmt: skip
    assert done.returncode == 0, done.stdout[-2000:]
    rows = read_lines(tmp_path / f"outputs/conversations/{name}_{branches}/metrics.jsonl")
    scores = [row["critic/score/mean"] for row in rows if "critic/score/mean" in row]
    assert sum(scores[-4:]) / 4 > sum(scores[:4]) / 4 + gain, scores
