"""Two ranks that share an engine process: samples, metrics and weights equal a single-process run's. The native engine
in a separate process simulates vLLM (tests/rollout/stand_in.py)."""

import pytest

from tests.json_lines import read_lines
from tests.runtime.conftest import TWO_STEPS, assert_same_weights, train_here
from tests.runtime.ranks import run
from verl.data_proto.samples import PromptRequest, SamplingParams
from verl.rollout.api import RolloutEngine
from verl.rollout.weight_version import PassiveRollout

VLLM = "actor_rollout_ref.rollout.name=vllm"
SIZE = "actor_rollout_ref.rollout.tensor_model_parallel_size"


@pytest.fixture(scope="module")
def alone(jobs):
    return train_here(jobs, "alone", *TWO_STEPS)


def start(jobs, num_ranks, *changes, **more):
    """A run of ranks with the stand-in; the ids of the processes that started an engine."""
    name = f"ranks{num_ranks}_{len(changes)}"
    starts = jobs.root / f"{name}.starts"
    run(
        num_ranks, "tests.rollout.stand_in", *jobs.overrides(name, *TWO_STEPS, VLLM, f"{SIZE}=2", *changes),
        timeout_s=180, VERL_TEST_STARTS=starts, **more,
    )  # fmt: skip
    return jobs.run(name), read_lines(starts)


def assert_equal(actual, alone):
    """Not all metrics are comparable: the log-probs of an engine with separate weights are computed again."""
    ours, theirs = actual.samples(), alone.samples()
    assert ours.keys() == theirs.keys()
    for name, rows in theirs.items():
        for key in ("response_ids", "score", "uid", "weight_version"):
            assert [row[key] for row in ours[name] if key in row] == [row[key] for row in rows if key in row], (
                name,
                key,
            )
    # the log-probs of such an engine are kept in float32
    assert max(row["training/rollout_probs_diff_max"] for row in actual.rows) < 1e-6
    assert_same_weights(actual, alone, 2, rel=1e-10)


def test_one_process_generates_for_both_ranks(jobs, alone):
    joint, starts = start(jobs, 2)
    assert [engine["tensor_parallel_size"] for engine in starts] == [2]
    assert_equal(joint, alone)


@pytest.mark.slow
@pytest.mark.parametrize(
    ("num_ranks", "changes", "num_engines"),
    [(4, (), 2), (3, ("trainer.placement={actor:[0],rollout:[1,2]}",), 1)],
    ids=["two engines on four ranks", "an engine on ranks that do not train"],
)
def test_more_ranks(num_ranks, changes, num_engines, jobs, alone):
    joint, starts = start(jobs, num_ranks, *changes)
    assert len({engine["parent"] for engine in starts}) == num_engines
    assert_equal(joint, alone)


def test_a_rank_without_an_engine_takes_part_in_all_calls():
    engine, taken = PassiveRollout("the model without numbers", "tokenizer", "config", eos_token_ids=[1], own=None), []
    assert isinstance(engine, RolloutEngine)
    engine.load(taken.append(name) for name in ("one", "two"))
    assert taken == ["one", "two"], "a gather waits for every rank"
    engine.publish(3)
    assert engine.weight_version == 3
    assert engine.generate([PromptRequest(0, (1, 2))], SamplingParams(), step=0) == []
    assert engine.stats() == {}
