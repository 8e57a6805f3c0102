"""`verl train` with a killed engine process ends with the samples and weights of the undisturbed run; slow.

    python -m pytest -m slow tests/rollout/test_vllm_lost.py

The native engine in a separate process (stand_in.py) simulates vLLM.
"""

import json
import os

import pytest
import torch

from tests.commands import python
from tests.json_lines import read_lines
from tests.runtime.conftest import assert_same_weights, base, jobs  # noqa: F401 - fixtures
from tests.runtime.ranks import ROOT, run

pytestmark = pytest.mark.slow
# few slots, so that not all samples end at once
VLLM = [f"actor_rollout_ref.rollout.{key}" for key in ("name=vllm", "max_num_seqs=4")] + ["trainer.test_freq=-1"]


@pytest.fixture(scope="module")
def train(jobs):  # noqa: F811
    def run(name, lost="", *changes):
        settings = jobs.overrides(name, *VLLM, "trainer.save_freq=1", "trainer.restart_backoff_s=0.02", *changes)
        environment = {k: v for k, v in os.environ.items() if k not in ("RANK", "WORLD_SIZE", "TORCHELASTIC_RUN_ID")}
        environment["VERL_TEST_WIDE_NORMS"] = "1"
        mark = jobs.root / f"{name}.lost"
        if lost:
            environment["VERL_TEST_LOST"] = f"{lost} {mark}"
        python("-m", "tests.rollout.stand_in", *settings, cwd=ROOT, env=environment, timeout=180)
        assert mark.exists() == bool(lost)
        return jobs.run(name)

    return run


@pytest.fixture(scope="module")
def undisturbed(train):
    return train("undisturbed")


def assert_equal(actual, expected):
    ours, theirs = actual.samples(), expected.samples()
    assert ours.keys() == theirs.keys()
    for name, rows in theirs.items():
        for key in ("response_ids", "log_probs", "score", "weight_version"):
            assert [r[key] for r in ours[name]] == [r[key] for r in rows], (name, key)
    ours, theirs = actual.weights(3), expected.weights(3)
    assert all(torch.equal(ours[name], weight) for name, weight in theirs.items())


def events(disturbed):
    file = disturbed.folder / "events.jsonl"
    return read_lines(file) if file.exists() else []


@pytest.mark.parametrize("moment", ["generate", "update"])
def test_the_engine_comes_back_in_place(moment, train, undisturbed):
    disturbed = train(moment, f"{moment} 2")
    assert_equal(disturbed, undisturbed)
    assert not events(disturbed), "the run itself went on"


def test_an_engine_of_one_of_two_ranks_comes_back(jobs, undisturbed):  # noqa: F811
    """Each rank has its own engine; one engine is killed, and the other rank does not notice."""
    mark = jobs.root / "ranks.lost"
    settings = jobs.overrides("ranks", *VLLM, "trainer.save_freq=3")
    run(2, "tests.rollout.stand_in", *settings, timeout_s=180, VERL_TEST_LOST=f"generate 2 {mark}")
    assert mark.exists()
    job = jobs.run("ranks")
    ours, theirs = job.samples(), undisturbed.samples()
    assert {name: [r["response_ids"] for r in rows] for name, rows in ours.items()} == {
        name: [r["response_ids"] for r in rows] for name, rows in theirs.items()
    }
    assert_same_weights(job, undisturbed, 3, rel=1e-9)


@pytest.mark.parametrize("moment", ["generate", "update"])
def test_without_restarts_of_the_engine_the_supervisor_starts_the_run_again(moment, train, undisturbed):
    disturbed = train(f"{moment}_0", f"{moment} 3", "actor_rollout_ref.rollout.max_engine_restarts=0")
    assert_equal(disturbed, undisturbed)
    assert any("vLLM process" in json.dumps(event) for event in events(disturbed)), events(disturbed)
