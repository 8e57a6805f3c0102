"""vLLM under several ranks, started by torchrun or by Ray. Samples equal the native engine's in one process, and
log-probs equal the trainer's. Slow, needs vLLM.

    python -m pytest -m slow -p no:xdist tests/runtime/test_vllm_ranks.py

Two ranks with a replica each or a shared one, in separate processes (async) or the ranks (sync); two replicas on four.
"""

import contextlib
import importlib.util

import psutil
import pytest

from tests.runtime.conftest import train_here
from tests.runtime.ranks import environment, python, run, still_there
from verl.models.tiny import make_tiny_model

pytestmark = [
    pytest.mark.slow,
    pytest.mark.skipif(importlib.util.find_spec("vllm") is None, reason="vLLM is not installed"),
]

ROLLOUT = "actor_rollout_ref.rollout"
TOLERANCE = 1e-4


@pytest.fixture(scope="module")
def settings(tmp_path_factory):
    """Two steps in float32 of a model with heads of a size that vLLM has kernels for."""
    place = tmp_path_factory.mktemp("vllm") / "tiny"
    make_tiny_model(place, "llama", hidden_size=128, num_attention_heads=4, num_key_value_heads=2)
    return [
        f"actor_rollout_ref.model.path={place}",
        "actor_rollout_ref.actor.fsdp_config.dtype=float32",
        "trainer.total_training_steps=2",
        "trainer.save_freq=-1",
        "trainer.test_freq=-1",
    ]


@pytest.fixture(scope="module")
def expected(jobs, settings):
    return train_here(jobs, "native", *settings).samples()


def by_torchrun(jobs, num_ranks, mark):
    run(num_ranks, "tests.runtime.several_runs", jobs.file(), timeout_s=540, forked=False, VERL_TEST_MARK=mark)


def by_ray(jobs, num_ranks, mark):
    env, file = environment(RAY_AUTH_MODE="disabled", VERL_TEST_MARK=mark), jobs.file()
    for attempt in range(2):  # the start of Ray has a separate deadline, which a busy machine can miss
        driver = python("tests.runtime.several_runs", file, env=env)
        try:
            said = driver.communicate(timeout=540)[0]
        finally:
            driver.kill()
            driver.wait()
        if not driver.returncode or attempt or "timed out during startup" not in said:
            break
    assert driver.returncode == 0, said[-6000:]


def engines(mark):
    """Processes of vLLM of the run with `mark` in its environment."""
    processes = []
    for process in psutil.process_iter():
        with contextlib.suppress(psutil.Error):
            if process.environ().get("VERL_TEST_MARK") == mark and "verl.rollout.process_main" in process.cmdline():
                processes.append(process)
    return processes


@pytest.mark.parametrize(
    ("start", "mode", "num_ranks", "tensor_parallel"),
    [
        (by_torchrun, "sync", 2, 1),
        (by_torchrun, "sync", 2, 2),
        (by_torchrun, "async", 2, 2),
        (by_ray, "sync", 2, 2),
        (by_ray, "async", 2, 2),
        (by_torchrun, "async", 4, 2),
    ],
    ids=lambda value: getattr(value, "__name__", str(value)),
)
def test_samples_match_the_native_engine(start, mode, num_ranks, tensor_parallel, jobs, settings, expected):
    job = jobs.add(
        f"{start.__name__}_{mode}_{num_ranks}_{tensor_parallel}", *settings, f"{ROLLOUT}.name=vllm", f"{ROLLOUT}.mode={mode}",
        f"{ROLLOUT}.tensor_model_parallel_size={tensor_parallel}", f"trainer.n_gpus_per_node={num_ranks}",
        f"ray_kwargs.ray_init.num_cpus={num_ranks}",
    )  # fmt: skip
    start(jobs, num_ranks, str(job.folder))
    samples = job.samples()
    assert samples.keys() == expected.keys()
    assert len(samples) == 2, "steps"
    for step, rows in expected.items():
        for key in ("response_ids", "weight_version"):
            assert [r[key] for r in samples[step]] == [r[key] for r in rows], (step, key)
        gaps = [
            abs(a - b)
            for ours, theirs in zip(samples[step], rows, strict=True)
            for a, b in zip(ours["log_probs"], theirs["log_probs"], strict=True)
        ]
        assert max(gaps) < TOLERANCE
    rows = job.rows
    assert [row["training/rollout_probs_diff_valid"] for row in rows] == [1.0, 1.0]
    assert max(row["training/rollout_probs_diff_max"] for row in rows) < TOLERANCE, "the trainer's own log-probs"
    assert not still_there(engines(str(job.folder)))
