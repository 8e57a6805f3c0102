"""The Python of docs/coming-from-verl.md runs as it is written."""

import importlib.util
import os
import re
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]
BLOCKS = re.findall(r"```python\n(.*?)```", (ROOT / "docs/coming-from-verl.md").read_text(encoding="utf-8"), re.DOTALL)
PRINTED = ("critic.optim.lr=1e-05", "16")  # by each block


def test_each_block_is_looked_at():
    assert len(BLOCKS) == len(PRINTED)


@pytest.mark.parametrize("number", range(len(BLOCKS)))
def test_a_block_runs(number, tmp_path):
    if "import hydra" in BLOCKS[number] and importlib.util.find_spec("hydra") is None:
        pytest.skip("needs the extra 'scripts' (hydra-core)")
    (tmp_path / "block.py").write_text(BLOCKS[number], encoding="utf-8")
    environment = {**os.environ, "PYTHONPATH": str(ROOT)}
    done = subprocess.run(
        [sys.executable, "block.py"],
        cwd=tmp_path,
        env=environment,
        capture_output=True,
        text=True,
        timeout=120,
        check=False,
    )
    assert done.returncode == 0, done.stderr[-3000:]
    assert PRINTED[number] in done.stdout
