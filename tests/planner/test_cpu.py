"""The device `cpu`: float32, and prompts that are computed once."""

from dataclasses import replace

import pytest

from verl.planner import Cluster, Lengths, ParallelLayout, SequenceBatch, Workload, known_shape, memory, time_forward
from verl.planner.cluster import measure_cpu
from verl.planner.kernels import matmul_time

SHAPE, LAYOUT, BATCH = known_shape("Qwen2.5-0.5B"), ParallelLayout(zero=0), SequenceBatch.equal(8, 512)


def test_float32_state_is_16_bytes_a_parameter_and_activations_are_doubled():
    narrow, wide = (memory(SHAPE, LAYOUT, tokens=1024, sequence=512, width=width) for width in (2, 4))
    assert (narrow.state, wide.state) == (18 * narrow.weights / 2, 16 * wide.weights / 4)
    assert wide.activations == 2 * narrow.activations


def test_a_shared_prompt_is_computed_once():
    apart = Workload(4, 8, 100, Lengths.constant(50))
    shared = replace(apart, shares_prompts=True)
    assert apart.batch.tokens == 4 * 8 * 150
    assert shared.batch.tokens == 4 * (100 + 8 * 50)
    # each response token attends to the prompt and to half of the response, in both cases
    pairs = 4 * (100**2 + 8 * (2 * 100 * 50 + 50**2))
    assert shared.batch.num * shared.batch.square == pytest.approx(pairs)


def test_sequences_are_whole():
    """96 ranks take as long for 128 sequences as for 192: the slowest has two."""
    cluster, layout = Cluster.of("h100_sxm", 96), ParallelLayout(data=96)
    one, most, two = (
        time_forward(SHAPE, layout, cluster, SequenceBatch.equal(n, 8192)).seconds for n in (96, 128, 192)
    )
    assert most == two > 1.8 * one


@pytest.mark.slow
def test_this_processor():
    """The micro-benchmark's own sizes: a matmul of twice the rows takes twice the time."""
    device = measure_cpu(16e9, threads=1).device
    assert device.width == 4
    assert 1e9 < device.bandwidth < 1e12
    assert 1e9 < device.peak < 1e13
    large, small = (float(matmul_time(device, m, 768, 768)) for m in (4096, 2048))
    assert large == pytest.approx(2 * small, rel=0.05)
