"""Schedule, masters, clipping and state."""

import inspect
import math

import pytest
import torch
from torch import nn
from transformers import SchedulerType, get_scheduler
from transformers.optimization import TYPE_TO_SCHEDULER_FUNCTION

from verl.config import OptimConfig
from verl.errors import CheckpointError, ConfigError
from verl.models.load import load_causal_lm
from verl.models.optim import MasterOptimizer, lr_at
from verl.models.optimizers import matrix_names
from verl.models.rounding import Rounding


@pytest.mark.parametrize(
    ("settings", "step", "expected"),
    [
        ({}, 0, 1.0),
        ({}, 99, 1.0),
        ({"lr_warmup_steps": 4}, 0, 0.0),
        ({"lr_warmup_steps": 4}, 1, 0.25),
        ({"lr_warmup_steps": 4}, 4, 1.0),
        ({"lr_warmup_steps": 4, "zero_indexed_step": False}, 0, 0.25),
        ({"lr_warmup_steps_ratio": 0.1}, 5, 0.5),  # 10 of 100 steps
        ({"lr_warmup_steps": 0, "lr_warmup_steps_ratio": 0.1}, 5, 0.5),
        ({"lr_scheduler_type": "cosine"}, 0, 1.0),
        ({"lr_scheduler_type": "cosine"}, 50, 0.5),
        ({"lr_scheduler_type": "cosine"}, 100, 0.0),
        ({"lr_scheduler_type": "cosine", "min_lr_ratio": 0.2}, 100, 0.2),
        ({"lr_scheduler_type": "cosine", "min_lr": 0.5}, 100, 0.5),
        ({"lr_scheduler_type": "cosine", "min_lr_ratio": 0.2}, 25, 0.4 * math.cos(math.pi / 4) + 0.6),
        ({"lr_scheduler_type": "cosine", "num_cycles": 1.0}, 100, 1.0),
        ({"lr_scheduler_type": "cosine", "lr_warmup_steps": 20}, 60, 0.5),
        ({"lr_scheduler_type": "cosine", "total_training_steps": 200}, 100, 0.5),
    ],
)
def test_schedule(settings, step, expected):
    assert lr_at(step, OptimConfig(lr=1.0, **settings), 100) == pytest.approx(expected, abs=1e-12)


@pytest.mark.parametrize("settings", [{"lr_scheduler_type": "cosine"}, {"lr_warmup_steps_ratio": 0.1}])
def test_a_schedule_over_an_unknown_number_of_steps_is_refused(settings):
    assert lr_at(9, OptimConfig(lr=1.0, lr_warmup_steps=3), 0) == 1.0
    with pytest.raises(ConfigError, match="depends on the number of steps, which your loop does not say"):
        lr_at(0, OptimConfig(lr=1.0, **settings), 0)


# (schedule, its arguments, transformers' step -> rate worked by hand), with 4 steps of warm-up of 20 and lr 2
TRANSFORMERS_SCHEDULES = [
    ("constant_with_warmup", {}, {1: 0.5, 12: 2.0}),
    ("linear", {}, {1: 0.5, 12: 1.0}),
    ("cosine", {}, {1: 0.5, 12: 1.0}),
    ("cosine_with_restarts", {"num_cycles": 2}, {1: 0.5, 8: 1.0, 12: 2.0}),
    ("cosine_with_min_lr", {"min_lr_rate": 0.1}, {1: 0.5, 12: 1.1}),
    ("cosine_with_min_lr", {"min_lr": 0.5}, {12: 1.25}),
    ("cosine_warmup_with_min_lr", {"min_lr": 0.5}, {0: 0.5, 11: 1.25}),
    ("polynomial", {"power": 2.0, "lr_end": 0.4}, {12: 0.8, 19: 0.4 + 1.6 / 256}),
    ("inverse_sqrt", {}, {4: 2.0, 16: 1.0}),
    ("warmup_stable_decay", {"num_decay_steps": 8, "decay_type": "linear"}, {1: 0.5, 11: 2.0, 16: 1.0, 19: 0.25}),
]


@pytest.mark.parametrize(("kind", "arguments", "rates"), TRANSFORMERS_SCHEDULES)
def test_schedules_of_transformers(kind, arguments, rates):
    optimizer = torch.optim.SGD([torch.zeros(1)], lr=2.0)
    schedule = get_scheduler(kind, optimizer, 4, 20, arguments)
    theirs = []
    for _ in range(20):
        theirs += schedule.get_last_lr()
        optimizer.step()
        schedule.step()
    config = OptimConfig(lr=2.0, lr_scheduler_type=kind, lr_scheduler_kwargs=arguments, lr_warmup_steps=4)
    ours = {step: lr_at(step, config, 20) for step in reversed(range(20))}  # whatever steps were asked for before
    assert [ours[step] for step in range(20)] == pytest.approx(theirs, abs=1e-12)
    assert {step: ours[step] for step in rates} == pytest.approx(rates)


def test_every_schedule_of_transformers_that_depends_on_the_step():
    from verl.config.sections.model import OWN_SCHEDULES, SCHEDULES

    stateful = {"reduce_lr_on_plateau", "greedy"}
    supported = {*OWN_SCHEDULES, *SCHEDULES, *stateful}
    assert {kind.value for kind in SchedulerType} - supported == set()  # an older release lacks some
    for kind, arguments in SCHEDULES.items():
        if kind in set(SchedulerType):
            takes = inspect.signature(TYPE_TO_SCHEDULER_FUNCTION[SchedulerType(kind)]).parameters
            assert set(takes) - {"optimizer", "num_warmup_steps", "num_training_steps", "last_epoch"} == set(arguments)


def test_unknown_schedule_is_named():
    with pytest.raises(ConfigError, match="wsd"):
        lr_at(0, OptimConfig(lr_scheduler_type="wsd"), 10)


def test_arguments_that_a_schedule_refuses_are_named():
    config = OptimConfig(lr=1e-5, lr_scheduler_type="polynomial", lr_scheduler_kwargs={"lr_end": 1e-4})
    with pytest.raises(ConfigError, match=r"lr_scheduler_kwargs does not fit polynomial.*must be smaller"):
        lr_at(0, config, 10)


def network(dtype=torch.float32):
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(4, 8), nn.Tanh(), nn.Linear(8, 1)).to(dtype)


def backward(net, seed, scale=1.0):
    generator = torch.Generator().manual_seed(seed)
    x = torch.randn(16, 4, generator=generator).to(net[0].weight.dtype)
    (net(x).square().mean() * scale).backward()


def test_equals_torch_adamw_with_clipping():
    ours, theirs = network(), network()
    config = OptimConfig(lr=1e-2, clip_grad=0.5, weight_decay=0.1)
    optimizer = MasterOptimizer(ours, config, torch.float32)
    reference = torch.optim.AdamW(theirs.parameters(), lr=1e-2, weight_decay=0.1, betas=(0.9, 0.999))
    for step in range(5):
        backward(ours, step, 100.0)
        backward(theirs, step, 100.0)
        expected = nn.utils.clip_grad_norm_(theirs.parameters(), 0.5)
        reference.step()
        reference.zero_grad()
        assert optimizer.step(1e-2).grad_norm == pytest.approx(expected.item(), rel=1e-6)
    for a, b in zip(ours.parameters(), theirs.parameters(), strict=True):
        assert torch.allclose(a, b, rtol=1e-5, atol=1e-7)


@pytest.mark.parametrize("shape", [(3, 5), (6, 4), (2, 4, 3)])
def test_muon_steps_by_momentum_with_changed_singular_values(shape):
    """The rounds, on singular values: s -> 3.4445 s - 4.775 s^3 + 2.0315 s^5, five times. The vector steps as with AdamW."""
    torch.manual_seed(0)
    net = nn.Module()
    net.gate_up_proj = nn.Parameter(torch.randn(shape, dtype=torch.float64))
    net.bias = nn.Parameter(torch.randn(3, dtype=torch.float64))
    config = OptimConfig(optimizer="Muon", weight_decay=0.1, clip_grad=math.inf)
    optimizer = MasterOptimizer(net, config, torch.float64)
    expected, momentum, vector = net.gate_up_proj.detach().clone(), torch.zeros(shape), net.bias.detach().clone()
    adam = torch.optim.AdamW([vector], weight_decay=0.1)
    for _ in range(3):
        gradient, vector.grad = torch.randn(shape, dtype=torch.float64), torch.randn(3, dtype=torch.float64)
        momentum = 0.95 * momentum + 0.05 * gradient
        u, s, v = torch.linalg.svd(0.05 * gradient + 0.95 * momentum, full_matrices=False)
        s = s / s.square().sum(-1, keepdim=True).sqrt()
        for _ in range(5):
            s = 3.4445 * s - 4.775 * s**3 + 2.0315 * s**5
        expected -= 1e-2 * (0.1 * expected + 0.2 * max(shape[-2:]) ** 0.5 * u @ torch.diag_embed(s) @ v)
        net.gate_up_proj.grad, net.bias.grad = gradient, vector.grad.clone()
        optimizer.step(1e-2)
        adam.param_groups[0]["lr"] = 1e-2
        adam.step()
    assert torch.allclose(net.gate_up_proj, expected, rtol=1e-10, atol=1e-12)
    assert torch.allclose(net.bias, vector, rtol=1e-12, atol=1e-14)
    assert {key.rpartition("/")[2] for key in optimizer.state() if "proj" in key} == {"momentum_buffer"}


def test_muon_leaves_embeddings_and_heads_to_adamw(tiny_llama):
    names = matrix_names(load_causal_lm(tiny_llama))
    assert {name.split(".")[-2] for name in names} == {
        *("q_proj", "k_proj", "v_proj", "o_proj"),
        *("gate_proj", "up_proj", "down_proj"),
    }


def test_a_parameter_without_a_gradient_steps_as_with_a_gradient_of_zero():
    ours, theirs = network(), network()
    optimizers = [MasterOptimizer(net, OptimConfig(lr=1e-2, weight_decay=0.1), torch.float32) for net in (ours, theirs)]
    for step in range(3):
        for net, optimizer in zip((ours, theirs), optimizers, strict=True):
            backward(net, step)
            if step:
                net[2].bias.grad = torch.zeros_like(net[2].bias) if net is theirs else None
            optimizer.step(1e-2)
    assert all(torch.equal(a, b) for a, b in zip(ours.parameters(), theirs.parameters(), strict=True))


def test_float32_parameters_are_their_own_masters():
    net = network()
    optimizer = MasterOptimizer(net, OptimConfig(), torch.float32)
    assert all(optimizer.masters[name] is p for name, p in net.named_parameters())


def test_masters_gather_what_bfloat16_would_lose():
    """1000 updates far below bfloat16's resolution move the weights."""
    net = network()
    start = {name: p.detach().clone() for name, p in net.named_parameters()}
    optimizer = MasterOptimizer(net, OptimConfig(optimizer="SGD", weight_decay=0.0, clip_grad=1.0), torch.bfloat16)
    assert net[0].weight.dtype == torch.bfloat16
    for _ in range(50):
        net[0].weight.sum().backward()
        optimizer.step(1e-4)
    moved = start["0.weight"] - optimizer.masters["0.weight"]
    assert torch.allclose(moved, torch.full_like(moved, 50 * 1e-4 / math.sqrt(32)), rtol=1e-3)
    assert torch.equal(
        net[0].weight, Rounding().rounded("0.weight", optimizer.masters["0.weight"].data, torch.bfloat16)
    )
    assert torch.equal(start["2.bias"], optimizer.masters["2.bias"])


def test_micro_batches_are_summed_in_float32():
    net = network()
    optimizer = MasterOptimizer(net, OptimConfig(clip_grad=0.0), torch.bfloat16)
    for _ in range(300):  # bfloat16 stops counting at 256
        net[2].bias.sum().backward()
    assert optimizer.masters["2.bias"].grad.item() == 300.0
    assert net[2].bias.grad is None


@pytest.mark.parametrize("bad", [float("nan"), float("inf")])
def test_a_norm_that_is_not_finite_skips_the_step(bad, caplog):
    net = network()
    optimizer = MasterOptimizer(net, OptimConfig(lr=1.0), torch.float32)
    backward(net, 0)
    optimizer.step(1e-2)
    before = [p.detach().clone() for p in net.parameters()]
    state = {k: v.clone() for k, v in optimizer.state().items()}
    backward(net, 1)
    net[0].weight.grad[0, 0] = bad
    result = optimizer.step(1.0)
    assert not result.taken
    assert not math.isfinite(result.grad_norm)
    assert "skipped" in caplog.text
    assert all(torch.equal(a, b) for a, b in zip(before, net.parameters(), strict=True))
    assert all(torch.equal(state[k], v) for k, v in optimizer.state().items())
    assert all(p.grad is None for p in net.parameters())


@pytest.mark.seed("F7")
@pytest.mark.parametrize("dtype", [torch.float32, torch.float16])
def test_the_dtype_of_gradients_that_are_not_finite_is_named(dtype, caplog):
    """Float16 ends at 65504: the loss is finite, and its gradients are not."""
    net = network()
    optimizer = MasterOptimizer(net, OptimConfig(), dtype)
    x = torch.ones(16, 4, dtype=dtype)
    loss = net(x).float().sum() * (6e4 if dtype == torch.float16 else 1e39)
    loss.backward()
    assert not optimizer.step(1e-2).taken
    computes = str(dtype).removeprefix("torch.")
    assert "of 4 gradients are not finite, nearest to the loss that of 2.bias" in caplog.text
    assert f"which computes in {computes} and trains in float32" in caplog.text
    assert ("fsdp_config.dtype=float32 shows" in caplog.text) == (dtype != torch.float32)


@pytest.mark.parametrize("name", ["AdamW", "Adam", "SGD"])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_state_continues_bit_for_bit(name, dtype):
    config = OptimConfig(optimizer=name, lr=1e-2)
    one, two = network(), network()
    first = MasterOptimizer(one, config, dtype)
    for step in range(3):
        backward(one, step)
        first.step(1e-2)
    second = MasterOptimizer(two, config, dtype)
    with torch.no_grad():
        for key, master in first.masters.items():
            second.masters[key].copy_(master)
    second.round_masters()
    second.load_state([(k, v.clone()) for k, v in first.state().items()], first.num_steps)
    for step in range(3, 6):
        for net, optimizer in ((one, first), (two, second)):
            backward(net, step)
            optimizer.step(1e-2)
    assert first.num_steps == second.num_steps == 6
    assert all(torch.equal(a, b) for a, b in zip(one.parameters(), two.parameters(), strict=True))
    assert all(torch.equal(first.masters[k], second.masters[k]) for k in first.masters)


def test_foreign_state_is_refused():
    optimizer = MasterOptimizer(network(), OptimConfig(), torch.float32)
    with pytest.raises(CheckpointError, match=r"nothing\.weight"):
        optimizer.load_state([("nothing.weight/exp_avg", torch.zeros(1))], 1)
    with pytest.raises(CheckpointError, match=r"0\.weight/exp_avg"):
        optimizer.load_state([("0.weight/exp_avg", torch.zeros(3, 3))], 1)


def test_unknown_optimizers_are_named():
    with pytest.raises(ConfigError, match="did you mean 'Adam'"):
        MasterOptimizer(network(), OptimConfig(optimizer="AdamV"), torch.float32)
    with pytest.raises(ConfigError, match="no_such_module"):
        MasterOptimizer(network(), OptimConfig(optimizer_impl="no_such_module"), torch.float32)


@pytest.mark.parametrize("name", ["AdamW", "SGD", "Adagrad", "Muon"])
@pytest.mark.parametrize(
    ("dtype", "masters"), [(torch.float32, False), (torch.bfloat16, False), (torch.bfloat16, True)]
)
def test_state_on_the_host_gives_the_same_steps(name, dtype, masters, monkeypatch):
    """One parameter's at a time is on the device; the others' stays."""
    config, nets = OptimConfig(optimizer=name, lr=0.1), [network(dtype) for _ in range(3)]
    plain, *offloaded = [
        MasterOptimizer(net, config, dtype, offloads=i > 0, host_masters=masters and i > 0)
        for i, net in enumerate(nets)
    ]
    offloads, continued = offloaded
    on_device, peak = set(), [0]

    def move(master, device, slots=offloads._move_slots):
        slots(master, device)
        (on_device.discard if device.type == "cpu" and master in on_device else on_device.add)(master)
        peak[0] = max(peak[0], len(on_device))

    monkeypatch.setattr(offloads, "_move_slots", move)
    for seed in range(3):
        for net, optimizer in zip(nets[:2], (plain, offloads), strict=True):
            backward(net, seed)
            optimizer.step(0.1)
    assert peak[0] == 1
    assert not on_device
    continued.load_state(offloads.state().items(), offloads.num_steps)
    nets[2].load_state_dict(nets[1].state_dict())
    for name_, master in continued.masters.items():
        master.data.copy_(offloads.masters[name_].data)
    for net, optimizer in zip(nets, (plain, offloads, continued), strict=True):
        backward(net, 7)
        optimizer.step(0.1)
    for other in nets[1:]:
        assert all(map(torch.equal, nets[0].parameters(), other.parameters()))
