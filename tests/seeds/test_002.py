"""Snippets of seed document 002 (FSDP-3D resharding), as written but for model, data, devices and counts.

Its YAML and its list of parameters are in test_yaml.py.
"""

import random

import pytest
import torch

from verl.cli.machine.host import advice
from verl.worker import ActorRolloutRefWorker

SMALL = ["actor_rollout_ref.actor.fsdp_config.dtype=float32", "data.max_response_length=4"]


@pytest.mark.seed("C4", "G8")
def test_training_to_rollout_and_back(tiny_llama):
    """manual_seed + set_rng_state: sampling during generation does not change training's random numbers."""
    from verl.workers.sharding_manager.megatron_vllm import MegatronVLLMShardingManager

    with ActorRolloutRefWorker(str(tiny_llama), overrides=SMALL) as worker:
        torch.manual_seed(7)
        random.seed(7)
        rng_state = torch.get_rng_state()
        expected = torch.rand(3), random.random()
        torch.set_rng_state(rng_state)
        random.seed(7)
        with MegatronVLLMShardingManager(worker):
            worker.generate_sequences(["2 + 2?"], n=2)
            torch.rand(9)
            random.random()
        assert torch.equal(torch.rand(3), expected[0])
        assert random.random() == expected[1]


@pytest.mark.seed("F5", "G8")
def test_settings_of_nccl(monkeypatch):
    """NCCL_PROTO=Simple and CUDA_DEVICE_MAX_CONNECTIONS=1 are looked at, each with its reason; a machine that tells nothing
    gets no setting, so that NCCL's defaults stay."""
    there = {"NCCL_PROTO": "Simple", "CUDA_DEVICE_MAX_CONNECTIONS": "1"}
    facts = {"gpu_links": [], "fabric": [], "interfaces": {}}
    said = " ".join(line.text for line in advice({**facts, "settings": there}))
    assert all(f"{name}={value}" in said for name, value in there.items())
    assert list(advice({**facts, "settings": {}})) == []
