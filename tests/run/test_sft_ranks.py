"""Supervised fine-tuning on two ranks: losses and validation are those of one process, whatever the arrangement."""

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
METRICS = ("train/loss", "train/grad_norm", "train/token_accuracy", "train/entropy", "train/global_tokens", "val/loss")


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    return tmp_path_factory.mktemp("ranks")


@pytest.fixture(scope="module")
def job(tiny_llama, folder):
    """`job(name, *changes)`: two epochs of 11 rows in batches of 5, in float64: nothing divides by 2."""
    rows = [{"prompt": f"{i}?", "completion": "ab" * (i % 5 + 1)} for i in range(11)]
    (folder / "rows.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    common = [
        f"model.path={tiny_llama}",
        "model.external_lib=tests.runtime.wide_norms",
        f"data.train_files={folder}/rows.jsonl",
        f"data.val_files={folder}/rows.jsonl",
        "data.train_batch_size=5",
        "engine.dtype=float64",
        "optim.lr=0.0002",
        "trainer.logger=[file]",
        "trainer.total_epochs=2",
        "trainer.test_freq=after_each_epoch",
        "trainer.save_freq=after_each_epoch",
    ]

    def make(name, *changes):
        return {"program": "sft", "overrides": [*common, f"trainer.default_local_dir={folder / name}", *changes]}

    return make


@pytest.fixture(scope="module")
def alone(job, folder):
    """The rows of metrics of one process."""
    from tests.runtime.wide_norms import widen
    from verl.config import SFT, load_config
    from verl.run.host import train

    with pytest.MonkeyPatch.context() as patch:
        widen(patch)
        assert train(load_config(job("alone")["overrides"], schema=SFT), "sft") == 0
    return Run(folder / "alone").rows


def write(folder, name, jobs):
    file = folder / f"{name}.json"
    file.write_text(json.dumps(jobs))
    return file


def assert_same(rows, expected):
    assert [row["step"] for row in rows] == [row["step"] for row in expected] == [1, 2, 3, 4]
    for row, wanted in zip(rows, expected, strict=True):
        found, compared = ({name: r[name] for name in METRICS if name in r} for r in (row, wanted))
        assert found == pytest.approx(compared, rel=1e-6), row["step"]


def test_two_ranks_under_torchrun_are_one_process(alone, job, folder):
    jobs = [job(name, *changes) for name, changes in SPMD.items()]
    run(2, "tests.runtime.several_runs", write(folder, "spmd", jobs), timeout_s=180)
    for name in SPMD:
        assert_same(Run(folder / name).rows, alone)


@pytest.mark.slow
def test_two_actors_on_ray_are_one_process(alone, job, folder):
    pytest.importorskip("ray")
    file = write(folder, "ray", [job("ray", *RAY)])
    command = [sys.executable, "-m", "tests.runtime.several_runs", str(file)]
    done = subprocess.run(
        command, cwd=ROOT, env=environment(RAY_AUTH_MODE="disabled"), capture_output=True, text=True, timeout=280
    )
    assert not done.returncode, (done.stdout + done.stderr)[-3000:]
    assert_same(Run(folder / "ray").rows, alone)
