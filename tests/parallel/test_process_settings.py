"""`import verl` sets how torch's threads wait, unless the user has, or torch has read its setting."""

import os
import subprocess
import sys

import pytest

SHOW = "import os; print(os.environ.get('GOMP_SPINCOUNT'))"


def spin_count(code, **environment):
    variables = {k: v for k, v in os.environ.items() if k not in ("GOMP_SPINCOUNT", "OMP_WAIT_POLICY")}
    command = [sys.executable, "-c", f"{code}; {SHOW}"]
    done = subprocess.run(
        command, env={**variables, **environment}, capture_output=True, text=True, check=True, timeout=60
    )
    return done.stdout.strip()


@pytest.mark.parametrize(
    ("code", "environment", "expected"),
    [
        ("import verl", {}, "1000"),
        ("import verl.cli.main", {}, "1000"),
        ("import verl", {"GOMP_SPINCOUNT": "5"}, "5"),
        ("import verl", {"OMP_WAIT_POLICY": "active"}, "None"),
        ("import sys; sys.modules['torch'] = None; import verl", {}, "None"),
    ],
)
def test_the_setting(code, environment, expected):
    assert spin_count(code, **environment) == expected
