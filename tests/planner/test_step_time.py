"""Times of training steps against published measurements."""

from dataclasses import replace

import pytest

from tests.models.test_memory import MEGATRON, megatron
from verl.models.memory import kept_activations
from verl.planner import Cluster, ModelShape, ParallelLayout, SequenceBatch, known_shape, time_forward, time_train
from verl.planner.generation import decode_step
from verl.planner.overrides import _checkpointing
from verl.planner.step_time import layer_matmuls, linear_matmuls, mlp_matmuls

# iteration in seconds on A100s, measured (arXiv:2205.05198, table 5): full recomputation; sequence parallel and selective
ITERATION = {"22B": (1.42, 1.10), "175B": (18.13, 13.75), "530B": (49.05, 37.83), "1T": (94.42, 71.49)}
SEQUENCES = {"22B": 4, "175B": 64, "530B": 280, "1T": 512}

# nanotron, llama-1B, 1024 sequences of 4096 tokens: devices, dp, tp, pp, sequences of a micro-batch, seconds
NANOTRON = """8 4 2 1 8 15.8, 8 2 4 1 8 18.8, 8 2 1 4 2 22.4, 8 2 2 2 1 46.8, 16 4 4 1 16 10.3, 16 1 4 4 4 17.8, 16 1 8 2 8
18.2, 16 2 1 8 4 28.4, 16 1 2 8 8 55.5, 16 1 2 8 2 63, 64 16 4 1 8 2.50, 64 16 4 1 4 2.85, 64 16 4 1 2 4.80,
64 32 2 1 8 2.13, 64 32 2 1 2 2.79, 64 1 8 8 16 18.8"""


@pytest.mark.parametrize("name", MEGATRON)
def test_megatron_iterations_within_a_tenth(name):
    layers, hidden, heads, tensor, pipeline, *_ = MEGATRON[name]
    shape = ModelShape.gpt(layers, hidden, heads, 51200)
    _, layout, tokens = megatron(name)
    layout = layout.replace(micro_batch=tokens)
    ways = layout.replace(recompute="full"), layout.replace(sequence_parallel=True, recompute="scores")
    batch = SequenceBatch.equal(SEQUENCES[name], 2048)
    cluster = Cluster.of("a100_sxm", tensor * pipeline)
    seconds = tuple(time_train(shape, way, cluster, batch).seconds for way in ways)
    assert seconds == pytest.approx(ITERATION[name], rel=0.1)


@pytest.mark.parametrize("name", ["Qwen2.5-7B", "Qwen3-30B-A3B", "Moonlight-16B-A3B", "Qwen3.5-35B-A3B"])
def test_operations_of_a_sequence_are_the_sum_of_its_kernels(name):
    """The balancer counts the operations that the cost model multiplies."""
    shape = known_shape(name)
    linear, quadratic = shape.flops
    mixtures = shape.num_mixture_layers
    cached, recurrence = shape.num_cached_layers, 0
    sizes = [(layer_matmuls(shape, 1), cached), ([(shape.vocab, shape.hidden)], 1)]
    if shape.linear:
        sizes.append((linear_matmuls(shape.linear, shape.hidden, 1), shape.linear.num_layers))
        recurrence = 6 * shape.linear.state_elements
    sizes += [(mlp_matmuls(shape, shape.intermediate, 1), shape.num_layers - mixtures)]
    sizes += [
        (mlp_matmuls(shape, shape.shared_intermediate, 1), mixtures),
        ([(shape.num_experts, shape.hidden)], mixtures),
    ]
    sizes += [(mlp_matmuls(shape, shape.expert_intermediate, 1), mixtures * shape.experts_per_token)]
    assert linear == recurrence + sum(2 * n * k * count for matmuls, count in sizes for n, k in matmuls)
    values = shape.value_head_dim or shape.head_dim
    assert quadratic == cached * shape.heads * (shape.head_dim + values)  # half of 2 T^2 each, causal


def test_linear_attention_grows_with_the_tokens_alone():
    """Rows four times as long take the same time for as many tokens, but for a quarter of the layers, and a decode step reads
    matrices that do not grow."""
    shape, cluster = known_shape("Qwen3.5-35B-A3B"), Cluster.of("h100_sxm", 8)
    usual = replace(shape, linear=None)

    def seconds(model, length):
        batch = SequenceBatch.equal((1 << 20) // length, length)
        layout = ParallelLayout(data=8, zero=3, expert=8, micro_batch=1 << 16)
        return time_train(model, layout, cluster, batch).parts["attention"]

    def grows(model, time):
        return time(model, 1 << 16) - time(model, 1 << 14)

    def step(model, length):
        return decode_step(model, 1, cluster, 32.0, length).parts["kv cache"]

    for time in (seconds, step):
        assert grows(shape, time) == pytest.approx(grows(usual, time) / 4, rel=0.05)
    assert step(shape, 0) > step(usual, 0)


def test_order_of_nanotron_layouts():
    shape, predicted, measured = known_shape("Llama-3.2-1B"), [], []
    for row in NANOTRON.split(","):
        devices, data, tensor, pipeline, sequences, seconds = row.split()
        layout = ParallelLayout(int(data), int(tensor), int(pipeline), zero=0, micro_batch=int(sequences) * 4096)
        cluster = Cluster.of("h100_sxm", int(devices))
        predicted.append(time_train(shape, layout, cluster, SequenceBatch.equal(1024, 4096)).seconds)
        measured.append(float(seconds))
    assert spearman(predicted, measured) >= 0.9


def spearman(a, b):
    ranks = [[sorted(values).index(v) for v in values] for values in (a, b)]
    n = len(a)
    return 1 - 6 * sum((x - y) ** 2 for x, y in zip(*ranks, strict=True)) / (n * (n * n - 1))


def test_backward_costs_twice_a_forward_and_recomputation_a_third_more():
    shape, cluster, batch = known_shape("Qwen2.5-7B"), Cluster.of("h100_sxm", 8), SequenceBatch.equal(64, 4096)
    layout = ParallelLayout(data=8, micro_batch=8192)
    forward = time_forward(shape, layout, cluster, batch).seconds
    train = time_train(shape, layout, cluster, batch)
    compute = train.seconds - train.parts["data parallel"] - train.parts["optimizer"]
    assert 2.8 < compute / forward < 3.3
    again = time_train(shape, layout.replace(recompute="full"), cluster, batch)
    assert again.seconds == pytest.approx(train.seconds + forward - forward_head(train), rel=0.02)


def test_selective_recomputation_costs_little_and_keeps_less():
    shape, cluster, batch = known_shape("Qwen2.5-7B"), Cluster.of("h100_sxm", 8), SequenceBatch.equal(64, 4096)
    layouts = [ParallelLayout(data=8, micro_batch=8192, recompute=again) for again in ("none", "selective", "full")]
    none, selective, full = (time_train(shape, layout, cluster, batch).seconds for layout in layouts)
    assert none < selective < none + 0.25 * (full - none)
    sizes = [kept_activations(shape, layout, 8192, 4096) for layout in layouts]
    assert sizes[2] < 0.1 * sizes[1] < 0.1 * 0.7 * sizes[0]
    assert _checkpointing(layouts[1]) == "selective"


def test_inputs_on_the_host_cost_time_where_copies_are_slower_than_layers():
    shape, cluster, batch = known_shape("Qwen2.5-7B"), Cluster.of("h100_sxm", 8), SequenceBatch.equal(64, 4096)
    full, host = (ParallelLayout(data=8, micro_batch=8192, recompute=again) for again in ("full", "host"))
    for links, is_slower in ((cluster, False), (replace(cluster, host_bytes_s=cluster.host_bytes_s / 100), True)):
        seconds = [time_train(shape, layout, links, batch).seconds for layout in (full, host)]
        assert (seconds[1] > seconds[0]) == is_slower
    assert kept_activations(shape, host, 8192, 4096) == 2 * 8192 * 2 * shape.hidden


def forward_head(train):
    """The head is not computed again; its forward is about a third of its time."""
    return train.parts["head"] / 3


def test_parts_add_up():
    shape = known_shape("Qwen3-30B-A3B")
    timing = time_train(
        shape,
        ParallelLayout(data=8, expert=8, zero=3, micro_batch=4096),
        Cluster.of("h100_sxm", 8),
        SequenceBatch.equal(64, 4096),
    )
    assert timing.seconds == pytest.approx(sum(timing.parts.values()))
    assert timing.parts["experts"] > 0
    assert timing.parts["expert parallel"] > 0
    assert timing.bound in timing.parts
