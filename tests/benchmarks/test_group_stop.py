"""benchmarks/group_stop.py: a SIGTERM for the process group of a run on each runtime."""

import random

import group_stop
import pytest


@pytest.mark.slow
@pytest.mark.parametrize("kind", group_stop.KINDS)
def test_a_run_saves_and_ends_when_its_group_is_asked_to(kind, tmp_path):
    found = group_stop.stop(group_stop.endless_task(tmp_path), kind, "run", random.Random(1))
    assert found.is_good, found
