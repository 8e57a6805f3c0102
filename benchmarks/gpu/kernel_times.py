"""A step of the GPU report: every Triton kernel against torch, at shapes of a 1.5B model.

python benchmarks/gpu/kernel_times.py
"""

import sys
from collections.abc import Callable, Iterator
from functools import partial
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).resolve().parents[2]))
sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

import torch
from gpu import sizes
from gpu.results import Results, report_device

from verl.models import rounding
from verl.models.ops import decoding, logits, pointwise
from verl.models.ops.table import by_torch, load
from verl.rollout import sampling

DEVICE = report_device()
ON_GPU = DEVICE.type == "cuda"
_ROWS, _TOKENS, _VOCABULARY, _WEIGHTS = (256, 16384, 151936, 1 << 27) if ON_GPU else (4, 32, 1000, 1 << 12)
_HIDDEN, _WIDTH, _HEADS, _KV_HEADS, _HEAD_DIM = (1536, 8960, 12, 2, 128) if ON_GPU else (64, 128, 4, 2, 16)
_CALLS = 10
_CHUNK_ROWS = (1 << 28) // _VOCABULARY if ON_GPU else 16  # as in verl.models.log_probs


def cases() -> Iterator[tuple[str, Any, tuple[Any, ...], float]]:
    """(name, op, arguments, bytes that must be read and written)."""
    half = partial(torch.randn, device=DEVICE, dtype=torch.bfloat16)
    ids = partial(torch.randint, device=DEVICE)
    z = torch.randn(_ROWS, _VOCABULARY, device=DEVICE)
    uniforms = torch.rand(_ROWS, dtype=torch.float64, device=DEVICE)
    yield "sampler", sampling.sample_unfiltered, (z, uniforms, 0.9), 4.0 * z.numel()
    chunk = torch.randn(_CHUNK_ROWS, _VOCABULARY, device=DEVICE)
    head = (chunk, None, ids(_VOCABULARY, (_CHUNK_ROWS,)))
    yield "head, statistics", logits.target_statistics, (*head, 1.0, 1.0, 0.0), 4.0 * chunk.numel()
    statistics, grads = torch.ones(4, _CHUNK_ROWS, device=DEVICE), torch.ones(3, _CHUNK_ROWS, device=DEVICE)
    arguments = (*head, statistics, grads, 1.0, 1.0, 0.0, torch.bfloat16)
    yield "head, gradient", logits.target_gradient, arguments, 6.0 * chunk.numel()
    x, weight = half(_TOKENS, _HIDDEN), half(_HIDDEN)
    yield "add and norm", pointwise.add_norm, (x, x, weight, 1e-6), 8.0 * x.numel()
    arguments = (x, x, weight, 1e-6, x)
    yield "norm, gradient", pointwise.rms_norm_backward, arguments, 8.0 * x.numel()
    gate_up = half(_TOKENS, 2 * _WIDTH)
    yield "swiglu", pointwise.swiglu, (gate_up,), 3.0 * gate_up.numel()
    arguments, num_bytes = (half(_TOKENS, _WIDTH), gate_up), 5.0 * gate_up.numel()
    yield "swiglu, gradient", pointwise.swiglu_backward, arguments, num_bytes
    qkv, turns = half(_TOKENS, (_HEADS + 2 * _KV_HEADS) * _HEAD_DIM), half(_TOKENS, _HEAD_DIM)
    store, places = half(2, _TOKENS, _KV_HEADS, _HEAD_DIM), torch.randperm(_TOKENS, device=DEVICE)
    arguments = (qkv, turns, turns, turns[0], turns[0], 1e-6, store, places)
    yield "rotary and KV write", pointwise.write_kv, arguments, 4.0 * qkv.numel()
    yield from _attention(half)
    master = torch.randn(_WEIGHTS, device=DEVICE)
    arguments = (master, torch.empty_like(master, dtype=torch.bfloat16), 1, list(master.shape), [0])
    yield "master rounding", rounding.dither, arguments, 6.0 * master.numel()


def _attention(half: Any) -> Iterator[tuple[str, Any, tuple[Any, ...], float]]:
    """Of a decode step, without and with prompts of 8 rows each; flash attention is behind torch's implementation."""
    long, tokens, prompts = (16384, 512, _ROWS // 8) if ON_GPU else (512, 8, 2)
    for rows, keys in ((_ROWS, tokens), (1, long), (4, long), (16, long)):
        qkv, turns = half(rows, (_HEADS + 2 * _KV_HEADS) * _HEAD_DIM), half(rows, _HEAD_DIM)
        store = half(2, rows * keys, _KV_HEADS, _HEAD_DIM)
        starts = torch.arange(rows, device=DEVICE) * keys
        slots = (starts, torch.full_like(starts, keys - 1), keys, None, 0)
        arguments = (qkv, turns, turns, None, None, 0.0, store, *slots, keys, 0, _HEAD_DIM**-0.5)
        name = "attention, own" if keys == tokens else f"attention, {rows} long rows"
        key_bytes = 4.0 * keys * _KV_HEADS * _HEAD_DIM
        yield name, decoding.attend_decode, arguments, key_bytes * rows
        if keys == tokens:
            members = torch.arange(rows, device=DEVICE)
            shared = (store, starts[:prompts], slots[1][:prompts], keys, None, 0, members, members)
            yield f"{name} and prompts", decoding.attend_decode, (*arguments, *shared), key_bytes * (rows + prompts)


def main() -> None:
    results = Results()
    limits = sizes.measure_limits(DEVICE, not ON_GPU)
    bandwidth = limits["bytes"]
    try:
        _products_in_fp8(results, limits["flops"])
    except Exception as error:  # noqa: BLE001 - not on GPUs before Ada, and on few CPUs
        results.fail("fp8 products", error)
    for name, op, arguments, num_bytes in cases():
        try:
            results.add(f"{name}, by torch", 1000 * _seconds(by_torch(op), arguments), "ms")
            if ON_GPU:
                spent_s = _seconds(load(op.triton), arguments)
                results.add(name, 1000 * spent_s, "ms")
                results.add(f"{name}, share of bandwidth", 100 * num_bytes / spent_s / bandwidth, "%")
        except Exception as error:  # noqa: BLE001 - the other kernels still count
            results.fail(name, error)


def _products_in_fp8(results: Results, flops: float) -> None:
    """Of a 7B model's MLP with one scale a row, and of their rounding: TFLOP/s of both, against the limit in bfloat16."""
    rows, inputs, outputs = (_TOKENS, 3584, 18944) if ON_GPU else (32, 64, 128)
    x, weight = (torch.randn(n, inputs, device=DEVICE, dtype=torch.bfloat16) for n in (rows, outputs))

    def rounded(x: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        scale = x.abs().amax(1, keepdim=True).float() / 448  # the largest number of e4m3
        return (x / scale).to(torch.float8_e4m3fn), scale

    (a, a_scale), (b, b_scale) = rounded(x), rounded(weight)
    by_rows = partial(torch._scaled_mm, scale_b=b_scale.t(), out_dtype=torch.bfloat16)
    for name, call in (
        ("products", lambda: by_rows(a, b.t(), scale_a=a_scale)),
        ("products with rounding", lambda: by_rows((again := rounded(x))[0], b.t(), scale_a=again[1])),
    ):
        rate = 2 * rows * inputs * outputs / _seconds(call, ())
        results.add(f"fp8 {name}", rate / 1e12, "TFLOP/s")
        results.add(f"fp8 {name}, times the limit of bfloat16", rate / flops)


def _seconds(function: Callable[..., Any], arguments: tuple[Any, ...]) -> float:
    """Seconds of a call in a CUDA graph of several: the host takes longer to launch a small kernel than the GPU to run it."""
    if not ON_GPU:
        return sizes.median_s(lambda: function(*arguments), DEVICE, repeats=9)
    function(*arguments)  # compiles
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        for _ in range(_CALLS):
            function(*arguments)
    return sizes.median_s(graph.replay, DEVICE, repeats=9) / _CALLS


if __name__ == "__main__":
    main()
