"""The switch between training and generation: its order, the random state, weights that must not change
meanwhile, and the memory held in addition to everything else."""

import logging
import mmap
import random
import threading
from dataclasses import replace
from types import SimpleNamespace

import numpy as np
import pytest
import torch

from tests.engines.tiny import make_engine
from tests.runtime.threaded import on_ranks
from verl.config import RolloutConfig
from verl.errors import ModelError
from verl.parallel.memory import resident_bytes
from verl.runtime.mode_switch import ModeSwitch, SwitchMemory
from verl.runtime.weight_sync import RankWeightSync

pytestmark = pytest.mark.seed("C2", "C3", "C4")

CPU = torch.device("cpu")
MODEL = 400 << 20


@pytest.fixture(scope="module")
def engine(tiny_llama):
    return make_engine(tiny_llama, dtype="bfloat16")


def switched(engine, meddles=lambda: None, **settings):
    """One turn of the switch, with `meddles` as its generation."""
    switch = ModeSwitch(engine, replace(RolloutConfig(), **settings), CPU)
    switch.to_generation()
    switch.free_training_memory()
    meddles()
    switch.to_training()


def test_what_training_keeps_is_freed(engine, monkeypatch):
    order = []
    monkeypatch.setattr(engine, "free_cached_memory", lambda: order.append("training caches freed"))
    switched(engine, lambda: order.append("generation"))
    assert order == ["training caches freed", "generation"]


def test_an_engine_with_its_own_memory_gets_what_the_allocator_keeps(monkeypatch):
    """Before it wakes for new weights, and again before it generates."""
    order = []
    monkeypatch.setattr(torch.cuda, "empty_cache", lambda: order.append("cache given back"))
    rollout = SimpleNamespace(set_weights=lambda version, weights: order.append("weights"), replica=None)
    spec = SimpleNamespace(section=RolloutConfig())
    for apart, expected in ((True, ["cache given back", "weights", "cache given back"]), (False, ["weights"])):
        order.clear()
        context = SimpleNamespace(rollout=spec, device=torch.device("cuda"), has_own_weights=apart, shares_weights=True)
        sync = RankWeightSync(context, None, None)
        monkeypatch.setattr(sync.switch, "to_generation", lambda: None)
        sync.rollout = rollout
        sync.sync(1)
        assert order == expected


def test_no_engine_allocates_before_all_ranks_have_freed_their_memory(monkeypatch):
    """An engine process of rank 0 spans the devices of both ranks. Rank 1 is late: it frees its memory each time after rank 0
    has come to the exchange, or has allocated without it."""
    events, spec, passed = [], SimpleNamespace(section=RolloutConfig()), [threading.Event(), threading.Event()]
    allocations = ["rank 0 allocates weights", "rank 0 allocates its cache"]

    def allocate(number):
        events.append(allocations[number])
        passed[number].set()

    def rank(comm):
        meets, frees = iter(passed), iter(passed)

        def free():
            if comm.rank == 1:
                assert next(frees).wait(60)
            events.append("freed")

        def meet(flag, meet=comm.any):
            if comm.rank == 0:
                next(meets).set()
            return meet(flag)

        comm.any = meet
        context = SimpleNamespace(rollout=spec, device=torch.device("cuda"), has_own_weights=True, shares_weights=True)
        sync = RankWeightSync(context, comm, None)
        monkeypatch.setattr(sync.switch, "to_generation", lambda: None)
        monkeypatch.setattr(sync.switch, "free_training_memory", free)
        if comm.rank == 0:
            sync.rollout = SimpleNamespace(set_weights=lambda version, weights: allocate(0), replica=None)
        sync.sync(1)
        if comm.rank == 0:
            allocate(1)

    on_ranks(2, rank)
    assert events == ["freed", "freed", allocations[0], "freed", "freed", allocations[1]]


def seed_all(seed):
    for set_seed in (torch.manual_seed, np.random.seed, random.seed):
        set_seed(seed)


def draws():
    return torch.rand(2).tolist() + np.random.rand(2).tolist() + [random.random()]


@pytest.mark.parametrize(
    ("trains", "num_ends"),
    [
        pytest.param(True, 1, id="a process that trains"),
        pytest.param(True, 2, id="samples of the next step under the same weights, after a validation"),
        pytest.param(False, 1, id="a process that only generates"),
    ],
)
def test_the_random_state_of_training_goes_on_where_it_was(engine, trains, num_ends):
    seed_all(5)
    expected = draws()
    seed_all(5)
    switch = ModeSwitch(engine if trains else None, RolloutConfig(), CPU)
    switch.to_generation()
    switch.free_training_memory()
    for _ in range(num_ends):
        seed_all(1)
        switch.to_training()
    assert draws() == expected


def write_into(engine, name, amount):
    def meddles():
        with torch.no_grad():
            engine.module.get_parameter(name).flatten()[0].add_(amount)

    return meddles


@pytest.mark.parametrize("check", ["sampled", "full"])
def test_a_weight_that_changed_meanwhile_stops_the_run(engine, check):
    name = "model.layers.0.mlp.up_proj.weight"
    before = engine.module.get_parameter(name).detach().clone()
    with pytest.raises(ModelError, match=f"weight {name} changed.*keep_weights_copy"):
        switched(engine, write_into(engine, name, 1.0), drift_check=check)
    engine.optimizer.round_masters()
    torch.testing.assert_close(engine.module.get_parameter(name), before)
    switched(engine, drift_check=check)


def test_a_changed_weight_in_float64_is_noticed(tiny_llama):
    """The compared weights must be a copy, even if no dtype changes on the way."""
    wide = make_engine(tiny_llama, dtype="float64")
    with pytest.raises(ModelError, match="changed during generation"):
        switched(wide, lambda: [p.data.add_(1.0) for p in wide.module.parameters()])


def test_a_copy_puts_the_weights_right(engine, caplog):
    name = "model.norm.weight"
    before = engine.module.get_parameter(name).detach().clone()
    switched(engine, write_into(engine, name, 1.0), keep_weights_copy=True)
    assert torch.equal(engine.module.get_parameter(name), before)
    assert name in caplog.text


def test_the_check_can_be_off(engine):
    switched(engine, write_into(engine, "model.norm.weight", 1.0), drift_check="off")
    engine.optimizer.round_masters()


def test_it_is_the_turn_of_every_tensor(engine):
    switch = ModeSwitch(engine, RolloutConfig(), CPU)
    names = set()
    for _ in range(4):
        switch.to_generation()
        names |= set(switch._seen.values)
        switch.to_training()
    assert names == set(engine.optimizer.parameters)


def test_training_during_generation_is_no_drift(engine):
    """With steps before the end of generation, weights differ because they were trained."""

    def meddles():
        write_into(engine, "model.norm.weight", 1.0)()
        engine.optimizer.num_steps += 1

    switched(engine, meddles)
    engine.optimizer.round_masters()


def held_in_a_switch(memory, held):
    """The metrics of a switch that holds `held` bytes for a while."""
    with memory.measuring():
        np.frombuffer(mmap.mmap(-1, held), dtype=np.uint8)[:] = 1  # fresh pages: the allocator may have kept others
    return memory.metrics()


@pytest.mark.parametrize(("held", "level"), [(20 << 20, "INFO"), (200 << 20, "WARNING")])
def test_the_peak_is_measured_and_said_once(held, level, caplog):
    caplog.set_level(logging.INFO)
    memory = SwitchMemory(CPU, MODEL)
    metrics = held_in_a_switch(memory, held)
    assert metrics["switch_peak_gb"] == pytest.approx(held / 1e9, rel=0.1)
    assert metrics["switch_peak_ratio"] == pytest.approx(1 + held / MODEL, abs=0.05)
    (record,) = caplog.records
    assert record.levelname == level
    assert f"{metrics['switch_peak_ratio']:.2f} times the weights" in record.getMessage()
    held_in_a_switch(memory, held // 2)
    assert len(caplog.records) == 1


def test_what_was_there_before_does_not_count():
    mapped = np.frombuffer(mmap.mmap(-1, 100 << 20), dtype=np.uint8)
    mapped[:] = 1
    metrics = held_in_a_switch(SwitchMemory(CPU, MODEL), 1 << 20)
    assert metrics["switch_peak_ratio"] < 1.1
    assert resident_bytes() > mapped.nbytes


def test_a_system_that_does_not_tell(monkeypatch, tmp_path):
    monkeypatch.setattr("verl.parallel.memory.CLEAR_REFS", tmp_path / "none" / "clear_refs")
    assert held_in_a_switch(SwitchMemory(CPU, MODEL), 1 << 20) == {}
