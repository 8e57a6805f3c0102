"""The peak of a switch: the memory held in addition to everything else."""

import logging
import mmap

import numpy as np
import pytest
import torch

from verl.parallel.memory import resident_bytes
from verl.runtime.mode_switch import SwitchMemory

pytestmark = pytest.mark.seed("C3")
MODEL = 400 << 20
CPU = torch.device("cpu")


def switch(memory, held):
    """The metrics of a switch that holds `held` bytes for a while."""
    with memory.measuring():
        np.frombuffer(mmap.mmap(-1, held), dtype=np.uint8)[:] = 1  # fresh pages: the allocator may have kept others
    return memory.metrics()


@pytest.mark.parametrize(("held", "level"), [(20 << 20, "INFO"), (200 << 20, "WARNING")])
def test_the_peak_is_measured_and_said_once(held, level, caplog):
    caplog.set_level(logging.INFO)
    memory = SwitchMemory(CPU, MODEL)
    metrics = switch(memory, held)
    assert metrics["switch_peak_gb"] == pytest.approx(held / 1e9, rel=0.1)
    assert metrics["switch_peak_ratio"] == pytest.approx(1 + held / MODEL, abs=0.05)
    (record,) = caplog.records
    assert record.levelname == level
    assert f"{metrics['switch_peak_ratio']:.2f} times the weights" in record.getMessage()
    switch(memory, held // 2)
    assert len(caplog.records) == 1


def test_what_was_there_before_does_not_count():
    there = np.frombuffer(mmap.mmap(-1, 100 << 20), dtype=np.uint8)
    there[:] = 1
    metrics = switch(SwitchMemory(CPU, MODEL), 1 << 20)
    assert metrics["switch_peak_ratio"] < 1.1
    assert resident_bytes() > there.nbytes


def test_a_system_that_does_not_tell(monkeypatch, tmp_path):
    monkeypatch.setattr("verl.parallel.memory.CLEAR_REFS", tmp_path / "none" / "clear_refs")
    assert switch(SwitchMemory(CPU, MODEL), 1 << 20) == {}
