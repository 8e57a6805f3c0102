"""The counts of benchmarks/fuzz.py, a little of each part."""

import json
import logging
import os

import fuzz
import pytest


@pytest.fixture
def level():
    """The script silences verl for the rest of its process."""
    logger = logging.getLogger("verl")
    before = logger.level
    yield
    logger.setLevel(before)


@pytest.mark.usefixtures("level")
def test_fuzz(tmp_path, monkeypatch, capsys):
    monkeypatch.setattr(os, "fsync", lambda descriptor: None)
    counts = fuzz.main(
        ["rows", "checkpoints", "--rows", "30", "--checkpoints", "12", "--json", str(tmp_path / "f.json")]
    )
    assert {part: sum(c.values()) for part, c in counts.items()} == {"rows": 30, "checkpoints": 12}
    saved = json.loads((tmp_path / "f.json").read_text())
    assert sum(saved["rows"].values()) == 30
    assert "checkpoints: 12 cases, seed 0" in capsys.readouterr().out
