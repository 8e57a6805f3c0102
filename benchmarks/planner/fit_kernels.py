"""Fit of the planner's kernel constants to measured kernels, and its error on kernels that the fit has not seen.

    python benchmarks/planner/fit_kernels.py [--write verl/planner/devices.yaml] [--sample tests/planner/held_out_kernels.csv]

Reads the tables of aiconfigurator-core 0.12.0 (NVIDIA, Apache-2.0: `pip install --no-deps aiconfigurator-core==0.12.0 pandas
pyarrow scipy`), which are not part of this repository. Every (n, k) of a matmul, and every combination of heads and batch of an
attention kernel, is either in the fit or held out, by a fixed rule: two fifths are held out. The fit minimises the mean
|log(predicted / measured)|.
"""

from __future__ import annotations

import argparse
import sys
from collections.abc import Callable
from dataclasses import replace
from functools import partial
from importlib import util
from pathlib import Path
from typing import Any

import numpy as np
import yaml

sys.path.extend(map(str, Path(__file__).resolve().parents[1:3]))

from benchmarks.report import table
from verl.planner import kernels
from verl.planner.kernels import CollectiveFit, DecodeFit, Device, ExpertsFit, KernelFits, MatmulFit, PrefillFit

# device -> folder, data-sheet values (peak, bandwidth, memory, processors), tables (matmul and attention, NCCL)
SHEET = {
    "a100_sxm": ((312e12, 2.039e12, 80 * 2**30, 108), ("vllm/0.14.0", "nccl/2.27.3")),
    "h100_sxm": ((989e12, 3.35e12, 80 * 2**30, 132), ("vllm/0.24.0", "nccl/2.27.3")),
    "h200_sxm": ((989e12, 4.8e12, 141 * 10**9, 132), ("vllm/0.24.0", "nccl/2.29.2")),
    "b200_sxm": ((2250e12, 7.7e12, 180 * 2**30, 148), ("vllm/0.24.0", "nccl/2.29.2")),
    "gb200": ((2500e12, 8.0e12, 189471 * 2**20, 152), ("vllm/0.24.0", "nccl/2.29.2")),
}
_STARTS = {
    "matmul": (3, 0.8, 0.8, 0.3, 200, 0.6, 4),
    "prefill": (11, 1.0, 0.5, 0.5, 70, 0.1, 100),
    "decode": (11, 0.9, 1, 300, 5, 0.5),
    "experts": (30, 0.6, 0.8, 0.5, 1.5),
    "experts in tiles": (30, 0.6, 0.8, 0.5, 1.5, 0.5),
    "collective": (8, 1, 330, 1),
    # sends and receives have a protocol for small messages; the other collectives change theirs step by step
    "alltoall": (8, 1, 330, 0.1, 0.5, 20, 5),
}
_BLACKWELL = ("b200_sxm", "gb200")  # whose attention computes two tiles of 128 queries at a time
# whose decode attention (FlashAttention-2) does not pack the queries of a KV head, and whose experts are SGLang's Triton
# kernel with tiles of 16 rows, or of 64
_AMPERE = ("a100_sxm",)
_SOURCE = (
    "# Written by benchmarks/planner/fit_kernels.py. Measurements: NVIDIA, aiconfigurator-core 0.12.0, Apache-2.0."
)
Predict = Callable[..., np.ndarray]
_SAMPLES: list[list[list[str]]] = []  # of the fits so far, in order
_OPERATIONS = ("all_gather", "reduce_scatter", "all_reduce", "alltoall")


def tables_folder() -> Path:
    """The folder of the measured tables; exits with a sentence when they are not installed."""
    spec = util.find_spec("aiconfigurator_core")
    if spec is None or spec.origin is None:
        sys.exit(
            "aiconfigurator-core is not installed: pip install --no-deps aiconfigurator-core==0.12.0 pandas pyarrow scipy"
        )
    return Path(spec.origin).parent / "systems" / "data"


def read(path: Path, **equal: Any) -> Any:
    """The rows of a table with these values; columns that an older table lacks are not compared."""
    import pandas

    rows = pandas.read_parquet(path)
    for name, value in equal.items():
        rows = rows[rows[name] == value] if name in rows else rows
    return rows


def columns(rows: Any, *names: str) -> list[np.ndarray]:
    return [rows[name].to_numpy(float) for name in names]


def fit(
    kind: Callable[..., Any], start: str, predict: Predict, points: list[Any], measured: np.ndarray, held: np.ndarray
) -> tuple[Any, dict]:
    """The constants of `kind` (its first ones, as many as _STARTS has) with which `predict(constants, *points)` fits
    `measured` best, and the errors."""
    from scipy.optimize import minimize

    def make(point: np.ndarray) -> Any:
        return kind(*(float(abs(v)) for v in point))

    def loss(point: np.ndarray) -> float:
        with np.errstate(all="ignore"):
            ratio = np.log(predict(make(point), *points) / measured)[~held]
        return float(np.mean(np.abs(np.where(np.isfinite(ratio), ratio, 10))))

    best = np.array(_STARTS[start], float)
    for evaluations in (4000, 2000):
        options = {"maxiter": evaluations, "maxfev": evaluations, "adaptive": True}
        best = minimize(loss, best, method="Nelder-Mead", options=options).x
    constants = make(np.array([float(f"{v:.4g}") for v in best]))
    error = np.abs(predict(constants, *points) / measured - 1)
    _keep_sample(points, measured, held)
    return constants, {
        "fit_points": int((~held).sum()),
        "held_out_points": int(held.sum()),
        "held_out_median": round(float(np.median(error[held])), 4),
        "held_out_p90": round(float(np.quantile(error[held], 0.9)), 4),
    }


def _keep_sample(points: list[Any], measured: np.ndarray, held: np.ndarray) -> None:
    """Remember 24 held-out points, evenly over the measured times, for the test of the committed constants."""
    places = np.flatnonzero(held)[np.argsort(measured[held])]
    chosen = places[np.linspace(0, len(places) - 1, 24).round().astype(int)]
    columns_ = [np.broadcast_to(p, measured.shape) for p in points]
    _SAMPLES.append([[*(f"{c[i]:g}" for c in columns_), f"{measured[i]:.6g}"] for i in chosen])


def fit_matmul(base: Device, folder: Path) -> tuple[Any, dict]:
    rows = read(folder / "gemm_perf.parquet", gemm_dtype="bfloat16")
    m, n, k = columns(rows, "m", "n", "k")
    held = ((n * 7 + k * 13) // 32 % 5) < 2

    def predict(c: MatmulFit, *points: Any) -> np.ndarray:
        return kernels.matmul_time(_with(base, matmul=c), *points)

    return fit(MatmulFit, "matmul", predict, [m, n, k], seconds(rows), held)


def fit_prefill(base: Device, folder: Path) -> tuple[Any, dict]:
    rows = read(folder / "context_attention_perf.parquet", kv_cache_dtype="bfloat16", window_size=0)
    rows = rows[rows.isl >= 16]
    names = ("batch_size", "isl", "num_heads", "num_key_value_heads", "head_dim")
    batch, length, heads, kv, dim = columns(rows, *names) if "head_dim" in rows else [*columns(rows, *names[:4]), 128.0]
    held = ((heads * 3 + kv * 5 + dim // 64 + batch) % 5) < 2

    def predict(c: PrefillFit, *points: Any) -> np.ndarray:
        return kernels.prefill_time(_with(base, prefill=c), *points)

    kind = partial(PrefillFit, block=256 if base.name in _BLACKWELL else 128)
    return fit(kind, "prefill", predict, [batch, length, heads, kv, dim], seconds(rows), held)


def fit_decode(base: Device, folder: Path) -> tuple[Any, dict]:
    rows = read(folder / "generation_attention_perf.parquet", kv_cache_dtype="bfloat16", window_size=0)
    batch, step, heads, kv = columns(rows, "batch_size", "step", "num_heads", "num_key_value_heads")
    dim = columns(rows, "head_dim")[0] if "head_dim" in rows else np.full_like(batch, 128.0)
    held = ((heads * 3 + kv * 5 + dim // 64 + batch) % 5) < 2

    def predict(c: DecodeFit, *points: Any) -> np.ndarray:
        return kernels.decode_time(_with(base, decode=c), *points)

    kind = partial(DecodeFit, packs_queries=base.name not in _AMPERE)
    return fit(kind, "decode", predict, [batch, step + 1, 2 * kv * dim, kv, heads], seconds(rows), held)


def fit_experts(base: Device, folder: Path) -> tuple[Any, dict]:
    """ExpertsFit that lie whole on a device, with balanced routing."""
    rows = read(folder / "moe_perf.parquet", moe_dtype="bfloat16", distribution="balanced", moe_tp_size=1)
    names = ("num_tokens", "hidden_size", "inter_size", "topk", "num_experts", "moe_ep_size")
    tokens, hidden, inner, top_k, num, ranks = columns(rows, *names)
    held = ((hidden // 64 + inner // 64 + num + ranks) % 5) < 2

    def predict(c: ExpertsFit, *points: Any) -> np.ndarray:
        return kernels.experts_time(_with(base, experts=c), *points, even=True)

    points = [tokens, hidden, inner, top_k, num, ranks]
    if base.name in _AMPERE:
        return fit(
            partial(ExpertsFit, small_tile=16.0, tile=64.0), "experts in tiles", predict, points, seconds(rows), held
        )
    return fit(ExpertsFit, "experts", predict, points, seconds(rows), held)


def fit_small_all_reduce(path: Path) -> tuple[Any, dict]:
    """vLLM's all-reduce in a CUDA graph, for messages of decoding; its sizes count elements."""
    rows = read(path, allreduce_dtype="bfloat16", backend="vllm_graph")
    rows = rows[rows.message_size <= 1 << 22]
    ranks, elements = columns(rows, "num_gpus", "message_size")
    held = np.round(np.log2(elements)).astype(int) % 2 == 0

    def predict(c: CollectiveFit, *points: Any) -> np.ndarray:
        return kernels.collective_time(c, "all_reduce", *points)

    return fit(CollectiveFit, "collective", predict, [2 * elements, ranks], seconds(rows), held)


def fit_collective(path: Path, operation: str) -> tuple[Any, dict]:
    rows = read(path, nccl_dtype="half", op_name=operation)
    ranks, elements = columns(rows, "num_gpus", "message_size")
    held = np.round(np.log2(elements)).astype(int) % 2 == 0

    def predict(c: CollectiveFit, *points: Any) -> np.ndarray:
        return kernels.collective_time(c, operation, *points)

    start = operation if operation in _STARTS else "collective"
    return fit(CollectiveFit, start, predict, [2 * elements, ranks], seconds(rows), held)


def seconds(rows: Any) -> np.ndarray:
    return rows["latency"].to_numpy() * 1e-3


def _with(base: Device, **constants: Any) -> Device:
    return replace(base, kernels=replace(base.kernels, **constants))


def fit_device(name: str, data: Path, held_out: list[list[str]]) -> dict[str, Any]:
    """The entry of a device in devices.yaml; some points that its fits have not seen are added to `held_out`."""
    (peak, bandwidth, memory, processors), (framework, nccl) = SHEET[name]
    unused: Any = None
    base = Device(name, peak, bandwidth, memory, processors, KernelFits(unused, unused, unused, unused, {}))
    fits: dict[str, Any] = {}
    errors: dict[str, Any] = {}
    for part, family, run in (
        ("matmul", "gemm", fit_matmul),
        ("prefill", "attention", fit_prefill),
        ("decode", "attention", fit_decode),
        ("experts", "moe", fit_experts),
    ):
        folder = _newest(
            data / name / family, "sglang/0.5.10" if (name, part) == ("a100_sxm", "experts") else framework
        )
        constants, errors[part] = run(base, folder)
        fits[part] = vars(constants)
    fits["collectives"] = {}
    for operation in _OPERATIONS:
        constants, errors[operation] = fit_collective(data / name / "comm" / nccl / "nccl_perf.parquet", operation)
        fits["collectives"][operation] = vars(constants)
    graph = data / name / "comm" / framework / "custom_allreduce_perf.parquet"
    constants, errors["small_all_reduce"] = fit_small_all_reduce(graph)
    fits["collectives"]["small_all_reduce"] = vars(constants)
    for part, sample in zip(errors, _SAMPLES[-len(errors) :], strict=True):
        held_out.extend([name, part, *row] for row in sample)
    for part, error in errors.items():
        print(f"{name:10} {part:15} {error}", flush=True)
    return {
        "peak": peak,
        "bandwidth": bandwidth,
        "memory": memory,
        "num_processors": processors,
        "kernels": fits,
        "errors": errors,
    }


def _newest(family: Path, framework: str) -> Path:
    """The tables of the framework's version, or of the newest that this family has."""
    if (family / framework).is_dir():
        return family / framework
    return sorted((family / framework.split("/")[0]).iterdir())[-1]


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--write", type=Path, help="replace the fitted constants in this file")
    parser.add_argument("--devices", nargs="*", default=list(SHEET))
    parser.add_argument("--sample", type=Path, help="write some held-out points to this file")
    arguments = parser.parse_args()
    data = tables_folder()
    held_out: list[list[str]] = []
    devices = {name: fit_device(name, data, held_out) for name in arguments.devices}
    parts = [[n, p, *(str(v) for v in e.values())] for n, d in devices.items() for p, e in d["errors"].items()]
    print(table(["device", "kernel", "fit", "held out", "median", "p90"], parts))
    if arguments.sample:
        lines = [_SOURCE, "# device, kernel, arguments of its function in verl/planner/kernels.py, measured seconds"]
        arguments.sample.write_text("\n".join([*lines, *(",".join(row) for row in held_out)]) + "\n")
    if arguments.write:
        old = yaml.safe_load(arguments.write.read_text()) if arguments.write.exists() else {}
        arguments.write.write_text(
            _SOURCE + "\n" + yaml.safe_dump({**(old or {}), **devices}, sort_keys=False, width=120)
        )


if __name__ == "__main__":
    main()
