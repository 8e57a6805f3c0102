"""Runs whose weights travel by a plan: tokens and weights are those of a single process, and what goes wrong stops the run."""

import json

import pytest

from tests.controller.conftest import assert_same, assert_same_weights, train_here
from tests.controller.ranks import run

SIZE = "actor_rollout_ref.rollout.tensor_model_parallel_size=2"
MODEL_BYTES = 8 * (264 * 64 + 64 + 2 * (2 * 64 + 64 * (64 + 32 + 32 + 64) + 3 * 64 * 128))  # tiny Llama, float64, tied
SIDES = {
    "divided": [SIZE],  # FSDP 2 -> tensor parallel 2
    "copies": [],  # FSDP 2 -> a copy on each rank
    "carried": ["trainer.placement={actor:[0],rollout:[1]}"],
    "adapters": ["actor_rollout_ref.model.lora_rank=4", "actor_rollout_ref.model.target_modules=all-linear"],
}
FAULTS = ("flips_a_bit", "loses_a_tensor", "hands_on_too_little")


@pytest.fixture(scope="module")
def alone(jobs):
    adapters = train_here(jobs, "adapters1", *SIDES["adapters"])
    whole = train_here(jobs, "alone")
    return {**dict.fromkeys(SIDES, whole), "adapters": adapters}


@pytest.fixture(scope="module")
def two_ranks(jobs):
    for name, changes in SIDES.items():
        jobs.add(name, *changes)
    for fault in FAULTS:
        jobs.add(fault, fault=fault)
    run(2, "tests.controller.reshard_ranks", jobs.file(), timeout_s=160)
    return jobs


def wire(jobs, name):
    """What each rank saw."""
    return [json.loads((jobs.run(name).folder / f"wire-{rank}.json").read_text()) for rank in range(2)]


@pytest.mark.parametrize("name", SIDES)
def test_tokens_and_weights_are_those_of_one_process(two_ranks, alone, name):
    assert_same(two_ranks.run(name), alone[name], rel=1e-10)
    assert_same_weights(two_ranks.run(name), alone[name], 3, rel=1e-10)


@pytest.mark.parametrize("name", ["divided", "copies", "carried"])
def test_what_travels_is_what_the_plan_says(two_ranks, name):
    for seen in wire(two_ranks, name):
        assert len(seen["updates"]) == 4, "one before the first step, and one after each"
        assert all(u["sent"] == u["traffic"] == seen["plan"] for u in seen["updates"])
        assert all(u["seconds"] > 0 for u in seen["updates"])
    sent = sum(seen["plan"] for seen in wire(two_ranks, name))
    # each copy lacks what the other rank trains; a rank that trains nothing lacks all
    lacking = {"copies": 2 * MODEL_BYTES / 2, "carried": MODEL_BYTES}
    assert sent == lacking.get(name, sent)
    assert sent <= MODEL_BYTES


def test_half_of_a_divided_copy_is_there_already(two_ranks):
    """Rows of column-parallel weights lie where they are needed: only those divided by columns, and norms, travel."""
    divided, copies = (sum(seen["plan"] for seen in wire(two_ranks, name)) for name in ("divided", "copies"))
    assert 0 < divided < 0.3 * copies


def test_adapters_are_merged_into_whole_weights(two_ranks):
    assert [seen["plan"] for seen in wire(two_ranks, "adapters")] == [None, None]


@pytest.mark.parametrize(
    ("fault", "num_updates", "words"),
    [
        ("flips_a_bit", 2, ["rank 1 does not hold what rank 0 sent of model.", "must not be used"]),
        ("loses_a_tensor", 2, ["Rank 1 should fill [32, 64] of model.layers.1.self_attn.k_proj.weight", "not there"]),
        ("hands_on_too_little", 0, ["without model.norm.weight", "would sample from old"]),
    ],
)
def test_a_fault_stops_all_ranks_with_the_same_sentence(two_ranks, fault, num_updates, words):
    first, second = wire(two_ranks, fault)
    assert first["error"] == second["error"]
    assert first["error"].startswith("ModelError: ")
    assert all(word in first["error"] for word in words), first["error"]
    assert [len(seen["updates"]) for seen in (first, second)] == [num_updates] * 2
    assert not (two_ranks.run(fault).folder / "metrics.jsonl").exists(), "the first step did not end"
