"""The numbered examples run as written, each in its own folder."""

import os
import subprocess
import sys
from pathlib import Path

import pytest

from tests.forked import run_forked
from tests.slow import slow

EXAMPLES = Path(__file__).parents[2] / "examples"
SCRIPTS = sorted(EXAMPLES.glob("0*.py"))


def test_there_are_nine_and_the_readme_lists_them():
    assert len(SCRIPTS) == 9
    listed = (EXAMPLES / "README.md").read_text()
    assert all(script.name in listed for script in SCRIPTS)


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
    runs = [tmp_path / f"outputs/example_{number}/run"]
    if number == "08":
        runs = sorted(runs[0].iterdir())
        assert [run.name for run in runs] == ["1_reward_model", "2_ppo", "3_rejection"]
        words = [line.split() for line in said.splitlines() if "held-out reward" in line and ", digits " in line]
        reward, kl = ([float(w[w.index(name) + 1].rstrip(",")) for w in words] for name in ("reward", "KL"))
        assert reward[0] < reward[1] < reward[2]
        assert abs(kl[0]) < 0.01 < kl[1] < kl[2]
    for run in runs:
        assert (run / "summary.json").exists()
