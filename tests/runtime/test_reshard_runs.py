"""Runs whose weights travel by a plan: tokens and weights equal a single process's, and every fault stops the run
before a sample of wrong weights trains.

Faults, each in the second update of a run, on the second rank (reshard_ranks.py): a bit flipped, half a bucket lost, two
tensors swapped, a tensor dropped by the engine or by the trainer, a stale version, other weights than the verified
weights, and the death of the engine's process.
"""

import json
import signal

import pytest

from tests.runtime.conftest import PPO, TWO_STEPS, assert_same, assert_same_weights, train_here
from tests.runtime.ranks import Ranks, run
from verl.models.tiny import make_tiny_model

SIZE = "actor_rollout_ref.rollout.tensor_model_parallel_size=2"
MODEL_BYTES = 8 * (264 * 64 + 64 + 2 * (2 * 64 + 64 * (64 + 32 + 32 + 64) + 3 * 64 * 128))  # tiny Llama, float64, tied
SIDES = {
    "divided": [SIZE],  # FSDP 2 -> tensor parallel 2
    "copies": [],  # FSDP 2 -> a copy on each rank
    "carried": ["trainer.placement={actor:[0],rollout:[1]}"],
    "adapters": ["actor_rollout_ref.model.lora_rank=4", "actor_rollout_ref.model.target_modules=all-linear"],
    "one_trains": [SIZE, "trainer.placement={actor:[0],rollout:[0,1]}"],
}
EXPERTS = [SIZE, "actor_rollout_ref.actor.fsdp_config.expert_parallel_size=2"]  # EP 2 -> tensor parallel 2
ADAPTER_BYTES = 8 * 4 * 2 * (2 * (64 + 64) + 2 * (64 + 32) + 3 * (64 + 128))  # rank 4, two layers, float64
FAULTS = {
    "flips_a_bit": ["rank 1 does not hold what rank 0 sent for model.", "must not be used"],
    "loses_half_a_bucket": ["rank 1 does not hold what rank 0 sent for model.", "must not be used"],
    "swaps_two": ["rank 1 does not hold", "for model.layers.1.self_attn.k_proj.weight", "must not be used"],
    "loses_a_tensor": ["Rank 1 should fill [32, 64] of model.layers.1.self_attn.k_proj.weight", "not there"],
    "hands_on_too_little": ["missing parameter model.norm.weight", "would keep its old value"],
    "keeps_its_version": ["were made by weights of version 0, but only version 1 may train"],
}
IN_OWN_MEMORY = ("flips_a_bit", "loses_half_a_bucket", "swaps_two")  # rank 1 needs some for that


@pytest.fixture(scope="module")
def mixture(tmp_path_factory):
    """A model whose layers have four experts."""
    path = make_tiny_model(tmp_path_factory.mktemp("models") / "mixture", "qwen3_moe", moe_intermediate_size=16)
    return [f"actor_rollout_ref.model.path={path}"]


@pytest.fixture(scope="module")
def odd(tmp_path_factory):
    """PPO with one sample of each prompt; the model's vocabulary does not divide by 2, and its heads are normed."""
    sizes = {"vocab_size": 265, "tie_word_embeddings": False}
    path = make_tiny_model(tmp_path_factory.mktemp("models") / "odd", "qwen3", **sizes)
    return [*PPO, f"actor_rollout_ref.model.path={path}", "actor_rollout_ref.rollout.n=1"]


@pytest.fixture(scope="module")
def alone(jobs, mixture, odd):
    """Runs of a single process, whose sampler computes directly from the weights; a divided model's sampler calls modules."""
    adapters = train_here(jobs, "adapters1", *TWO_STEPS, *SIDES["adapters"])
    experts = train_here(jobs, "experts1", *TWO_STEPS, *mixture)
    undivided = train_here(jobs, "alone", *TWO_STEPS)
    return {
        **dict.fromkeys(SIDES, undivided),
        "adapters": adapters,
        "experts": experts,
        "odd": train_here(jobs, "odd1", *TWO_STEPS, *odd),
    }


@pytest.fixture(scope="module")
def two_ranks(jobs, mixture, odd):
    for name, changes in SIDES.items():
        jobs.add(name, *TWO_STEPS, *changes)
    jobs.add("experts", *TWO_STEPS, *EXPERTS, *mixture)
    jobs.add("odd", *TWO_STEPS, SIZE, *odd)
    for fault in FAULTS:
        jobs.add(fault, *([SIZE] if fault in IN_OWN_MEMORY else []), fault=fault)
    jobs.add(
        "generates_with_others", SIZE, fault="generates_with_others"
    )  # the last one: the other rank waits for our end
    run(2, "tests.runtime.reshard_ranks", jobs.file(), timeout_s=160)
    return jobs


def wire(jobs, name):
    """The report of each rank."""
    return [json.loads((jobs.run(name).folder / f"wire-{rank}.json").read_text()) for rank in range(2)]


@pytest.mark.parametrize("name", [*SIDES, "experts", "odd"])
def test_tokens_and_weights_match_one_process(two_ranks, alone, name):
    rel = (
        1e-6 if name == "experts" else 1e-10
    )  # routers round to float32, of which sums in another order change the last bit
    assert_same(two_ranks.run(name), alone[name], rel=rel)
    assert_same_weights(two_ranks.run(name), alone[name], 2, rel=rel)


def test_a_rank_stores_the_keys_of_its_heads(two_ranks, alone):
    for ours, undivided in zip(two_ranks.run("divided").rows, alone["divided"].rows, strict=True):
        assert 2 * ours["rollout/kv_cache_bytes"] == undivided["rollout/kv_cache_bytes"] > 0


@pytest.mark.seed("C3")
@pytest.mark.parametrize("name", ["divided", "copies", "carried", "adapters", "experts"])
def test_the_memory_of_a_switch_is_a_metric(two_ranks, alone, name):
    assert all(
        row["rollout/switch_peak_ratio"] >= 1 <= 1 + row["rollout/switch_peak_gb"] for row in two_ranks.run(name).rows
    )
    assert not any("rollout/switch_peak_ratio" in row for row in alone[name].rows), "nothing is copied there"


@pytest.mark.parametrize("name", ["divided", "copies", "carried", "experts"])
def test_what_travels_is_what_the_plan_says(two_ranks, name):
    for report in wire(two_ranks, name):
        assert len(report["updates"]) == 3, "one before the first step, and one after each"
        assert all(u["sent"] == u["traffic"] == report["plan"] for u in report["updates"])
        assert all(u["seconds"] > 0 for u in report["updates"])
    sent = sum(report["plan"] for report in wire(two_ranks, name))
    # what both ranks generate with lies in one memory, and lacks there what rank 1 trains; a rank that trains nothing lacks all
    lacking = {"copies": MODEL_BYTES / 2, "carried": MODEL_BYTES}
    assert sent == lacking.get(name, sent)
    assert sent <= MODEL_BYTES


def test_half_of_a_divided_copy_is_there_already(two_ranks):
    """Rows of column-parallel weights lie where they are needed: only those divided by columns, and norms, travel."""
    divided, copies = (sum(report["plan"] for report in wire(two_ranks, name)) for name in ("divided", "copies"))
    assert 0 < divided < 0.3 * copies


def test_experts_stay_where_they_are_trained(two_ranks):
    """Halves of column-divided tensors (o_proj) travel, and of tensors on both ranks: norms of layers and heads, routers."""
    shared = 64 + 2 * (2 * 64 + 2 * 16 + 4 * 64)
    assert sum(report["plan"] for report in wire(two_ranks, "experts")) == 8 * (2 * 64 * 64 // 2 + shared)


def test_only_adapters_travel(two_ranks):
    """In the memory of both copies the half of them is lacking that rank 1 trains."""
    assert sum(report["plan"] for report in wire(two_ranks, "adapters")) == ADAPTER_BYTES // 2
    assert all(u["sent"] == report["plan"] for report in wire(two_ranks, "adapters") for u in report["updates"])


def steps(jobs, name):
    file = jobs.run(name).folder / "metrics.jsonl"
    return len(file.read_text().splitlines()) if file.exists() else 0


@pytest.mark.parametrize("fault", FAULTS)
def test_a_fault_stops_all_ranks_with_the_same_sentence(two_ranks, fault):
    first, second = wire(two_ranks, fault)
    assert first["error"] == second["error"]
    assert first["error"].startswith("ModelError: ")
    assert all(word in first["error"] for word in FAULTS[fault]), first["error"]
    num_updates = 0 if fault == "hands_on_too_little" else 2
    assert [len(report["updates"]) for report in (first, second)] == [num_updates] * 2
    # a step ends with its update: the first was good, and samples after the second do not train
    assert steps(two_ranks, fault) == (1 if fault == "keeps_its_version" else 0)


def test_an_engine_that_generated_with_other_weights(two_ranks):
    """The digests of the update were right; they are compared with the engine's weights again before its samples train."""
    first, second = wire(two_ranks, "generates_with_others")
    assert "ModelError: After the weight sync, rank 1 does not hold" in first["error"]
    assert "Rank 1 failed in rollout.end_generation" in first["error"]
    assert second["error"].startswith("ModelError: After the weight sync, rank 1 does not hold")
    assert "for model.norm.weight" in second["error"]
    assert steps(two_ranks, "generates_with_others") == 1


def test_an_engine_that_dies_in_an_update(jobs):
    """The rank that is left stops with a sentence that names the other, and nothing is trained on what came of it."""
    killed = jobs.add("dies_in_an_update", fault="dies_in_an_update")
    with Ranks(2, "tests.runtime.reshard_ranks", jobs.file()) as ranks:
        codes, texts = ranks.wait()
    assert codes == [0, -signal.SIGKILL], "\n".join(text[-3000:] for text in texts)
    report = json.loads((killed.folder / "wire-0.json").read_text())
    assert report["error"].startswith("WorkerLostError: ")
    assert "rank 1 has ended or cannot be reached" in report["error"]
    assert len(report["updates"]) == 2
    assert steps(jobs, "dies_in_an_update") == 0
