"""The files of examples/agents train as their first lines say, on a tiny model."""

import importlib.util
import json
import re
import shlex
import sys
from pathlib import Path

import pytest

from verl.models.tiny import make_tiny_model

ROOT = Path(__file__).parents[2]
AGENTS = ROOT / "examples/agents"
LINES = {"tool.py": 30, "environment.py": 40}


def test_they_are_short():
    for name, most in LINES.items():
        assert len((AGENTS / name).read_text().splitlines()) <= most


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
    (tmp_path / "rows.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
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
