"""Ranks run on the processors near their GPU, unless the user has chosen others."""

import os
from types import SimpleNamespace

import pytest
import torch

from verl.parallel import numa

GPU = torch.device("cuda", 1)
FILES = {
    "devices/system/cpu/online": "0-7\n",
    "devices/system/node/node0/cpulist": "0-1,4-5\n",
    "devices/system/node/node1/cpulist": "2-3,6-7\n",
    "bus/pci/devices/0001:a1:00.0/numa_node": "1\n",
}


@pytest.fixture
def machine(tmp_path, monkeypatch):
    """Two nodes of four processors; the GPU is at the second one. `bound` has the choices."""
    state = SimpleNamespace(allowed=set(range(8)), bound=[], sysfs=tmp_path)
    for name, text in FILES.items():
        (tmp_path / name).parent.mkdir(parents=True, exist_ok=True)
        (tmp_path / name).write_text(text)
    monkeypatch.setattr(numa, "SYSFS", tmp_path)
    monkeypatch.setattr(os, "sched_getaffinity", lambda pid: state.allowed)
    monkeypatch.setattr(os, "sched_setaffinity", lambda pid, processors: state.bound.append(processors))
    properties = SimpleNamespace(pci_domain_id=1, pci_bus_id=0xA1, pci_device_id=0)
    monkeypatch.setattr(torch.cuda, "get_device_properties", lambda device: properties)
    return state


def test_a_rank_runs_near_its_gpu(machine):
    numa.bind_near(torch.device("cpu"))
    assert machine.bound == []
    numa.bind_near(GPU)
    assert machine.bound == [{2, 3, 6, 7}]


def test_processors_of_the_user_stay(machine):
    machine.allowed = set(range(4))
    numa.bind_near(GPU)
    assert machine.bound == []


@pytest.mark.parametrize("text", ["-1\n", None])
def test_a_system_without_nodes_changes_nothing(machine, text):
    path = machine.sysfs / "bus/pci/devices/0001:a1:00.0/numa_node"
    path.unlink() if text is None else path.write_text(text)
    numa.bind_near(GPU)
    assert machine.bound == []
