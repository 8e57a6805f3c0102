"""benchmarks/chaos/group_stop.py: a SIGTERM for the process group of a run on each runtime, or for each of its processes."""

import random

import group_stop
import pytest


@pytest.mark.slow
@pytest.mark.parametrize("each", [False, True], ids=["group", "each"])
@pytest.mark.parametrize("kind", group_stop.KINDS)
def test_a_run_saves_and_ends_when_it_is_asked_to(kind, each, tmp_path):
    stopped = group_stop.stop(group_stop.endless_task(tmp_path), kind, "run", random.Random(1), each=each)
    assert stopped.is_good, stopped
