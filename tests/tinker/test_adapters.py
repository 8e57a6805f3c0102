"""Many adapters on one base: what each trains to is independent of the others, and equals plain torch."""

from dataclasses import replace

import numpy as np
import pytest
import torch

from verl.config import load_config
from verl.data_proto.proto import DataProto
from verl.data_proto.trajectory import token_columns
from verl.engines.api import MicroBatching
from verl.errors import ConfigError
from verl.models.adapter_weights import ALPHA
from verl.models.optim import AdamStep
from verl.tinker.adapters import PARTS, AdapterEngine

MICRO = MicroBatching(max_tokens=64)
OUTPUTS = ("candidate_log_probs",)


@pytest.fixture(scope="module")
def sections(tiny_llama):
    values = {
        "actor_rollout_ref.model.path": str(tiny_llama),
        "actor_rollout_ref.model.lora_rank": 8,
        "actor_rollout_ref.actor.fsdp_config.dtype": "float32",
    }
    return load_config([], values=[values], check=False).config.actor_rollout_ref


@pytest.fixture(scope="module")
def engine(sections):
    actor = sections.actor
    common = {"engine": actor.fsdp_config, "head": "lm", "device": torch.device("cpu"), "total_steps": 1}
    return AdapterEngine(model=sections.model, optim=actor.optim, share_prompts=False, **common)


def batch_of(seed, num_rows=3):
    """Rows of random tokens with targets that are not the shifted input, and weights."""
    generator = np.random.default_rng(seed)
    rows = []
    for length in generator.integers(4, 9, num_rows):
        ids = generator.integers(1, 30, length + 1)
        rows.append((ids[:1], ids[1:], np.ones(length, dtype=bool)))
    columns = token_columns(rows)
    shape = columns["responses"].shape
    columns["candidate_ids"] = torch.from_numpy(generator.integers(1, 30, (*shape, 1)))
    columns["weights"] = torch.from_numpy(generator.random((*shape, 1))).float() * columns["response_mask"].unsqueeze(2)
    return DataProto.from_dict(columns)


def loss(outputs, batch, totals):
    return -(outputs["candidate_log_probs"] * batch.batch["weights"]).sum(), {}


STEP = AdamStep(learning_rate=1e-2, weight_decay=0.1)


def train(engine, adapter, seeds):
    for seed in seeds:
        with engine.using(adapter):
            engine.forward_backward(batch_of(seed), loss, OUTPUTS, MICRO)
            engine.optim_step(STEP)


def test_adapters_in_turn_get_the_bits_that_each_gets_by_itself(engine):
    """Also on other layers: a step decays no weight of another adapter."""
    parts = (PARTS, ("mlp", "head"), ("attention",), PARTS)
    shapes = list(zip((2, 4, 8, 4), range(4), parts, strict=True))
    apart = [engine.new_adapter(*shape) for shape in shapes]
    for number, adapter in enumerate(apart):
        train(engine, adapter, range(number, number + 3))
        apart[number] = replace(adapter, weights=adapter.snapshot())
    mixed = [engine.new_adapter(*shape) for shape in shapes]
    for step in range(3):
        for number, adapter in enumerate(mixed):
            with engine.using(adapter):
                engine.forward_backward(batch_of(number + step), loss, OUTPUTS, MICRO)
        for adapter in reversed(mixed):
            with engine.using(adapter):
                engine.optim_step(STEP)
    for one, other in zip(apart, mixed, strict=True):
        for name, tensor in one.weights.tensors.items():
            assert torch.equal(tensor, other.weights.tensors[name]), name
        assert one.num_steps == other.num_steps == 3


@pytest.mark.parametrize("clip", [0.0, 0.5])
def test_the_step_equals_the_step_of_torch(engine, clip):
    """50 steps on given gradients against torch.optim.AdamW, with values that change from call to call."""
    adapter = engine.new_adapter(4, 0)
    plain = {name: torch.nn.Parameter(tensor.clone()) for name, tensor in adapter.weights.tensors.items()}
    reference = torch.optim.AdamW(plain.values())
    generator = torch.Generator().manual_seed(0)
    for step in range(50):
        values = AdamStep(1e-3 * (1 + step % 3), 0.9, 0.95 - 0.01 * (step % 2), 1e-8, 0.1 * (step % 2), clip)
        with engine.using(adapter):
            engine.forward_backward(batch_of(0), loss, OUTPUTS, MICRO)
            for name, parameter in plain.items():
                gradient = torch.randn(parameter.shape, generator=generator)
                engine.optimizer.masters[name].grad, parameter.grad = gradient.clone(), gradient
            engine.optim_step(values)
        if clip:
            torch.nn.utils.clip_grad_norm_(plain.values(), clip)
        reference.param_groups[0].update(values.group())
        reference.step()
    for name, parameter in plain.items():
        assert (parameter - adapter.weights.tensors[name]).abs().max() < 1e-6


def test_values_of_a_step_hold_for_that_step(engine):
    with engine.using(engine.new_adapter(4, 0)):
        for values in (AdamStep(beta1=0.5, weight_decay=0.3), 1e-3):
            engine.forward_backward(batch_of(0), loss, OUTPUTS, MICRO)
            engine.optim_step(values)
    (group,) = engine.optimizer.optimizer.param_groups
    config = engine.optim
    assert (group["lr"], group["betas"], group["weight_decay"]) == (1e-3, tuple(config.betas), config.weight_decay)


def test_calls_add_up_and_discarded_gradients_leave_nothing(engine):
    once, often = engine.new_adapter(4, 1), engine.new_adapter(4, 1)
    batch = batch_of(5, num_rows=6)
    with engine.using(often):
        engine.forward_backward(batch_of(9), loss, OUTPUTS, MICRO)
    often.discard()
    with engine.using(once):
        engine.forward_backward(batch, loss, OUTPUTS, MICRO)
    for start in range(0, 6, 2):
        with engine.using(often):
            engine.forward_backward(batch.select_idxs([start, start + 1]), loss, OUTPUTS, MICRO)
    for name, gradient in once.gradients.items():
        assert (gradient - often.gradients[name]).abs().max() < 1e-5 * gradient.abs().max() + 1e-7
    often.discard()
    with engine.using(often), pytest.raises(ConfigError, match="no gradients"):
        engine.optim_step(AdamStep())


def test_shown_weights_compute_as_the_adapter_does_and_go_back_to_the_base(engine):
    batch, adapter = batch_of(11), engine.new_adapter(4, 3, parts=("mlp", "head"))
    engine.show(None)
    base = engine.forward(batch, OUTPUTS, MICRO)[OUTPUTS[0]]
    train(engine, adapter, range(4))
    with engine.using(adapter):
        expected = engine.forward(batch, OUTPUTS, MICRO)[OUTPUTS[0]]
    engine.show(adapter.snapshot())
    assert torch.equal(engine.forward(batch, OUTPUTS, MICRO)[OUTPUTS[0]], expected)
    assert (expected - base).abs().max() > 1e-2
    engine.show(None)
    assert torch.equal(engine.forward(batch, OUTPUTS, MICRO)[OUTPUTS[0]], base)


def test_an_adapter_has_the_parts_and_the_rank_that_were_asked_for(engine):
    names = engine.new_adapter(2, 0, parts=("attention",)).weights.layers
    assert names
    assert all("self_attn" in name for name in names)
    assert engine.new_adapter(2, 0).weights.spec.alpha == ALPHA
    assert "lm_head" in engine.new_adapter(2, 0).weights.layers
    assert (
        engine.new_adapter(2, 5)
        .weights.tensors["lm_head.lora_A"]
        .equal(engine.new_adapter(2, 5).weights.tensors["lm_head.lora_A"])
    )
    with pytest.raises(ConfigError, match="rank 9"):
        engine.new_adapter(9, 0)
    with pytest.raises(ConfigError, match="without layers"):
        engine.new_adapter(2, 0, parts=())
