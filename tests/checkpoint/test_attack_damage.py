"""Damaged checkpoints never load as if they were whole, and the error names the damage. More: benchmarks/fuzz.py."""

import random
from collections import Counter

from tests.checkpoint.attack import state_of
from tests.checkpoint.damage import KINDS, forged, outcome, two_checkpoints


def test_damaged_checkpoints(tmp_path):
    saved = two_checkpoints(tmp_path / "saved")
    content, rng = state_of(tmp_path / "saved"), random.Random(0)
    outcomes = Counter(outcome(rng, tmp_path / "run", content, saved) for _ in range(150))
    assert {kind for kind, _ in outcomes} == {kind.__name__ for kind in KINDS}
    assert {what for _, what in outcomes} == {"refused", "older one taken", "whole"}
    assert {what for kind, what in outcomes if kind == "harmless"} == {"whole"}
    assert sum(n for (_, what), n in outcomes.items() if what == "whole") < 30


def test_checkpoints_of_another_model(tmp_path):
    rng = random.Random(0)
    outcomes = Counter(forged(rng, tmp_path / "run") for _ in range(25))
    assert len(outcomes) == 5
