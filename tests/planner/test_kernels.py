"""Kernel times against measured kernels that the fit has not seen."""

import statistics
from collections import defaultdict
from pathlib import Path

import pytest

from verl.planner import kernels
from verl.planner.cluster import _rows, known_device

POINTS = [
    line.split(",")
    for line in Path(__file__).with_name("held_out_kernels.csv").read_text().splitlines()
    if line[0] != "#"
]
DEVICES = sorted({row[0] for row in POINTS})
FUNCTIONS = {
    "matmul": kernels.matmul_time,
    "prefill": kernels.prefill_time,
    "decode": kernels.decode_time,
    "experts": lambda *arguments: kernels.experts_time(*arguments, even=True),
}


def error(row):
    name, kernel, *arguments, measured = row
    device, numbers = known_device(name), [float(a) for a in arguments]
    if kernel in FUNCTIONS:
        predicted = FUNCTIONS[kernel](device, *numbers)
    else:
        fit = device.kernels.collectives[kernel]
        predicted = kernels.collective_time(fit, kernel.removeprefix("small_"), *numbers)
    return abs(float(predicted) / float(measured) - 1)


@pytest.mark.parametrize("device", DEVICES)
def test_held_out_kernels(device):
    """The median over all kernels of a device; the sample has 24 of each, from the shortest to the longest."""
    assert statistics.median(error(row) for row in POINTS if row[0] == device) <= 0.1


def test_recorded_errors_of_all_held_out_points():
    """devices.yaml has the median error of each of the 45 fits on every held-out kernel: none is above a tenth."""
    recorded = [e["held_out_median"] for row in _rows("devices.yaml").values() for e in row["errors"].values()]
    assert len(recorded) == 45
    assert max(recorded) <= 0.1
    assert statistics.median(recorded) <= 0.065


def test_the_sample_is_of_the_recorded_fits():
    """The errors of the sample are within a factor of three of the fits' errors, for the kernels with many points."""
    errors = defaultdict(list)
    for row in POINTS:
        errors[row[0], row[1]].append(error(row))
    for device in DEVICES:
        recorded = _rows("devices.yaml")[device]["errors"]["matmul"]["held_out_median"]
        assert statistics.median(errors[device, "matmul"]) < 3 * recorded


def test_no_kernel_gets_slower_on_a_faster_device():
    """Peak, bandwidth and links twice as high; the number of processors stays."""
    from dataclasses import replace

    device = known_device("h100_sxm")
    faster = replace(device, peak=2 * device.peak, bandwidth=2 * device.bandwidth)
    for row in POINTS:
        if row[1] in FUNCTIONS:
            numbers = [float(a) for a in row[2:-1]]
            assert FUNCTIONS[row[1]](faster, *numbers) <= FUNCTIONS[row[1]](device, *numbers)
