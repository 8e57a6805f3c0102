"""Every single-character edit of a key is refused, and the key that was meant is named first.

A sample; `python benchmarks/fuzz.py keys` does all of them.
"""

import random
from collections import Counter

import pytest

from tests.config.edits import EXPECTED, edits, keys, outcome, typos_apart
from tests.config.helpers import refused
from verl.config.compat import one_typo_away

NUM_EDITS = 4000


def test_edited_keys_are_refused_with_the_right_suggestion():
    rng = random.Random(0)
    drawn = [(key, rng.choice(list(edits(key, rng, 1)))) for key in keys() for _ in range(1 + NUM_EDITS // len(keys()))]
    outcomes = Counter(outcome(key, edited) for key, edited in drawn)
    assert set(outcomes) <= EXPECTED, [o for o in outcomes if o not in EXPECTED][:5]
    assert outcomes["right first"] > 0.98 * len(drawn)


def test_whole_loads_refuse_them_too():
    rng = random.Random(1)
    for key in rng.sample(keys(), 25):
        edited = rng.choice(list(edits(key, rng, 1)))
        if outcome(key, edited).startswith("right"):
            assert repr(key) in refused(f"{edited}=1", match="There is no key")


def test_typos_equal_their_definition():
    rng = random.Random(2)
    for key in rng.sample(keys(), 3):
        edited = rng.choice(list(edits(key, rng, 1)))
        near = [k for k in keys() if k != edited and abs(len(k) - len(edited)) < 2 and k[:4] == edited[:4]]
        assert (
            one_typo_away(keys(), edited) == sorted(k for k in near if typos_apart(k, edited) == 1)
            or edited[:4] != key[:4]
        )


@pytest.mark.parametrize("key", ["trainer.placement.", "trainer.placement..x", ".trainer.nnodes", "trainer..nnodes"])
def test_a_dot_too_many_names_no_entry(key):
    assert "did you mean 'trainer." in refused(f"{key}=1", match="There is no key")


@pytest.mark.parametrize(
    "key", ["trainer/nnodes", "trainer.nn@odes", "trainer. nnodes", "trainer.nnodes ", "trainer.n\u0430odes"]
)
def test_marks_of_other_syntaxes_and_look_alikes(key):
    assert "did you mean 'trainer.nnodes'" in refused(f"{key}=1", match="There is no key")
