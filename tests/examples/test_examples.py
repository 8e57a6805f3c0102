"""The numbered examples run as written, each in a folder of its own."""

import os
import subprocess
import sys
from pathlib import Path

import pytest

EXAMPLES = Path(__file__).parents[2] / "examples"
SCRIPTS = sorted(EXAMPLES.glob("0*.py"))


def test_there_are_five_and_the_readme_lists_them():
    assert len(SCRIPTS) == 5
    listed = (EXAMPLES / "README.md").read_text()
    assert all(script.name in listed for script in SCRIPTS)


@pytest.mark.parametrize(
    "script",
    [pytest.param(s, marks=pytest.mark.slow) if s.name[:2] in ("03", "04") else s for s in SCRIPTS],
    ids=lambda s: s.stem,
)
def test_example_runs(script, tmp_path):
    done = subprocess.run(
        [sys.executable, str(script)],
        cwd=tmp_path,
        capture_output=True,
        text=True,
        timeout=180,
        env=os.environ,
        check=False,
    )
    assert done.returncode == 0, done.stdout[-1500:] + done.stderr[-3000:]
    number = script.name[:2]
    if number == "01":
        before, after = (float(x) for x in done.stdout.rsplit("reward ", 1)[1].split(";")[0].split(" -> "))
        assert after > before + 0.2  # the tiny model has visibly learnt
    assert (tmp_path / f"outputs/example_{number}/run/summary.json").exists()
