"""Models of the service over several ranks of gloo against one device."""

from dataclasses import replace
from statistics import fmean

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
    """The service's computation on this rank only, on all ranks together and, in bfloat16, on this rank in float32."""
    path = folder / "llama"
    if dist.get_rank() == 0 and not path.exists():
        make_tiny_model(path)
    dist.barrier()
    key, device = "actor_rollout_ref.actor.fsdp_config.dtype", torch.device("cpu")
    config = serving_config(str(path), [f"{key}={dtype}"], rank=rank)
    engine = config.actor_rollout_ref.actor.fsdp_config
    benches = [Workbench(config, device), Workbench(config, device, mesh_of(engine, dist.get_world_size()))]
    if dtype == "bfloat16":
        benches.append(Workbench(serving_config(str(path), [f"{key}=float32"], rank=rank), device))
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


def results_of(bench, models, join=lambda output: output):
    """Three steps of `models`, and their results by kind and name: losses and norms, log-probs, weights and moments."""
    outputs, norms = steps(bench, models, join)
    held = [bench.engine.whole(model) for model in models]
    assert all(model.num_steps == 3 for model in held)
    numbers = [*norms, *(output.metrics["loss:sum"] for output in outputs)]
    return {
        "outputs": {place: torch.tensor(number, dtype=torch.float64) for place, number in enumerate(numbers)},
        "log_probs": dict(enumerate(torch.as_tensor(x) for output in outputs for x in output.log_probs)),
        "weights": {(n, name): x for n, model in enumerate(held) for name, x in model.weights.tensors.items()}
        | {(n, "optimizer", name): x for n, model in enumerate(held) for name, x in model.optimizer_tensors().items()},
    }


def differences(one, other, joined=max):
    """The largest relative difference of each kind of results, or another function of its differences."""
    assert all(one[kind].keys() == other[kind].keys() for kind in one)
    return {kind: joined([difference(x, other[kind][name]) for name, x in one[kind].items()]) for kind in one}


def compared(folder, dtype, rank):
    """The differences of two ranks from one device. In bfloat16: their mean error, relative to one device's."""
    alone, together, *wide = benches(folder, dtype, rank)
    chosen = [("mlp", "head"), ("attention", "mlp", "head")] if rank else [("attention", "mlp", "head")] * 2
    new = [(rank and 4 + number, number, parts) for number, parts in enumerate(chosen)]
    models = [
        [bench.engine.held(bench.engine.new_adapter(*each)) for each in new] for bench in (alone, together, *wide)
    ]
    expected = results_of(alone, models[0])
    results = results_of(together, models[1], added)
    measured = differences(expected, results)
    for bench in wide:
        exact = results_of(bench, models[2])
        errors, ours = (differences(exact, rounded, fmean) for rounded in (expected, results))
        # 24 losses and norms are too few for a mean, and follow from the log-probs and the moments
        measured = {kind: error / errors[kind] for kind, error in ours.items() if kind != "outputs"}
    parts = models[1]
    again = [together.engine.held(together.engine.whole(model)) for model in parts]
    assert steps(together, parts, added)[1] == steps(together, again, added)[1], "a saved model goes on with other bits"
    for one, other in zip(parts, again, strict=True):
        for name, value in together.engine.whole(one).weights.tensors.items():
            assert torch.equal(value, together.engine.whole(other).weights.tensors[name])
    return measured


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
