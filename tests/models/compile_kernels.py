"""Compiles every kernel for a GPU that need not be there: python compile_kernels.py cuda 90 32 (backend, architecture, threads
of a warp). Prints a line for each kernel, with the bytes of registers that it keeps in memory."""

import re
import subprocess
import sys
import tempfile
from pathlib import Path
from types import SimpleNamespace

import torch
import triton
from triton.backends.compiler import GPUTarget
from triton.runtime import driver
from triton.runtime.jit import JITFunction

from verl.models.ops.table import load
from verl.models.ops.triton import overlap

TOOL = Path(triton.__file__).parent / "backends" / "nvidia" / "bin" / "cuobjdump"


def spilled(kernel):
    if "amdgcn" in kernel.asm:
        counts = re.findall(
            r"vgpr_spill_count: *(\d+)", kernel.asm["amdgcn"]
        )  # scalars go to lanes of vector registers
    else:
        with tempfile.NamedTemporaryFile(suffix=".cubin") as file:
            Path(file.name).write_bytes(kernel.asm["cubin"])
            usage = subprocess.run([TOOL, "-res-usage", file.name], capture_output=True, text=True, check=True).stdout
        counts = re.findall(r"(?:STACK|LOCAL):(\d+)", usage)
    assert counts
    return sum(map(int, counts))


def compile_all(backend, architecture, warp):
    torch.version.hip = "7" if backend == "hip" else None
    target = GPUTarget(backend, int(architecture) if architecture.isdigit() else architecture, int(warp))
    driver.set_active(
        SimpleNamespace(
            get_current_target=lambda: target, get_current_device=lambda: 0, get_current_stream=lambda device: 0
        )
    )
    overlap._is_hopper = lambda device: target.backend == "cuda" and target.arch >= 90
    launch = JITFunction.run

    def compile_only(self, *arguments, grid, warmup, **options):
        kernel = launch(self, *arguments, grid=grid, warmup=True, **options)
        print(f"{self.fn.__module__}.{self.fn.__name__}: {spilled(kernel)} bytes spilled", flush=True)

    JITFunction.run = compile_only
    for dtype in (torch.bfloat16, torch.float32):
        x, weight, gate_up = torch.zeros(64, 3584, dtype=dtype), torch.zeros(3584, dtype=dtype), torch.zeros(64, 37888)
        load("norm:launch_rms_norm")(x, weight, 1e-6)
        load("norm:launch_add_norm")(x, x, weight, 1e-6)
        for through in (None, x):
            load("norm:launch_rms_norm_backward")(x, x, weight, 1e-6, through)
        load("swiglu:launch_swiglu")(gate_up.to(dtype))
        load("swiglu:launch_swiglu_backward")(gate_up[:, :18944].to(dtype), gate_up.to(dtype))
        qkv, turns, store = (torch.zeros(s, dtype=dtype) for s in ((64, 36 * 128), (64, 128), (2, 99, 4, 128)))
        for norm in (None, turns[0]):
            load("rotary:launch_write_kv")(
                qkv, turns, turns, norm, norm, 1e-6, store, torch.zeros(64, dtype=torch.int64)
            )
        if target.backend == "cuda" and target.arch >= 89:  # others have no such fp8
            load("fp8:launch_fp8_rows")(torch.zeros(40, 18944, dtype=dtype))
        load("head:launch_gradient")(*head(), torch.zeros(4, 64), torch.zeros(3, 64), 1.0, 1.0, 0.0, dtype)
    for dtype in (torch.bfloat16, torch.float16):  # prompts need flash attention, and it runs in these
        attend(dtype)
    z, _, targets = head()
    for temperature in (0.0, 0.7):
        load("sampler:launch_sample")(z, torch.zeros(64, dtype=torch.float64), temperature)
    rows, columns = torch.zeros(64, dtype=torch.int64), torch.zeros(6, 64, dtype=torch.int64)
    load("draws:launch_uniforms_at")(rows, rows)
    out = torch.zeros(2, 64, dtype=torch.int32)
    load("draws:launch_advance")(rows, torch.zeros(64), columns, columns[:, 0], columns[:, 0], out)
    load("threshold:launch_top_p_threshold")(z, torch.zeros(64, 1, dtype=torch.float64))
    for bias, softcap in ((None, 0.0), (z[0], 30.0)):
        load("head:launch_statistics")(z, bias, targets, 1.0, 1.0, softcap)
    load("dither:launch_dither")(
        torch.zeros(40, 70), torch.zeros(40, 70, dtype=torch.bfloat16), 12345, (80, 100), (3, 20)
    )


def attend(dtype):
    """Of 64 rows, 8 samples a prompt, in slots and in pages, with norms of heads and with a window."""
    qkv, turns = torch.zeros(64, 36 * 128, dtype=dtype), torch.zeros(64, 128, dtype=dtype)
    store, rows = torch.zeros(2, 4096, 4, 128, dtype=dtype), torch.zeros(64, dtype=torch.int64)
    for norm, pages, page, window in ((None, None, 0, 0), (turns[0], torch.zeros(64, 8, dtype=torch.int32), 256, 512)):
        slots = (4096, pages, page)
        for longest in (128, 4096):  # in one span a row, and in many
            arguments = (qkv, turns, turns, norm, norm, 1e-6, store, rows, rows, *slots, longest, window, 0.1)
            load("attend:launch_attend")(*arguments)
            load("attend:launch_attend")(*arguments, store, rows[:8], rows[:8], *slots, rows, rows)


def head():
    return torch.zeros(64, 151936), None, torch.zeros(64, dtype=torch.int64)


compile_all(*sys.argv[1:])
