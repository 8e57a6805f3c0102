"""The scripts of benchmarks/ import each other by file name, as they do when run; here that folder is put on the path."""

import sys
from pathlib import Path

import pytest

BENCHMARKS = Path(__file__).resolve().parents[2] / "benchmarks"
FOLDERS = [str(BENCHMARKS), *(str(BENCHMARKS / name) for name in ("peers", "chaos"))]
sys.path[:0] = FOLDERS


@pytest.fixture(scope="session")
def tiny_work(tiny_llama):
    """The options of every script for a tiny model and one round."""
    return [
        *("--model", str(tiny_llama), "--rounds", "1", "--prompts", "2", "--samples", "4"),
        *("--prompt-tokens", "12", "--response-tokens", "6", "--learning-rate", "0.001", "--limit-s", "100"),
    ]
