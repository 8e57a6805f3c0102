"""Fine-tuning and reward models on two ranks: losses and validation equal a single process's in every arrangement."""

import json
import subprocess
import sys

import pytest

from tests.run.conftest import Run
from tests.runtime.ranks import ROOT, environment, run

SPMD = {
    "fsdp2": ["engine.strategy=fsdp2"],
    "tensor2": ["engine.tensor_parallel_size=2"],
    "sequence2": ["engine.ulysses_sequence_parallel_size=2"],
    "micro2": ["data.use_dynamic_bsz=False", "data.micro_batch_size_per_gpu=1"],
}
RAY = ["trainer.n_gpus_per_node=2", "ray_kwargs.ray_init.num_cpus=4"]
SHARED = ("train/loss", "train/grad_norm", "train/global_tokens", "val/loss")
METRICS = {
    "sft": (*SHARED, "train/token_accuracy", "train/entropy"),
    "rm": (
        *SHARED,
        *(f"train/{n}" for n in ("accuracy", "margin", "mean_reward", "min_reward", "max_reward")),
        "val/margin",
    ),
}


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    return tmp_path_factory.mktemp("ranks")


@pytest.fixture(scope="module")
def job(tiny_llama, folder):
    """`job(program, name, *changes)`: two epochs of 11 rows in batches of 5, in float64: nothing divides by 2."""
    rows = [
        {"sft": {"completion": "ab" * (i % 5 + 1)}, "rm": {"chosen": "a" * (i % 5 + 1), "rejected": "b" * (i % 3 + 1)}}
        for i in range(11)
    ]
    for program in METRICS:
        examples = [{"prompt": f"{i}?", **row[program]} for i, row in enumerate(rows)]
        (folder / f"{program}.jsonl").write_text("".join(json.dumps(row) + "\n" for row in examples))
    common = [
        f"model.path={tiny_llama}",
        "model.external_lib=tests.runtime.wide_norms",
        "data.train_batch_size=5",
        "engine.dtype=float64",
        "optim.lr=0.0002",
        "trainer.logger=[file]",
        "trainer.total_epochs=2",
        "trainer.test_freq=after_each_epoch",
        "trainer.save_freq=after_each_epoch",
    ]

    def make(program, name, *changes):
        places = [f"data.{split}_files={folder}/{program}.jsonl" for split in ("train", "val")]
        places.append(f"trainer.default_local_dir={folder / program / name}")
        return {"program": program, "overrides": [*common, *places, *changes]}

    return make


@pytest.fixture(scope="module")
def alone(job, folder):
    """The rows of metrics of one process, by program."""
    from tests.runtime.wide_norms import widen
    from verl.config import SCHEMAS, load_config
    from verl.run.host import train

    with pytest.MonkeyPatch.context() as patch:
        widen(patch)
        for program in METRICS:
            assert train(load_config(job(program, "alone")["overrides"], schema=SCHEMAS[program]), program) == 0
    return {program: Run(folder / program / "alone").rows for program in METRICS}


def write(folder, name, jobs):
    file = folder / f"{name}.json"
    file.write_text(json.dumps(jobs))
    return file


def assert_same(program, rows, expected):
    assert [row["step"] for row in rows] == [row["step"] for row in expected] == [1, 2, 3, 4]
    for row, expected_row in zip(rows, expected, strict=True):
        values, compared = ({name: r[name] for name in METRICS[program] if name in r} for r in (row, expected_row))
        assert values == pytest.approx(compared, rel=1e-6), row["step"]


@pytest.mark.slow
def test_two_ranks_under_torchrun_are_one_process(alone, job, folder):
    jobs = [job(program, name, *changes) for program in METRICS for name, changes in SPMD.items()]
    run(2, "tests.runtime.several_runs", write(folder, "spmd", jobs), timeout_s=180)
    for program in METRICS:
        for name in SPMD:
            assert_same(program, Run(folder / program / name).rows, alone[program])


@pytest.mark.slow
def test_two_actors_on_ray_are_one_process(alone, job, folder):
    pytest.importorskip("ray")
    file = write(folder, "ray", [job(program, "ray", *RAY) for program in METRICS])
    command = [sys.executable, "-m", "tests.runtime.several_runs", str(file)]
    done = subprocess.run(
        command, cwd=ROOT, env=environment(RAY_AUTH_MODE="disabled"), capture_output=True, text=True, timeout=280
    )
    assert not done.returncode, (done.stdout + done.stderr)[-3000:]
    for program in METRICS:
        assert_same(program, Run(folder / program / "ray").rows, alone[program])
