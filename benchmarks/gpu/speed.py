"""Steps of the GPU report that measure speed, with random weights of the shapes in sizes.py.

python benchmarks/gpu/speed.py decode | decode-profile | profile | weights [SIZE ...]
"""

import itertools
import os
import subprocess
import sys
import time
from contextlib import nullcontext
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any
from unittest import mock

sys.path.insert(0, str(Path(__file__).resolve().parents[2]))
sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

from child import die_with_parent
from gpu.results import Results, report_device

os.environ["CUBLAS_WORKSPACE_CONFIG"] = ":4096:8"  # as in a deterministic run; read when CUDA starts

import torch
from gpu import sizes

from verl.config import OptimConfig, RolloutConfig
from verl.config.sections.rollout import KVCacheConfig
from verl.data_proto.samples import SamplingParams
from verl.models.lora import LoRASpec, add_adapters
from verl.models.ops.varlen import FLASH
from verl.models.optim import MasterOptimizer
from verl.parallel.collectives import Collectives, Peer, free_port
from verl.parallel.device import fp8_obstacle, give_back_cache
from verl.parallel.serialize import from_bytes, to_bytes
from verl.reshard import delivery
from verl.reshard.device_memory import read_device_bucket
from verl.rollout.native.cuda.backend import DeviceBackend
from verl.rollout.native.cuda.forward import StraightForward
from verl.rollout.native.engine import NativeRollout

DEVICE = report_device()
ON_GPU = DEVICE.type == "cuda"
HALF = torch.bfloat16 if ON_GPU else torch.float32
_ROWS = (64, 256, 512) if ON_GPU else (2, 4)
_SIZES = ("1.5b", "0.5b", "7b") if ON_GPU else ("tiny",)
_NO_DEADLINE = float("inf")
# 14,288 tokens of one micro-batch: at 1.5B, 41 GB of activations
_TRAINING = sizes.Shape(8, 6, 256, 256, (1,), 32768, 3) if ON_GPU else sizes.QUICK
_DECODING = sizes.FULL if ON_GPU else sizes.QUICK
_RECOMPUTED = {  # case -> (recompute, offloads_inputs) of the module
    "activations kept": ("none", False),
    "selective checkpointing": ("selective", False),
    "checkpointing": ("full", False),
    "checkpointing, inputs on the host": ("full", True),
}
_TIME = "self_device_time_total" if ON_GPU else "self_cpu_time_total"
_KERNELS = 8  # slowest kernels among the numbers; the log has more


def _bench(size: str, dtype: torch.dtype, results: Results, shape: sizes.Shape) -> sizes.Bench:
    limits = sizes.measure_limits(DEVICE, not ON_GPU)
    return sizes.Bench(sizes.build(size, DEVICE, dtype), DEVICE, HALF, shape, limits, _NO_DEADLINE, results=results)


def decode(chosen: tuple[str, ...], results: Results) -> None:
    """Tokens per second by rows, determinism, lengths, filters, length of prompts, stores without pages, and adapters."""
    for size in chosen:
        bench = _bench(size, HALF, results, _DECODING)
        for rows in _ROWS:
            bench.section(f"{size}, {rows} rows", partial(_decode, bench, size, rows))
        max_rows, middle = _ROWS[-1], _ROWS[len(_ROWS) // 2]
        cases: dict[str, Any] = {
            "deterministic": [partial(_decode, bench, size, rows, "deterministic") for rows in _ROWS],
            "ragged": [partial(_ragged, bench, size, middle)],
            "top-p": [partial(_decode, bench, size, max_rows, "top-p", params={"top_p": 0.95})],
            "long prompts": [
                partial(_decode, bench, size, _ROWS[0], "long prompts", prompt_tokens=4096 if ON_GPU else 48)
            ],
            # as at the end of a rollout with long responses
            "few long rows": [
                partial(_decode, bench, size, 8, "few long rows", samples=1, prompt_tokens=6144 if ON_GPU else 48)
            ],
        }
        fp8 = {"quantization": "fp8"}
        if not ON_GPU or not fp8_obstacle(DEVICE):
            cases["fp8"] = [partial(_decode, bench, size, rows, "fp8", config=fp8) for rows in _ROWS]
        if ON_GPU:
            cases["no overlap"] = [partial(_decode, bench, size, rows, "no overlap") for rows in _ROWS]
        if FLASH.page_multiple or not ON_GPU:
            slots = KVCacheConfig(enable_paged_attention=False)
            cases["slots"] = [partial(_decode, bench, size, middle, "slots", config={"kv_cache_config": slots})]
        cases["LoRA"] = [partial(_with_adapters, bench, size, _ROWS[0])]  # the last, since adapters stay
        if size == "7b":  # the remaining time is for the other sizes
            cases = {name: cases[name] for name in cases if name in ("deterministic", "fp8", "slots")}
        for name, parts in cases.items():
            for part in parts:
                bench.section(f"{size}, {name}", part)
        del bench
        give_back_cache(DEVICE)


def _engine(bench: sizes.Bench, rows: int, config: dict[str, Any]) -> NativeRollout:
    """The native engine; on a CPU, its GPU backend with a plain attention kernel."""
    settings = RolloutConfig(max_num_seqs=rows, max_num_batched_tokens=16384, enforce_eager=not ON_GPU, **config)
    if ON_GPU:
        return NativeRollout(bench.module, None, settings, eos_token_ids=[])
    from tests.models.plain_attention import PLAIN

    engine = NativeRollout(bench.module, None, settings, eos_token_ids=[], device_kernel=PLAIN)
    engine.device.fits = StraightForward.reads  # type: ignore[method-assign]
    return engine


def _decode(
    bench: sizes.Bench, size: str, rows: int, case: str = "", *, params: dict[str, Any] | None = None,
    prompt_tokens: int | None = None, samples: int | None = None, config: dict[str, Any] | None = None,
) -> None:  # fmt: skip
    """Responses of equal length."""
    shape = replace(bench.shape, prompt_tokens=prompt_tokens or bench.shape.prompt_tokens)
    samples, name = samples or min(shape.samples, rows), ", ".join(filter(None, (size, f"{rows} rows", case)))
    prompts = sizes.make_prompts(rows // samples, shape.prompt_tokens, bench.module.config.vocab_size)
    sampling = SamplingParams(n=samples, max_new_tokens=shape.response_tokens, ignore_eos=True, **(params or {}))
    engine = _engine(bench, rows, config or {})
    torch.use_deterministic_algorithms(case == "deterministic", warn_only=True)
    torch.utils.deterministic.fill_uninitialized_memory = False  # type: ignore[attr-defined]
    # imports Triton if entered
    without_overlap = mock.patch("verl.models.ops.triton.overlap._is_hopper", return_value=False)
    try:
        with without_overlap if case == "no overlap" else nullcontext(), sizes.peak_gib(bench, name):
            first = sizes.seconds(lambda: engine.generate(prompts, sampling, step=1), DEVICE)
            prefill, step = sizes.decoding_s(engine, prompts, sampling, DEVICE, 2, warmup=1)
    finally:
        torch.use_deterministic_algorithms(False)
        engine.release()
    bench.note(name, rows / step, "tokens/s")
    bytes_ = sizes.decode_bytes(bench.module, rows, len(prompts), shape)
    if case != "fp8":  # whose weights have fewer bytes
        bench.note(f"{name}, share of bandwidth", 100 * bytes_ / step / bench.limits["bytes"], "%")
    bench.note(f"{name}, prefill", len(prompts) * shape.prompt_tokens / prefill, "tokens/s")
    bench.note(f"{name}, first generation, added time", first - prefill - step * (shape.response_tokens - 1), "s")
    if case and (equal := bench.values.get(f"{size}, {rows} rows")):
        bench.note(f"{name}, added time of a step", 1000 * (step - rows / equal), "ms")


def _ragged(bench: sizes.Bench, size: str, rows: int) -> None:
    """Lengths that many stop tokens make random; twice as many samples as rows."""
    shape, vocabulary = bench.shape, bench.module.config.vocab_size
    prompts = sizes.make_prompts(2 * rows // min(shape.samples, rows), shape.prompt_tokens, vocabulary)
    stops = tuple(range(0, vocabulary, shape.response_tokens))
    params = SamplingParams(n=min(shape.samples, rows), max_new_tokens=2 * shape.response_tokens, stop_token_ids=stops)
    engine = _engine(bench, rows, {})
    lengths: list[int] = []

    def generate() -> None:
        lengths[:] = [len(c.token_ids) for c in engine.generate(prompts, params, step=1)]

    seconds = sizes.median_s(generate, DEVICE, 2, warmup=1)
    engine.release()
    bench.note(f"{size}, {rows} rows, ragged, with prefill", sum(lengths) / seconds, "tokens/s")
    bench.note(f"{size}, {rows} rows, ragged, mean length", sum(lengths) / len(lengths), "tokens")


def _with_adapters(bench: sizes.Bench, size: str, rows: int) -> None:
    """Decode with adapters, by the backend that the engine takes for them."""
    add_adapters(bench.module, LoRASpec(16, 32.0, "all-linear"), HALF)
    bench.module.to(DEVICE)
    bench.note(f"{size}, LoRA, backend of the GPU", str(DeviceBackend.fits(bench.module)))
    _decode(bench, size, rows, "LoRA")


def decode_profile(chosen: tuple[str, ...], results: Results) -> None:
    """The kernels of a decode step: how many, their time, and the slowest."""
    for size in chosen:
        bench = _bench(size, HALF, results, _DECODING)
        for rows in (1, *_ROWS):
            bench.section(f"{size}, {rows} rows", partial(_profile_decode, bench, f"{size}, {rows} rows", rows))
        del bench
        give_back_cache(DEVICE)


def _profile_decode(bench: sizes.Bench, name: str, rows: int) -> None:
    """Two generations differ in their number of steps, and so do their kernels."""
    shape, samples = bench.shape, min(bench.shape.samples, rows)
    prompts = sizes.make_prompts(rows // samples, shape.prompt_tokens, bench.module.config.vocab_size)
    few, many = (SamplingParams(n=samples, max_new_tokens=n, ignore_eos=True) for n in (9, 73))
    engine = _engine(bench, rows, {})
    engine.generate(prompts, many, step=1)  # captures
    before, after = (_kernels_of(partial(engine.generate, prompts, params, step=1)) for params in (few, many))
    engine.release()
    steps = many.max_new_tokens - few.max_new_tokens
    by_name = {
        key: tuple((b - a) / steps for a, b in zip(before.get(key, (0, 0.0)), numbers, strict=True))
        for key, numbers in after.items()
    }
    bench.note(f"{name}, kernels of a step", sum(count for count, _ in by_name.values()))
    bench.note(f"{name}, time of its kernels", sum(time_us for _, time_us in by_name.values()) / 1000, "ms")
    for key, (count, time_us) in sorted(by_name.items(), key=lambda item: -item[1][1])[:_KERNELS]:
        bench.note(f"{name}, {count:.1f} x {key[:90]}", time_us, "us")


def _events_of(work: Any) -> Any:
    """The profiler's averages by kernel."""
    kinds = torch.profiler.ProfilerActivity
    with torch.profiler.profile(activities=[kinds.CUDA if ON_GPU else kinds.CPU]) as profiler:
        work()
        if ON_GPU:
            torch.cuda.synchronize()
    return profiler.key_averages()


def _kernels_of(work: Any) -> dict[str, tuple[int, float]]:
    """Kernel -> number of its launches and microseconds."""
    times = {event.key: (event.count, float(getattr(event, _TIME))) for event in _events_of(work)}
    return {key: value for key, value in times.items() if value[1] > 0}


def profile(chosen: tuple[str, ...], results: Results) -> None:
    """Gradients of one micro-batch, with activations kept and computed again: MFU, memory, and the slowest kernels."""
    for size in chosen:
        bench = _bench(size, torch.float32, results, _TRAINING)
        optimizer = bench.optimizer = MasterOptimizer(bench.module, OptimConfig(), HALF)
        shape = bench.shape
        ids = torch.randint(0, bench.module.config.vocab_size, (shape.rows, shape.response_tokens)).tolist()
        prompts = sizes.make_prompts(shape.prompts, shape.prompt_tokens, bench.module.config.vocab_size)
        columns = sizes.columns_of(prompts, [(i // shape.samples, row) for i, row in enumerate(ids)])
        advantages = torch.randn(shape.rows, 1).expand(-1, shape.response_tokens).contiguous()
        work = partial(sizes.accumulate, bench, columns, advantages)
        for case, (bench.module.recompute, bench.module.offloads_inputs) in _RECOMPUTED.items():
            if case != "activations kept":
                bench.module.gradient_checkpointing_enable(gradient_checkpointing_kwargs={"use_reentrant": False})
                bench.module.train()
            bench.section(f"{size}, {case}", partial(_profile, bench, f"{size}, {case}", work))
        bench.module.gradient_checkpointing_disable()
        step = sizes.median_s(partial(optimizer.step, 1e-6), DEVICE, 3)
        bench.note(f"{size}, optimizer step", 1000 * step, "ms")
        give_back_cache(DEVICE)  # as before an engine in another process wakes
        if ON_GPU:
            free, total = torch.cuda.mem_get_info()
            share = free / (total - torch.cuda.memory_allocated())
            bench.note(f"{size}, memory besides weights and optimizer that another process can take", 100 * share, "%")
        del bench, work, optimizer
        give_back_cache(DEVICE)


def _profile(bench: sizes.Bench, name: str, work: Any) -> None:
    shape = bench.shape
    with sizes.peak_gib(bench, name):
        time_s = sizes.median_s(work, DEVICE, shape.repeats, warmup=1)
    flops = 3 * sizes.forward_flops(bench.module, shape)
    tokens = shape.prompts * (shape.prompt_tokens + shape.samples * (shape.response_tokens - 1))
    bench.note(f"{name}, MFU", 100 * flops / time_s / bench.limits["flops"], "%")
    bench.note(f"{name}, time of a token", 1e6 * time_s / tokens, "us")
    events = _events_of(work)
    print(events.table(sort_by=_TIME, row_limit=25, max_name_column_width=90))
    for event in sorted(events, key=lambda event: -getattr(event, _TIME))[:_KERNELS]:
        bench.note(f"{name}, {event.count} x {event.key[:90]}", getattr(event, _TIME) / 1000, "ms")


_ROUTES = (("device", 2), ("host", 2)) if ON_GPU else (("host", 2), ("link", 2), ("link", 3), ("changes", 2))
_BUCKET = (256 if ON_GPU else 64) << 20


def weights(results: Results) -> None:
    """GB/s of an update between processes, by their number: `device` or `host` (a copy into shared memory and out of it) until
    an engine process has it, `link` until it is verified in memory of each other host, `changes` the same if one value in 200
    has changed."""
    for (route, size), mebibytes in itertools.product(_ROUTES, (3072,) if ON_GPU else (64, 512, 2048)):
        name = f"through the {route}, {size} processes, {mebibytes} MiB"
        command = [sys.executable, __file__, "weights-rank", route, str(size), str(mebibytes), str(free_port())]
        ranks = [subprocess.Popen([*command, str(rank)], stdout=subprocess.PIPE, text=True) for rank in range(size)]
        try:
            results.add(name, (mebibytes << 20) / float(ranks[0].communicate(timeout=180)[0]) / 1e9, "GB/s")
        except Exception as error:  # noqa: BLE001 - the other routes still count
            results.fail(name, error)


def weights_rank(route: str, *numbers: str) -> None:
    """A process of `weights`; the first one prints the seconds of the best of four updates."""
    size, mebibytes, port, rank = map(int, numbers)
    comm = Collectives.start(Peer(rank, size, "127.0.0.1", port), timeout_s=60, start_timeout_s=60, call_timeout_s=60)
    delivery.hosts_of = lambda comm: {other: other for other in range(size)}
    is_far, few = route in ("link", "changes"), route == "changes"
    takes = [(other,) for other in range(1, size)] if is_far else [(0,)]
    way = delivery.Delivery(comm, DEVICE, (0,), takes, torch.bfloat16, _BUCKET, delta=few, on_device=route == "device")
    way.connect()
    flat = torch.full((mebibytes << 20,), rank, dtype=torch.uint8, device=DEVICE)
    tensors = {f"w{i}": part for i, part in enumerate(flat.view(torch.bfloat16).split(4 << 20))}
    seconds = []
    for _ in range(4):
        flat[::400] += few
        comm.any(False)
        start = time.perf_counter()
        for bucket in way(tensors.items() if rank == 0 else ()):
            if not is_far:  # the other process is the engine
                bucket = from_bytes(comm.broadcast(to_bytes(bucket) if rank == 0 else None, 0))
            for name, tensor in read_device_bucket(bucket) if rank else ():
                if not is_far:
                    tensors[name].copy_(tensor)
        seconds.append(time.perf_counter() - start)
    print(min(seconds))


def main(arguments: list[str]) -> int:
    die_with_parent()
    step, *chosen = arguments
    results, names = Results(), tuple(chosen) or _SIZES
    {
        "decode": partial(decode, names),
        "decode-profile": partial(decode_profile, names[:2]),
        "profile": partial(profile, names[:2]),
        "weights": weights,
        "weights-rank": lambda results: weights_rank(*chosen),
    }[step](results)
    return int(any(name.endswith(": error") for name in results.numbers))


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
