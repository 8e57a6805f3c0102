"""The snippets of docs/tinker.md run as they stand."""

import os
import re
import subprocess
import sys
from pathlib import Path

import pytest

pytest.importorskip("tinker", reason="the extra tinker is not installed")

from tests.tinker.served import running  # noqa: E402

TEXT = (Path(__file__).parents[2] / "docs" / "tinker.md").read_text(encoding="utf-8")
SNIPPETS = re.findall(r"```python\n(.*?)```", TEXT, re.DOTALL)


@pytest.mark.parametrize("number", range(len(SNIPPETS)))
def test_a_snippet_runs(bench, tmp_path, number):
    with running(bench, tmp_path) as served:
        served.service.names.append("model")
        environment = {
            **os.environ,
            "TINKER_BASE_URL": served.url,
            "TINKER_API_KEY": "tml-any",
            "TINKER_TELEMETRY": "0",
            "PYTHONFAULTHANDLER": "1",  # an abort of the client names its threads
        }
        done = subprocess.run(
            [sys.executable, "-W", "ignore", "-c", SNIPPETS[number]], env=environment, timeout=120, check=False,
            capture_output=True, text=True, cwd=tmp_path,
        )  # fmt: skip
        assert done.returncode == 0, done.stderr[-2000:]
