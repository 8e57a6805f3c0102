"""TRL's log of training steps, from its own environment (benchmarks/peer_env.py), for tests that compare with it."""

import json
import subprocess
from pathlib import Path

import pytest

from tests.house.source import ROOT
from verl.registry import load_module

peer_env = load_module(str(ROOT / "benchmarks" / "peer_env.py"))


def trl_logs(cases, folder, timeout_s=280):
    """name -> the log of every step. `cases` as tests/run/trl_steps.py describes them: one process for all, because its
    imports take longer than the steps. Skips the test where TRL's environment is not there."""
    if not peer_env.is_ready("trl", peer_env.default_folder("trl")):
        pytest.skip("TRL's environment is not there; benchmarks/peer_env.py makes it")
    (folder / "task.json").write_text(json.dumps({"cases": cases}))
    done = subprocess.run(
        [
            peer_env.python_of(peer_env.default_folder("trl")),
            Path(__file__).with_name("trl_steps.py"),
            folder / "task.json",
            folder / "answer.json",
        ],
        env=peer_env.clean_environment() | {"HF_HUB_OFFLINE": "1", "HF_DATASETS_CACHE": str(folder / "cache")},
        capture_output=True,
        text=True,
        timeout=timeout_s,
    )
    assert not done.returncode, done.stderr[-3000:]
    return json.loads((folder / "answer.json").read_text())
