"""Every rank runs the program: tokens, losses and weights equal a single process's in every arrangement.

All runs on one number of ranks share one start of the processes, which costs more than a run.
"""

import shutil

import pytest

from tests.json_lines import read_lines
from tests.runtime.conftest import EVERY_SECOND, PPO, assert_same, assert_same_weights, assert_versions, train_here
from tests.runtime.ranks import run
from verl.models.tiny import make_tiny_model

pytestmark = pytest.mark.seed("A2")

SPLIT = "trainer.placement={rollout:[0],actor:[1],critic:[0],reference:[1],reward:[1]}"
FLOAT32 = ("actor_rollout_ref.actor.fsdp_config.dtype=float32", "actor_rollout_ref.actor.optim.lr=0.00002")
ACTOR, CRITIC = "actor_rollout_ref.actor.fsdp_config", "critic.fsdp"


def both(key, size):
    return [f"{ACTOR}.{key}={size}", f"{CRITIC}.{key}={size}"]


PPO_STEPS = 2
PPO = [*PPO, *(f"trainer.{key}={PPO_STEPS}" for key in ("total_training_steps", "test_freq", "save_freq"))]
OLDER_KEYS = [
    f"actor_rollout_ref.rollout.{key}"
    for key in ("prefetch_num=2", "partial_rollout=True", "keep_partial_kv_cache=True")
]
# name -> changes of the config. GRPO on two ranks is a run of test_reshard_runs.py, "copies"
ON_FOUR = {
    "fsdp4": [],
    "sequence2_fsdp2": [*both("ulysses_sequence_parallel_size", 2), "actor_rollout_ref.ref.memory_map=True"],
    "tensor2_fsdp2": both("tensor_parallel_size", 2),
}
APART = [
    "trainer.placement={actor:[0,1],rollout:[2,3],critic:[2,3],reference:[3],reward:[1]}",
    "actor_rollout_ref.actor.use_dynamic_bsz=True",
]


# several micro-batches in each optimizer step, of a model so narrow that their tokens weigh more than its weights
MICRO_BATCHES = [
    "actor_rollout_ref.model.external_lib=tests.runtime.update_memory",
    "actor_rollout_ref.actor.ppo_micro_batch_size_per_gpu=1",
    "data.max_response_length=48",
    f"{ACTOR}.use_3d_hybrid=True",
]
PHASES = (
    "[{from_step:2,changes:{batch_group_size:5}},"
    "{from_step:3,changes:{batch_group_size:1,enable_chunked_attention:True,chunk_size:16}}]"
)
WATCHED = {"watched2": [], "phases2": [f"trainer.dynamic_config={PHASES}"], "layers2": [f"{ACTOR}.layer_per_group=2"]}


@pytest.fixture(scope="module")
def experts(tmp_path_factory):
    """A tiny model with experts, in both roles."""
    path = make_tiny_model(tmp_path_factory.mktemp("models") / "moe", "qwen3_moe", moe_intermediate_size=16)
    return [f"actor_rollout_ref.model.path={path}", f"critic.model.path={path}"]


@pytest.fixture(scope="module")
def narrow(tmp_path_factory):
    return make_tiny_model(tmp_path_factory.mktemp("models") / "narrow", hidden_size=16, intermediate_size=256)


@pytest.fixture(scope="module")
def two_ranks(jobs):
    """All runs on two ranks of the default run."""
    jobs.add("ppo_fsdp2", *PPO, has_scorers=True)
    jobs.add("every_second", *EVERY_SECOND)
    jobs.add("split2", *PPO, SPLIT)
    jobs.add("older_keys2", *OLDER_KEYS)
    saving = "actor_rollout_ref.actor.checkpoint.async_save=True"
    jobs.add("resumed2", "trainer.total_training_steps=2", "trainer.save_freq=2", "trainer.test_freq=-1", saving)
    jobs.add("resumed2", "trainer.save_freq=3", "trainer.test_freq=3", saving)
    run(2, "tests.runtime.several_runs", jobs.file(), timeout_s=300)
    return jobs


@pytest.fixture(scope="module")
def four_ranks(jobs):
    for name, changes in ON_FOUR.items():
        jobs.add(f"grpo_{name}", *changes)
        jobs.add(f"ppo_{name}", *PPO, *changes)
    jobs.add("ppo_apart4", *PPO, *APART)
    jobs.add("float4", *FLOAT32)
    run(4, "tests.runtime.several_runs", jobs.file(), timeout_s=300)
    return jobs


@pytest.fixture(scope="module")
def alone(jobs):
    """The runs of a single process, by algorithm."""
    return {"grpo": train_here(jobs, "grpo1"), "ppo": train_here(jobs, "ppo1", *PPO)}


def assert_equal(run_of_ranks, reference, algorithm):
    assert_same(run_of_ranks, reference, rel=1e-10)
    step, roles = (PPO_STEPS, ("actor", "critic")) if algorithm == "ppo" else (3, ("actor",))
    for role in roles:
        assert_same_weights(run_of_ranks, reference, step, rel=1e-10, role=role)


def test_two_ranks(two_ranks, alone):
    assert_equal(two_ranks.run("ppo_fsdp2"), alone["ppo"], "ppo")


@pytest.mark.slow
def test_experts_on_two_ranks(jobs, experts):
    run_of_ranks = jobs.add("ppo_experts2", *PPO, *experts, *both("expert_parallel_size", 2))
    run(2, "tests.runtime.several_runs", jobs.file(), timeout_s=300)
    assert_equal(run_of_ranks, train_here(jobs, "ppo_experts1", *PPO, *experts), "ppo")


@pytest.mark.slow
@pytest.mark.parametrize("algorithm", ["grpo", "ppo"])
@pytest.mark.parametrize("name", ON_FOUR)
def test_four_ranks(four_ranks, alone, name, algorithm):
    assert_equal(four_ranks.run(f"{algorithm}_{name}"), alone[algorithm], algorithm)


@pytest.mark.seed("D3")
def test_roles_on_ranks_of_their_own(two_ranks, alone):
    """Weights travel from the rank that trains to the rank that generates, scores are made on the other one."""
    assert_equal(two_ranks.run("split2"), alone["ppo"], "ppo")


@pytest.mark.slow
def test_roles_on_several_ranks_each(four_ranks, alone):
    assert_equal(four_ranks.run("ppo_apart4"), alone["ppo"], "ppo")


@pytest.mark.slow
def test_phases_change_communication_and_memory_and_not_the_losses(jobs, narrow):
    """Step 2 gathers and sums once for all micro-batches, step 3 computes in chunks."""
    for name, changes in WATCHED.items():
        jobs.add(name, f"actor_rollout_ref.model.path={narrow}", *MICRO_BATCHES, *changes)
    run(2, "tests.runtime.several_runs", jobs.file(), timeout_s=200)
    plain, ours = jobs.run("watched2"), jobs.run("phases2")
    for row, expected in zip(ours.rows, plain.rows, strict=True):
        for name in ("actor/pg_loss", "actor/grad_norm"):
            assert row[name] == pytest.approx(expected[name], rel=1e-6, abs=1e-9)
    for name in ("phases2", "layers2"):
        assert_same_weights(jobs.run(name), plain, 3, rel=1e-10)
    sent = [[row["communication"]["bytes"] for row in timeline_of(run)] for run in (plain, ours)]
    held = [[row["actor/peak_bytes"] for row in run.rows] for run in (plain, ours)]
    assert sent[1][0] == pytest.approx(sent[0][0], rel=0.01)
    assert sent[1][1] < 0.5 * sent[0][1]
    assert sent[1][2] == pytest.approx(sent[0][2], rel=0.01)
    assert held[1][2] < 0.95 * held[0][2], (sent, held)
    assert ours.rows[2]["training/dynamic_config/actor/batch_group_size"] == 1


@pytest.mark.slow
def test_the_first_update_of_a_step_takes_what_its_rank_has_sampled(jobs):
    """If sampler and trainer have equal bits; else no run has the metric."""
    narrow = [f"{ACTOR}.dtype=bfloat16", "actor_rollout_ref.actor.ppo_mini_batch_size=5"]
    runs = [jobs.add(f"reuse{gb}", *narrow, f"actor_rollout_ref.rollout.reuse_activations_gb={gb}") for gb in (1, 0)]
    run(2, "tests.runtime.several_runs", jobs.file(), timeout_s=300)
    if "actor/reused_activations_ratio" not in runs[0].rows[0]:
        pytest.skip("the sampler of this processor records nothing")
    for row, computed in zip(runs[0].rows, runs[1].rows, strict=True):
        assert row["actor/reused_activations_ratio"] == 1.0
        assert row["actor/grad_norm"] == pytest.approx(computed["actor/grad_norm"])


def timeline_of(run):
    return read_lines(run.folder / "timeline.jsonl")


@pytest.mark.slow
def test_float32(four_ranks, jobs):
    reference = train_here(jobs, "float1", *FLOAT32)
    assert_same(four_ranks.run("float4"), reference, rel=1e-5)
    assert_same_weights(four_ranks.run("float4"), reference, 3, rel=1e-5)


def test_unfinished_responses_return_to_the_rank_that_has_their_keys(two_ranks, jobs):
    assert_same(two_ranks.run("older_keys2"), train_here(jobs, "older_keys1", *OLDER_KEYS), rel=1e-10)


def test_weights_travel_every_second_step(two_ranks):
    assert_versions(two_ranks.run("every_second"))


def test_a_resumed_run_is_the_unbroken_one(two_ranks, alone):
    assert_same_weights(two_ranks.run("resumed2"), alone["grpo"], 3, rel=1e-10)
    assert [row["step"] for row in two_ranks.run("resumed2").rows] == [1, 2, 3]


def test_the_other_rank_has_a_log_and_writes_nothing_else(two_ranks):
    folder = two_ranks.run("ppo_fsdp2").folder
    assert (folder / "logs" / "rank_1.log").exists()
    assert len(two_ranks.run("ppo_fsdp2").rows) == PPO_STEPS


def test_a_checkpoint_of_two_ranks_goes_on_in_one_process(two_ranks, jobs, alone):
    source = two_ranks.run("resumed2").folder
    target = jobs.run("alone").folder
    target.mkdir()
    shutil.copytree(source / "global_step_2", target / "global_step_2")
    assert_same_weights(train_here(jobs, "alone"), alone["grpo"], 3, rel=1e-10)
