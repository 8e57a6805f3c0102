"""Step times of NeMo-RL (v0.5 and v0.6, H100, BF16, Megatron) against predictions for the same layouts."""

import math
import statistics
from typing import NamedTuple

import pytest

from verl.planner import (
    Cluster,
    EngineLayout,
    Lengths,
    ParallelLayout,
    Workload,
    known_shape,
    time_forward,
    time_generate,
    time_train,
)
from verl.planner.generation import time_transition


class Row(NamedTuple):
    """`engine` is the tensor parallel size of generation, `train` (t, c, e, p); `ahead`: generation runs a step ahead, on
    half of the devices."""

    model: str
    devices: int
    prompts: int
    longest: int
    mean: int
    engine: int
    train: tuple[int, int, int, int]
    seconds: float
    ahead: bool = False


V3, Q235, Q30, L8, Q32 = "DeepSeek-V3", "Qwen3-235B-A22B", "Qwen3-30B-A3B", "Llama-3.1-8B", "Qwen3-32B"
ROWS = [
    Row(V3, 256, 16, 1536, 701, 32, (1, 1, 16, 16), 134),
    Row(V3, 512, 16, 1536, 701, 32, (1, 1, 16, 16), 111),
    Row(V3, 512, 16, 1536, 701, 32, (1, 1, 16, 16), 64.1, True),
    Row(Q235, 128, 16, 8192, 5698, 16, (2, 2, 16, 8), 395),
    Row(Q235, 256, 16, 8192, 5698, 16, (2, 2, 16, 8), 312),
    Row(Q235, 256, 16, 8192, 5698, 8, (4, 1, 16, 8), 231, True),
    Row(Q30, 32, 64, 4096, 3203, 2, (1, 1, 8, 1), 192),
    Row(Q30, 32, 64, 4096, 3203, 2, (1, 1, 8, 2), 152, True),
    Row(L8, 16, 64, 4096, 1019, 1, (1, 1, 1, 2), 92.8),
    Row(L8, 16, 64, 4096, 1123, 1, (1, 1, 1, 2), 64.8, True),
    Row(Q32, 32, 64, 4096, 3251, 4, (4, 1, 1, 4), 376),
    Row(Q32, 64, 64, 4096, 3251, 4, (4, 1, 1, 4), 200, True),
]
FAMILIES = list(dict.fromkeys(row.model for row in ROWS))


def predicted(row):
    shape, work = known_shape(row.model), Workload(row.prompts, 32, 100, Lengths.of(row.mean, row.longest))
    count = row.devices // 2 if row.ahead else row.devices
    cluster = Cluster.of("h100_sxm", count)
    tensor, context, expert, pipeline = row.train
    data = count // (tensor * context * pipeline)
    layout = ParallelLayout(
        data, tensor, pipeline, context, expert, 1, micro_batch=max(row.longest, 4096), logit_chunk=1024
    )
    engine = EngineLayout(count // row.engine, row.engine)
    generate = time_generate(shape, engine, cluster, work).seconds
    # log-probabilities under the policy and under the reference, then the update
    train = (
        2 * time_forward(shape, layout, cluster, work.batch).seconds
        + time_train(shape, layout, cluster, work.batch).seconds
    )
    sync = time_transition(shape, layout, engine, cluster, colocated=not row.ahead)
    return sync + (max(generate, train) if row.ahead else generate + train)


def ratios():
    return {row: predicted(row) / row.seconds for row in ROWS}


def errors_after_one_constant(by_row):
    """One efficiency constant for each family: the geometric mean of its ratios."""
    constants = {
        f: math.exp(statistics.mean(math.log(r) for row, r in by_row.items() if row.model == f)) for f in FAMILIES
    }
    return [abs(ratio / constants[row.model] - 1) for row, ratio in by_row.items()]


def test_median_error_after_one_constant_per_family():
    assert statistics.median(errors_after_one_constant(ratios())) <= 0.25


def test_median_error_after_a_constant_for_all():
    values = list(ratios().values())
    constant = statistics.median(values)
    assert statistics.median(abs(r / constant - 1) for r in values) <= 0.25


@pytest.mark.parametrize("family", FAMILIES)
def test_order_within_a_family(family):
    rows = [row for row in ROWS if row.model == family]
    assert sorted(rows, key=predicted) == sorted(rows, key=lambda row: row.seconds)
