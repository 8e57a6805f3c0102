"""TRL's log of training steps, from its own environment (benchmarks/peers/peer_env.py), for tests that compare with it."""

import json
import subprocess
from pathlib import Path

import pytest

from tests.house.source import ROOT
from tests.json_lines import write_lines
from tests.run.conftest import train_run
from verl.registry import load_module

NUM_STEPS, BATCH_SIZE = 10, 4

peer_env = load_module(str(ROOT / "benchmarks" / "peers" / "peer_env.py"))


def python_of(peer):
    """The Python of the environment of `peer`. Skips the test without it."""
    python = peer_env.python_of(peer_env.default_folder(peer))
    if not python.exists():
        pytest.skip(f"The environment of {peer} is not there; benchmarks/peers/peer_env.py makes it")
    return python


def answer_of(script, task, folder):
    """The answer of a `script` of this folder to `task` in TRL's environment."""
    python = python_of("trl")
    (folder / "task.json").write_text(json.dumps(task))
    done = subprocess.run(
        [python, Path(__file__).parent / script, folder / "task.json", folder / "answer.json"],
        env=peer_env.clean_environment() | {"HF_HUB_OFFLINE": "1", "HF_DATASETS_CACHE": str(folder / "cache")},
        capture_output=True,
        text=True,
        timeout=580,
    )
    assert not done.returncode, done.stderr[-3000:]
    return json.loads((folder / "answer.json").read_text())


def trl_logs(cases, folder):
    """name -> the log of every step. `cases` as tests/run/trl_steps.py describes them: one process for all, because its
    imports take longer than the steps."""
    return answer_of("trl_steps.py", {"cases": cases}, folder)


def trl_case(model, rows, template, lr, **more):
    """A case of `trl_logs` with the settings that all comparisons share; `args` are further ones of TRL's config."""
    common = {
        "per_device_train_batch_size": BATCH_SIZE,
        "max_steps": NUM_STEPS,
        "learning_rate": lr,
        "weight_decay": 0.0,
    }
    return {"model": str(model), "rows": rows, "template": template, **more, "args": {**common, **more.get("args", {})}}


def paired_steps(log, program, folder, case, dtype, *overrides):
    """Pairs (our metrics, TRL's) of every step: our program on the rows of `case` against the `log` of TRL."""
    (folder / "template.jinja").write_text(case["template"])
    write_lines(folder / "train.jsonl", case["rows"])
    settings = [
        f"model.path={case['model']}", f"model.custom_chat_template={folder / 'template.jinja'}",
        "model.enable_gradient_checkpointing=False", f"data.train_files={folder / 'train.jsonl'}",
        f"data.train_batch_size={BATCH_SIZE}", "data.shuffle=False", f"engine.dtype={dtype}",
        f"optim.lr={case['args']['learning_rate']}", "optim.weight_decay=0.0", "trainer.logger=[file]",
        f"trainer.total_training_steps={NUM_STEPS}",
    ]  # fmt: skip
    ours = train_run(folder / "run", settings, overrides, program).training_rows()
    assert len(ours) == len(log) == NUM_STEPS
    return list(zip(ours, log, strict=True))
