"""vLLM in the ranks of a run (rollout.mode=sync): samples are those of the native engine in one process. Slow, needs vLLM.

    python -m pytest -m slow -p no:xdist tests/controller/test_vllm_ranks.py

Two ranks with a copy each, and two that share one (tensor parallelism over the run's own process group).
"""

import importlib.util

import pytest

from tests.controller.conftest import train_here
from tests.controller.ranks import run
from verl.models.tiny import make_tiny_model

pytestmark = [
    pytest.mark.slow,
    pytest.mark.skipif(importlib.util.find_spec("vllm") is None, reason="vLLM is not installed"),
]


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


@pytest.mark.parametrize("tensor_parallel", [1, 2])
def test_samples_are_those_of_the_native_engine(tensor_parallel, jobs, settings, expected):
    name = f"tensor{tensor_parallel}"
    found = jobs.add(
        name, *settings, "actor_rollout_ref.rollout.name=vllm", "actor_rollout_ref.rollout.mode=sync",
        f"actor_rollout_ref.rollout.tensor_model_parallel_size={tensor_parallel}",
    )  # fmt: skip
    run(2, "tests.controller.several_runs", jobs.file(), timeout_s=540)
    samples = found.samples()
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
        assert max(gaps) < 1e-4
