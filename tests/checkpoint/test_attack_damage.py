"""Damaged checkpoints never load as if they were whole, and the error names the damage. More: benchmarks/fuzz.py."""

import random
from collections import Counter

from tests.checkpoint.damage import KINDS, cases


def test_damaged_checkpoints(tmp_path):
    outcomes = Counter(cases(random.Random(0), 200, tmp_path))
    of_others = {kind for kind, _ in outcomes if kind.startswith("other tensors")}
    assert {kind for kind, _ in outcomes} - of_others == {kind.__name__ for kind in KINDS}
    assert len(of_others) == 5
    assert {what for _, what in outcomes} == {"refused", "older one taken", "whole"}
    assert {what for kind, what in outcomes if kind == "harmless"} == {"whole"}
    assert sum(n for (_, what), n in outcomes.items() if what == "whole") < 30
