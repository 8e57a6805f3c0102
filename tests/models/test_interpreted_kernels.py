"""Triton's kernels without a GPU: interpreted, compiled for GPUs that are not there, and the ops that call them."""

import logging
import os
import subprocess
import sys
from pathlib import Path

import pytest
import torch

import verl.rollout.native.engine  # noqa: F401 - it has all ops
from verl.models.ops import pointwise, table
from verl.models.ops.table import by_torch, has_triton

needs_triton = pytest.mark.skipif(not has_triton(), reason="needs Triton: pip install --no-deps triton==3.6.0")
HERE = Path(__file__).parent


def run(command, limit_s, **environment):
    result = subprocess.run(
        [sys.executable, *command], env={**os.environ, **environment}, capture_output=True, text=True, timeout=limit_s
    )
    assert result.returncode == 0, (result.stdout + result.stderr)[-3000:]
    return result.stdout


def interpret(num_shapes, limit_s):
    options = ["-q", "-p", "no:cacheprovider", "-o", "addopts=", str(HERE / "test_kernels.py")]
    out = run(["-m", "pytest", *options], limit_s, TRITON_INTERPRET="1", KERNEL_SHAPES=str(num_shapes))
    assert " passed" in out


@needs_triton
def test_kernels_in_the_interpreter():
    interpret(num_shapes=8, limit_s=300)


@needs_triton
@pytest.mark.slow
def test_kernels_in_the_interpreter_over_many_shapes():
    interpret(num_shapes=200, limit_s=1800)


@needs_triton
@pytest.mark.slow
@pytest.mark.parametrize("target", ["cuda 80 32", "cuda 90 32", "hip gfx942 64"])
def test_kernels_compile_for_gpus(target, tmp_path):
    """As a first call on the GPU compiles them, for shapes of a 7B model; none keeps registers in memory."""
    out = run([str(HERE / "compile_kernels.py"), *target.split()], 600, TRITON_CACHE_DIR=str(tmp_path))
    assert len(out.splitlines()) >= 12
    assert all(line.endswith("0 bytes spilled") for line in out.splitlines())


def test_ops_are_differentiable():
    torch.manual_seed(0)
    x, delta, weight = (torch.randn(s, dtype=torch.float64, requires_grad=True) for s in ((4, 6), (4, 6), (6,)))
    assert torch.autograd.gradcheck(lambda x, w: pointwise.rms_norm(x, w, 1e-3), (x, weight))
    assert torch.autograd.gradcheck(lambda x, d, w: pointwise.add_norm(x, d, w, 1e-3), (x, delta, weight))
    assert torch.autograd.gradcheck(pointwise.swiglu, (x,))


def test_a_kernel_that_fails_leaves_the_work_to_torch(monkeypatch, caplog):
    """Once: after the first failure it is not tried again."""
    tried = []

    def load_nothing(path):
        tried.append(path)
        raise RuntimeError("no compiler")

    monkeypatch.setattr(table, "load", load_nothing)
    monkeypatch.setattr(table, "has_triton", lambda: True)
    monkeypatch.setattr(torch.cuda, "device_of", lambda tensor: torch.no_grad())
    on_gpu = table._on_gpu(by_torch(pointwise.swiglu), "swiglu:launch_swiglu")
    gate_up = torch.randn(2, 8)
    with caplog.at_level(logging.WARNING):
        assert all(torch.equal(on_gpu(gate_up), pointwise.swiglu(gate_up)) for _ in range(2))
    assert tried == ["swiglu:launch_swiglu"]
    assert "no compiler" in caplog.text
    assert on_gpu(gate_up.double()).dtype == torch.float64


@needs_triton
@pytest.mark.parametrize("name", [name for name, op in table.OPS.items() if op.triton])
def test_every_kernel_is_loaded_by_its_name(name):
    assert callable(table.load(table.OPS[name].triton))
