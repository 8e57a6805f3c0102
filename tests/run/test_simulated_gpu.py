"""Whole runs on a simulated GPU: no operation mixes its tensors with tensors on the host. Slow, and needs g++.

python -m pytest -m slow tests/run/test_simulated_gpu.py
"""

import json
import os
import shutil
from pathlib import Path

import pytest
import torch

from tests.commands import python, ran

pytestmark = [
    pytest.mark.slow,
    pytest.mark.skipif(shutil.which("g++") is None, reason="needs g++"),
    pytest.mark.skipif(torch.version.cuda is not None, reason="simulates a GPU for a PyTorch without CUDA"),
]

ACTOR = "actor_rollout_ref.actor"
LOSSES = [f"{ACTOR}.policy_loss.loss_mode={mode}" for mode in ("vanilla", "clip_cov", "kl_cov", "gspo")]
CHANGES = [
    ["actor_rollout_ref.rollout.name=hf"],
    ["algorithm.adv_estimator=gae", "critic.model.path=MODEL", "critic.ppo_mini_batch_size=4"],
    [f"{ACTOR}.use_kl_loss=True", f"{ACTOR}.entropy_coeff=0.01", f"{ACTOR}.use_dynamic_bsz=True"],
    ["algorithm.use_kl_in_reward=True", "actor_rollout_ref.model.lora_rank=4"],
    ["actor_rollout_ref.rollout.top_p=0.9", "actor_rollout_ref.rollout.top_k=20"],
    ["algorithm.adv_estimator=optimal_token_baseline", f"{ACTOR}.calculate_sum_pi_squared=True"],
    *([loss] for loss in LOSSES),
]


WAITS = {
    "plain": [],
    "reference": [f"{ACTOR}.use_kl_loss=True", f"{ACTOR}.entropy_coeff=0.01", f"{ACTOR}.fsdp_config.dtype=bfloat16"],
    "adapters": ["actor_rollout_ref.model.lora_rank=4", f"{ACTOR}.policy_loss.loss_mode=gspo"],
}


@pytest.fixture
def play(tiny_overrides, tmp_path):
    """play(cases) -> the answer of tests/run/simulated_gpu.py."""
    torch_root, here = Path(torch.__file__).parent, Path(__file__).parent
    library = tmp_path / "simulated_gpu.so"
    include = [f"-I{torch_root / 'include'}", f"-I{torch_root / 'include/torch/csrc/api/include'}"]
    link = [f"-L{torch_root / 'lib'}", "-lc10", "-ltorch_cpu"]
    source = str(here / "simulated_gpu.cpp")
    ran("g++", "-shared", "-fPIC", "-std=c++20", "-w", *include, "-o", library, source, *link)

    def call(**cases):
        task = json.dumps({"base": tiny_overrides, **cases})
        env = {**os.environ, "LD_PRELOAD": str(library), "LD_LIBRARY_PATH": str(torch_root / "lib")}
        done = python("-m", "tests.run.simulated_gpu", tmp_path, task, cwd=here.parents[1], timeout=600, env=env)
        return json.loads(done.stdout.splitlines()[-1])

    return call


def test_a_step_matches_the_cpu(play, tiny_llama):
    changes = [[change.replace("MODEL", str(tiny_llama)) for change in some] for some in CHANGES]
    gaps = play(changes=changes)
    assert len(gaps) == len(CHANGES)
    assert not any(gaps.values()), gaps


def test_masters_in_host_memory_change_nothing(play):
    (gaps,) = play(offload=[[f"{ACTOR}.fsdp_config.dtype=bfloat16"]]).values()
    assert not gaps


@pytest.mark.parametrize("name", WAITS)
def test_the_host_does_not_wait_between_micro_batches(name, play):
    (places,) = play(waits=[[*WAITS[name], f"{ACTOR}.ppo_micro_batch_size_per_gpu=2"]]).values()
    assert not places
