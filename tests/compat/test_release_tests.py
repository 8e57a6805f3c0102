"""The CPU tests of release 0.9.1 that pass here. Set VERL_RELEASE to its source archive (tests/compat/release_tests.py)."""

import os
from pathlib import Path

import pytest

from tests.compat.release_tests import count

LEAST = 220


@pytest.mark.slow
@pytest.mark.skipif("VERL_RELEASE" not in os.environ, reason="VERL_RELEASE names no archive of the release")
def test_enough_of_the_tests_of_the_release_pass():
    outcomes = count(Path(os.environ["VERL_RELEASE"]))
    passed = sum(outcome.counts["passed"] for outcome in outcomes.values())
    listing = {place: outcome.failures for place, outcome in outcomes.items() if outcome.failures}
    assert passed >= LEAST, listing
