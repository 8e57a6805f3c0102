"""Models of the service over several ranks of gloo against one device."""

from dataclasses import replace

import numpy as np
import torch
import torch.distributed as dist

from tests.engines.parallel_checks import on
from tests.models.reference import widen_norms
from tests.tinker.test_workbench import request
from verl.cli.serve import serving_config
from verl.engines.groups import mesh_of
from verl.models.optim import AdamStep
from verl.models.tiny import make_tiny_model
from verl.tinker.records import TrainingOutput
from verl.tinker.workbench import Workbench

STEP = AdamStep(1e-2, 0.9, 0.95, 1e-8, 0.01, 0.5)


def benches(folder, dtype, rank):
    """The service's computation on this rank by itself, and on all ranks together."""
    path = folder / "llama"
    if dist.get_rank() == 0 and not path.exists():
        make_tiny_model(path)
    dist.barrier()
    config = serving_config(str(path), [f"actor_rollout_ref.actor.fsdp_config.dtype={dtype}"], rank=rank)
    device = torch.device("cpu")
    engine = config.actor_rollout_ref.actor.fsdp_config
    benches = Workbench(config, device), Workbench(config, device, mesh_of(engine, dist.get_world_size()))
    for bench in benches if dtype == "float64" else ():
        widen_norms(bench.engine.module)
    return benches


def added(output):
    outputs = [None] * dist.get_world_size()
    dist.all_gather_object(outputs, output)
    return TrainingOutput.added(outputs)


def steps(bench, models, join=lambda output: output):
    """Two models in turn: passes, steps with two passes each, and the outputs of all of them."""
    outputs, norms = [], []
    for step in range(3):
        for number, model in enumerate(models):
            sent = request(("cross_entropy", "ppo")[number], 7 - step)
            outputs.append(join(bench.forward_backward(model, replace(sent, forward_only=True))))
            outputs += [join(bench.forward_backward(model, each)) for each in (sent, request("cross_entropy", 1))]
        norms += [bench.optim_step(model, STEP)["grad_norm"] for model in models]
    return outputs, norms


def difference(one, other):
    return float((one.double() - other.double()).norm() / one.double().norm().clamp(min=1e-30))


def compared(folder, dtype, rank):
    alone, together = benches(folder, dtype, rank)
    chosen = [("mlp", "head"), ("attention", "mlp", "head")] if rank else [("attention", "mlp", "head")] * 2
    new = [(rank and 4 + number, number, parts) for number, parts in enumerate(chosen)]
    ones = [alone.engine.held(alone.engine.new_adapter(*each)) for each in new]
    parts = [together.engine.held(together.engine.new_adapter(*each)) for each in new]
    first, second = steps(alone, ones), steps(together, parts, added)
    largest, log_probs = max(abs(a - b) / a for a, b in zip(first[1], second[1], strict=True)), 0.0
    for one, other in zip(first[0], second[0], strict=True):
        value = one.metrics["loss:sum"]
        largest = max(largest, abs(value - other.metrics["loss:sum"]) / abs(value))
        for a, b in zip(one.log_probs, other.log_probs, strict=True):
            log_probs = max(log_probs, float(np.abs(a - b).max() / np.abs(a).max()))
    weights = 0.0
    for one, other in zip(ones, parts, strict=True):
        one, other = alone.engine.whole(one), together.engine.whole(other)
        assert set(one.weights.tensors) == set(other.weights.tensors)
        assert one.num_steps == other.num_steps == 3
        for name, value in one.weights.tensors.items():
            weights = max(weights, difference(value, other.weights.tensors[name]))
        for name, value in one.optimizer_tensors().items():
            weights = max(weights, difference(value, other.optimizer_tensors()[name]))
    again = [together.engine.held(together.engine.whole(model)) for model in parts]
    assert steps(together, parts, added)[1] == steps(together, again, added)[1], "a saved model goes on with other bits"
    for one, other in zip(parts, again, strict=True):
        for name, value in together.engine.whole(one).weights.tensors.items():
            assert torch.equal(value, together.engine.whole(other).weights.tensors[name])
    return {"outputs": largest, "log_probs": log_probs, "weights": weights}


@on(2)
def check_adapters_float64(folder):
    return compared(folder, "float64", 8)


@on(2)
def check_adapters_float32(folder):
    return compared(folder, "float32", 8)


@on(2)
def check_adapters_bfloat16(folder):
    return compared(folder, "bfloat16", 8)


@on(2)
def check_all_weights_float64(folder):
    return compared(folder, "float64", 0)


@on(2)
def check_all_weights_bfloat16(folder):
    return compared(folder, "bfloat16", 0)
