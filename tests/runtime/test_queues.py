"""One queue of kernels for Megatron, and for no other engine."""

import os
from types import SimpleNamespace

import pytest

from verl.compat.task_runner import get_ppo_ray_runtime_env
from verl.config.sections.deepspeed import DeepSpeedConfig
from verl.config.sections.megatron import MegatronConfig
from verl.runtime.rank import set_queues

NAME = "CUDA_DEVICE_MAX_CONNECTIONS"


@pytest.mark.parametrize(
    ("settings", "num_devices", "before", "after"),
    [
        ([MegatronConfig()], 2, None, "1"),
        ([None, MegatronConfig()], 2, None, "1"),
        ([MegatronConfig()], 2, "8", "8"),
        ([MegatronConfig()], 1, None, None),  # which trains as one device
        ([None, DeepSpeedConfig()], 2, None, None),
    ],
)
def test_ranks_of_megatron_have_one_queue(settings, num_devices, before, after, monkeypatch):
    monkeypatch.setenv(NAME, before or "")
    if before is None:
        monkeypatch.delenv(NAME)
    set_queues(SimpleNamespace(models=[SimpleNamespace(settings=part) for part in settings]), num_devices)
    assert os.environ.get(NAME) == after


def test_scripts_of_other_releases_set_none(monkeypatch):
    monkeypatch.delenv(NAME, raising=False)
    assert NAME not in get_ppo_ray_runtime_env()["env_vars"]
