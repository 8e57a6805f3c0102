"""What is kept on the CPU between calls is on the device while something is done with it; both are played."""

from types import SimpleNamespace

import torch

from verl.engines.fsdp import FSDPEngine


def test_a_state_is_loaded_where_the_optimizer_steps(monkeypatch):
    """Loaded beside offloaded parameters, the optimizer's moments stay on the CPU when those come back."""
    calls, device = [], torch.device("cuda", 0)
    engine = object.__new__(FSDPEngine)
    engine.device, engine.optimizer = device, SimpleNamespace(move_state=lambda to: calls.append(("moments", to.type)))
    engine.config = SimpleNamespace(offload_policy=False, param_offload=True, optimizer_offload=True)
    engine.shards = {}
    engine.model = SimpleNamespace(to=lambda to: calls.append(("parameters", torch.device(to).type)))
    engine._trained = SimpleNamespace(load=lambda state: calls.append(("load", state.what)))
    monkeypatch.setattr(engine, "_free_gathered", lambda: calls.append(("freed", "")))
    engine.load_state(SimpleNamespace(what="a state", extra={}))
    assert calls == [
        ("parameters", "cuda"),
        ("moments", "cuda"),
        ("load", "a state"),
        ("parameters", "cpu"),
        ("moments", "cpu"),
        ("freed", ""),
    ]
