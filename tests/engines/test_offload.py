"""Tensors kept on the CPU between calls are on the device while they are used; moves and use are simulated."""

from types import SimpleNamespace

import pytest
import torch

from verl.engines import fsdp, local
from verl.engines.fsdp import FSDPEngine
from verl.engines.local import LocalEngine


def test_a_state_is_loaded_where_the_optimizer_steps(monkeypatch):
    """Moments loaded while parameters are offloaded would stay on the CPU when the parameters return."""
    calls, device = [], torch.device("cuda", 0)
    engine = object.__new__(FSDPEngine)
    engine.device, engine.optimizer = device, SimpleNamespace(move_state=lambda to: calls.append(("moments", to.type)))
    engine.config = SimpleNamespace(offload_policy=False, param_offload=True, optimizer_offload=True)
    engine.shards, engine.num_lr_steps = {}, 0
    monkeypatch.setattr(fsdp, "move_module", lambda _, to: calls.append(("parameters", torch.device(to).type)))
    engine.model = None
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


@pytest.mark.seed("C8")
@pytest.mark.parametrize("is_frozen", [True, False])
def test_a_reference_on_one_gpu_is_there_during_its_calls(is_frozen, monkeypatch):
    calls = []
    monkeypatch.setattr(local, "move_module", lambda _, to: calls.append(torch.device(to).type))
    engine = object.__new__(LocalEngine)
    engine.device, engine.optim = torch.device("cuda", 0), None if is_frozen else object()
    engine.config = SimpleNamespace(param_offload=True)
    engine.dimensions = SimpleNamespace(chunk_tokens=None)
    engine.module = None
    with engine._ready():
        calls.append("call")
    assert calls == (["cuda", "call", "cpu"] if is_frozen else ["call"])
