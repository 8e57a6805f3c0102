"""Whole runs with engines that need an extra, on several ranks: tokens, losses and weights are those of one process."""

import json

import pytest

from tests.runtime.conftest import PPO, assert_same, assert_same_weights, train_here
from tests.runtime.ranks import run
from verl.config import SCHEMAS, load_config
from verl.run.host import train

pytestmark = pytest.mark.slow

MODULES = {"deepspeed": "deepspeed", "megatron": "megatron.core"}
FLOAT32 = ("actor_rollout_ref.actor.fsdp_config.dtype=float32", "actor_rollout_ref.actor.optim.lr=0.00002")
ACTOR = "actor_rollout_ref.actor"
DEEPSPEED = [f"{ACTOR}.strategy=deepspeed"]


def megatron(**sizes):
    return ["model_engine=megatron", *(f"{ACTOR}.megatron.{name}_model_parallel_size={n}" for name, n in sizes.items())]


ON_TWO = {  # library -> name -> changes of the config; each runs GRPO and PPO
    "deepspeed": {f"zero{stage}": [*DEEPSPEED, f"{ACTOR}.deepspeed.zero_stage={stage}"] for stage in (0, 1, 2, 3)},
    "megatron": {
        "data2": megatron(),
        "tensor2": [*megatron(tensor=2), "actor_rollout_ref.rollout.tensor_model_parallel_size=2"],
        "pipeline2": megatron(pipeline=2),
    },
}
ON_FOUR = {
    "tensor2_pipeline2": megatron(tensor=2, pipeline=2),
    "pipeline2_data2": [*megatron(pipeline=2), "actor_rollout_ref.rollout.tensor_model_parallel_size=2"],
}
SFT = {
    "deepspeed": ["engine.strategy=deepspeed", "engine.deepspeed.zero_stage=3"],
    "megatron": ["engine=megatron", "engine.pipeline_model_parallel_size=2"],
}


@pytest.fixture(scope="module")
def alone(jobs):
    """GRPO and PPO in one process, in float32."""
    changes = {"grpo": [], "ppo": PPO}
    return {name: train_here(jobs, f"alone_{name}", *more, *FLOAT32) for name, more in changes.items()}


def check(jobs, alone, num_ranks, rows):
    for name, changes in rows.items():
        jobs.add(f"grpo_{name}", *FLOAT32, *changes)
        jobs.add(f"ppo_{name}", *PPO, *FLOAT32, *changes)
    run(num_ranks, "tests.runtime.several_runs", jobs.file(), timeout_s=280)
    for name in rows:
        for program in ("grpo", "ppo"):
            found = jobs.run(f"{program}_{name}")
            assert_same(found, alone[program], 2e-5)
            assert_same_weights(found, alone[program], 3, 1e-5)


@pytest.mark.parametrize("library", sorted(ON_TWO))
def test_runs_on_two_ranks_are_those_of_one_process(alone, jobs, library):
    pytest.importorskip(MODULES[library], reason=f"needs the extra {library}")
    check(jobs, alone, 2, ON_TWO[library])


def test_runs_on_four_ranks_are_those_of_one_process(alone, jobs):
    pytest.importorskip("megatron.core", reason="needs the extra megatron")
    check(jobs, alone, 4, ON_FOUR)


@pytest.mark.parametrize("library", sorted(SFT))
def test_fine_tuning_on_two_ranks_is_that_of_one_process(tiny_llama, tmp_path, library):
    pytest.importorskip(MODULES[library], reason=f"needs the extra {library}")
    rows = [{"prompt": f"{i}?", "completion": "ab" * (i % 5 + 1)} for i in range(11)]
    (tmp_path / "rows.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    common = [
        f"model.path={tiny_llama}",
        "data.train_batch_size=5",
        "engine.dtype=float32",
        "optim.lr=0.0002",
        "trainer.logger=[file]",
        "trainer.total_epochs=2",
        *(f"data.{split}_files={tmp_path}/rows.jsonl" for split in ("train", "val")),
    ]
    settings = {name: [*common, f"trainer.default_local_dir={tmp_path / name}"] for name in ("alone", "many")}
    assert train(load_config(settings["alone"], schema=SCHEMAS["sft"]), "sft") == 0
    job = {"program": "sft", "overrides": [*settings["many"], *SFT[library]]}
    (tmp_path / "jobs.json").write_text(json.dumps([job]))
    run(2, "tests.runtime.several_runs", tmp_path / "jobs.json", timeout_s=120)
    found, wanted = (
        [json.loads(line) for line in (tmp_path / name / "metrics.jsonl").read_text().splitlines()]
        for name in ("many", "alone")
    )
    assert [row["step"] for row in found] == [row["step"] for row in wanted]
    for row, expected in zip(found, wanted, strict=True):
        for name in ("train/loss", "train/grad_norm", "val/loss"):
            assert (name in row) == (name in expected)
            if name in expected:
                assert row[name] == pytest.approx(expected[name], rel=1e-5), (row["step"], name)
