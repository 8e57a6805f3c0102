"""Measurements of this checkout on a GPU: correctness against Hugging Face first, then speed.

    python benchmarks/gpu/sizes.py --size 1.5b --json out.json  # one NVIDIA GPU, about 2 minutes
    python benchmarks/gpu/sizes.py --quick                      # a tiny model on whatever there is

Needs torch, transformers, tensordict and pyvers besides this checkout, no network and no files: models are random, with the
shapes of SmolLM2-135M and Qwen2.5. A part that fails prints its error, and the others run.

How things are counted. `limits`: a bf16 matrix product of 8192^3 on random data, and a copy of 1 GiB counting bytes read
and written. Needed FLOPs: 2 per weight of a matrix product and token, 4 * head_dim per head and pair of tokens that see
each other, the head only where a token is predicted, a shared prompt once, training three times the forward. MFU: needed
FLOPs over the time and the measured matrix rate. Bandwidth share of decoding: each weight read once a step, each stored key and
value that is needed read once (a prompt once for its samples), over the time and the measured copy rate. Times are medians
between device events after warm-up.
"""

import argparse
import json
import os
import platform
import statistics
import sys
import time
import traceback
import warnings
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field, replace
from functools import partial
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).resolve().parents[2]))
sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

import torch
import transformers
from gpu.results import DEVICE, Results, report_device

from verl.algorithms.advantages.group import grpo
from verl.algorithms.policy_losses.clipped import vanilla
from verl.algorithms.reduce import agg_loss
from verl.config import OptimConfig, RolloutConfig
from verl.data_proto.samples import Completion, PromptRequest, SamplingParams
from verl.engines.api import MicroBatching
from verl.engines.micro_batches import plan_micro_batches
from verl.models.attention import ATTENTION_NAME
from verl.models.forward import packed_outputs
from verl.models.optim import MasterOptimizer
from verl.models.packing import pack_rows, unpadded_rows
from verl.parallel.device import give_back_cache
from verl.rollout.native.engine import NativeRollout

_FIELDS = ("vocab_size", "hidden_size", "intermediate_size", "num_hidden_layers")
_FIELDS += ("num_attention_heads", "num_key_value_heads")
_SHAPES: dict[str, tuple[Any, ...]] = {  # name -> family and the values of _FIELDS
    "tiny": ("llama", 512, 64, 128, 2, 4, 2),
    "0.1b": ("llama", 49152, 576, 1536, 30, 9, 3),
    "0.5b": ("qwen2", 151936, 896, 4864, 24, 14, 2),
    "1.5b": ("qwen2", 151936, 1536, 8960, 28, 12, 2),
    "7b": ("qwen2", 152064, 3584, 18944, 28, 28, 4),
}
SIZES = {name: (family, dict(zip(_FIELDS, sizes, strict=True))) for name, (family, *sizes) in _SHAPES.items()}
TOLERANCES = {"fp32 greedy tokens that differ from generate": 0}  # name of a check -> greatest value that passes
# name of a check -> (rounding error of an accepted computation, most multiples of it). The weights are random and deep layers
# amplify rounding, so that no absolute bound holds for every size.
RELATIVE_TOLERANCES = {
    "fp32 log-probs, packed against Hugging Face, max abs": ("fp32 log-probs, Hugging Face eager against sdpa, max abs", 3.0),
    "fp32 gradients, prompt shared against not, relative": ("fp32 gradients, Hugging Face eager against sdpa, relative", 3.0),
    "half log-probs, packed against fp32, mean abs": ("half log-probs, Hugging Face against fp32, mean abs", 1.25),
    "half gradients, prompt shared against not, relative": ("half gradients, prompts apart against fp32, relative", 1.25),
    "half sampled log-probs against the training forward, mean abs": (
        "half log-probs, Hugging Face against fp32, mean abs", 1.25
    ),
}  # fmt: skip


@dataclass(frozen=True)
class Shape:
    """Amount of work: a GRPO step of `prompts` x `samples` rows; decoding at `batches` rows."""

    prompts: int
    samples: int
    prompt_tokens: int
    response_tokens: int
    batches: tuple[int, ...]
    micro_tokens: int
    repeats: int

    @property
    def rows(self) -> int:
        return self.prompts * self.samples


QUICK = Shape(2, 2, 12, 8, (1, 4), 64, 1)
FULL = Shape(64, 8, 256, 256, (1, 8, 64, 512), 32768, 3)
MICRO_TOKENS = {"1.5b": 16384}  # 103 KB of activations a token and layer: 47 GB


@dataclass
class Bench:
    """One size on one device, with the results so far."""

    module: Any
    device: torch.device
    half: torch.dtype
    shape: Shape
    limits: dict[str, float]
    deadline: float
    values: dict[str, Any] = field(default_factory=dict)
    results: Results = field(default_factory=Results)
    optimizer: MasterOptimizer | None = None

    def note(self, name: str, value: float | str, unit: str = "") -> None:
        limit = most(name, self.values)
        verdict = "" if limit is None else ("   ok" if float(value) <= limit else f"   TOO MUCH (limit {limit:g})")
        self.values[name] = value
        self.results.add(name, value, unit, verdict)

    def section(self, title: str, work: Callable[[], None]) -> None:
        """A part of the run: its errors are printed and it is left out when time is up."""
        if time.monotonic() > self.deadline:
            print(f" {title}: left out, the time is up")
            self.values[f"{title}: error"] = "time is up"
            return
        print(f" {title}", flush=True)
        try:
            work()
        except Exception as error:  # noqa: BLE001 - whatever a part fails with, the others are to run
            traceback.print_exc()
            self.note(f"{title}: error", f"{type(error).__name__}: {error}"[:300])
        finally:
            give_back_cache(self.device)


def most(name: str, values: dict[str, Any]) -> float | None:
    """Greatest value of the check `name` that passes; None: `name` is no check, or its reference was not computed."""
    reference, factor = RELATIVE_TOLERANCES.get(name, ("", 0.0))
    return 1e-5 + factor * float(values[reference]) if reference in values else TOLERANCES.get(name)


def seconds(work: Callable[[], Any], device: torch.device) -> float:
    if device.type != "cuda":
        start = time.perf_counter()
        work()
        return time.perf_counter() - start
    begin, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
    torch.cuda.synchronize()
    begin.record()
    work()
    end.record()
    torch.cuda.synchronize()
    return begin.elapsed_time(end) / 1000


def median_s(work: Callable[[], Any], device: torch.device, repeats: int, warmup: int = 2) -> float:
    for _ in range(warmup):
        work()
    return statistics.median(seconds(work, device) for _ in range(repeats))


@contextmanager
def peak_gib(bench: Bench, name: str) -> Iterator[None]:
    if bench.device.type == "cuda":
        torch.cuda.reset_peak_memory_stats()
    yield
    if bench.device.type == "cuda":
        bench.note(f"{name}, peak memory", torch.cuda.max_memory_allocated() / 2**30, "GiB")


def count_waits(work: Callable[[], Any], device: torch.device) -> int:
    """Number of times that PyTorch makes the host wait for the device in `work`, without waits for single events."""
    if device.type != "cuda":
        work()
        return 0
    torch.cuda.set_sync_debug_mode("warn")
    try:
        with warnings.catch_warnings(record=True) as caught:
            warnings.simplefilter("always")
            work()
    finally:
        torch.cuda.set_sync_debug_mode("default")
    return sum("synchroniz" in str(w.message) for w in caught)


def measure_limits(device: torch.device, quick: bool) -> dict[str, float]:
    half = torch.bfloat16 if device.type == "cuda" else torch.float32
    size, num_bytes = (256, 1 << 22) if quick else (8192, 1 << 30)
    a, b = (torch.randn(size, size, device=device, dtype=half) for _ in range(2))
    source = torch.randint(0, 127, (num_bytes,), dtype=torch.int8, device=device)
    target = torch.empty_like(source)
    product = median_s(lambda: torch.mm(a, b), device, 10)
    copy = median_s(lambda: target.copy_(source), device, 10)
    return {"flops": 2 * size**3 / product, "bytes": 2 * num_bytes / copy}


def build(size: str, device: torch.device, dtype: torch.dtype = torch.float32) -> Any:
    family, settings = SIZES[size]
    config = transformers.AutoConfig.for_model(
        family, **settings, tie_word_embeddings=True, max_position_embeddings=8192, initializer_range=0.05,
        bos_token_id=None, eos_token_id=None, pad_token_id=None, use_cache=True,
    )  # fmt: skip
    torch.manual_seed(0)
    with torch.device(device):
        module = transformers.AutoModelForCausalLM.from_config(config, attn_implementation=ATTENTION_NAME, dtype=dtype)
    module.generation_config.pad_token_id = 0
    return module


@contextmanager
def plain(module: Any, attention: str = "sdpa") -> Iterator[Any]:
    """The module with Hugging Face's own attention."""
    module.set_attn_implementation(attention)
    try:
        yield module
    finally:
        module.set_attn_implementation(ATTENTION_NAME)


def matrix_weights(module: Any) -> int:
    return sum(m.weight.numel() for m in module.get_decoder().modules() if isinstance(m, torch.nn.Linear))


def forward_flops(module: Any, shape: Shape) -> float:
    """Operations of one forward over all rows of a GRPO step, prompts once, all response tokens predicted."""
    config, num_new = module.config, shape.response_tokens - 1
    tokens = shape.prompts * (shape.prompt_tokens + shape.samples * num_new)
    pairs_of_prompt = shape.prompt_tokens * (shape.prompt_tokens + 1) / 2
    pairs_of_row = num_new * shape.prompt_tokens + num_new * (num_new + 1) / 2
    pairs = shape.prompts * (pairs_of_prompt + shape.samples * pairs_of_row)
    head_dim = config.hidden_size // config.num_attention_heads
    attention = 4 * head_dim * config.num_attention_heads * config.num_hidden_layers * pairs
    head = 2 * config.hidden_size * config.vocab_size * shape.rows * shape.response_tokens
    return 2 * matrix_weights(module) * tokens + attention + head


def decode_bytes(module: Any, rows: int, prompts: int, shape: Shape) -> float:
    """Bytes that a step reads half way through the responses."""
    config = module.config
    head_dim = config.hidden_size / config.num_attention_heads
    per_token = 2 * config.num_hidden_layers * config.num_key_value_heads * head_dim
    weights = matrix_weights(module) + config.vocab_size * config.hidden_size
    stored = rows * shape.response_tokens / 2 + prompts * shape.prompt_tokens
    return (weights + per_token * stored) * next(module.parameters()).element_size()


def make_prompts(num: int, length: int, vocabulary: int, seed: int = 1) -> list[PromptRequest]:
    ids = torch.randint(0, vocabulary, (num, length), generator=torch.Generator().manual_seed(seed))
    return [PromptRequest(i, tuple(row)) for i, row in enumerate(ids.tolist())]


def columns_of(prompts: list[PromptRequest], rows: list[tuple[int, list[int]]]) -> dict[str, torch.Tensor]:
    """Rows (number of the prompt, response) as columns, responses padded at the right; prompts of equal length."""
    width = max(len(response) for _, response in rows)
    ids = torch.tensor([prompts[number].token_ids for number, _ in rows])
    lengths = torch.tensor([len(response) for _, response in rows])
    return {
        "prompts": ids,
        "prompt_mask": torch.ones_like(ids, dtype=torch.bool),
        "responses": torch.tensor([response + [0] * (width - len(response)) for _, response in rows]),
        "response_mask": torch.arange(width) < lengths[:, None],
    }


def make_engine(bench: Bench) -> NativeRollout:
    rows = max(*bench.shape.batches, bench.shape.rows)
    config = RolloutConfig(max_num_seqs=rows, max_num_batched_tokens=bench.shape.micro_tokens)
    return NativeRollout(bench.module, None, config, eos_token_ids=[])


def sample_columns(bench: Bench) -> tuple[list[PromptRequest], dict[str, torch.Tensor]]:
    """Two prompts with three responses of unequal lengths each."""
    vocabulary, length = bench.module.config.vocab_size, bench.shape.prompt_tokens
    prompts = make_prompts(2, length, vocabulary)
    generator = torch.Generator().manual_seed(2)
    draw = partial(torch.randint, 0, vocabulary, generator=generator)
    return prompts, columns_of(prompts, [(i, draw((n,)).tolist()) for i in range(2) for n in (length // 2, length, 3)])


def packed_log_probs(bench: Bench, columns: dict[str, torch.Tensor], share: bool = True) -> torch.Tensor:
    packed = pack_rows(columns, share_prompts=share, device=bench.device)
    return packed_outputs(bench.module, packed, ("log_probs",))["log_probs"]


def hf_log_probs(bench: Bench, columns: dict[str, torch.Tensor], attention: str = "sdpa") -> torch.Tensor:
    prompts, responses, mask = (columns[n].to(bench.device) for n in ("prompts", "responses", "response_mask"))
    with plain(bench.module, attention) as module:
        ids, keep = torch.cat([prompts, responses], dim=1), responses.shape[1] + 1
        logits = module(input_ids=ids, use_cache=False, logits_to_keep=keep).logits[:, :-1].float()
    return logits.log_softmax(-1).gather(2, responses[:, :, None])[:, :, 0] * mask


def gradient(bench: Bench, log_probs_of: Callable[[], torch.Tensor]) -> torch.Tensor:
    """The gradient of a fixed random combination of log-probs, all weights in one vector."""
    bench.module.zero_grad(set_to_none=True)
    log_probs = log_probs_of()
    weights = torch.randn(log_probs.shape, generator=torch.Generator().manual_seed(3)).to(bench.device)
    (log_probs * weights).sum().backward()
    owners = bench.optimizer.masters.values() if bench.optimizer else bench.module.parameters()
    flat = torch.cat([p.grad.float().flatten() for p in owners if p.grad is not None]).clone()
    for p in owners:
        p.grad = None
    return flat


def relative_gap(value: torch.Tensor, reference: torch.Tensor) -> float:
    return ((value - reference).norm() / reference.norm()).item()


def check_fp32(bench: Bench) -> None:
    prompts, columns = sample_columns(bench)
    plain_ways = [partial(hf_log_probs, bench, columns, attention) for attention in ("sdpa", "eager")]
    with torch.no_grad():
        ours, theirs, eager = packed_log_probs(bench, columns), *(way() for way in plain_ways)
    bench.values["_reference"] = theirs
    bench.note("fp32 log-probs, Hugging Face eager against sdpa, max abs", (eager - theirs).abs().max().item())
    bench.note("fp32 log-probs, packed against Hugging Face, max abs", (ours - theirs).abs().max().item())
    by_sdpa, by_eager = (gradient(bench, way) for way in plain_ways)
    bench.note("fp32 gradients, Hugging Face eager against sdpa, relative", relative_gap(by_eager, by_sdpa))
    del by_sdpa, by_eager
    apart, shared = (gradient(bench, partial(packed_log_probs, bench, columns, share)) for share in (False, True))
    bench.note("fp32 gradients, prompt shared against not, relative", relative_gap(shared, apart))
    bench.values["_gradient"] = apart.cpu()
    del apart, shared
    params = SamplingParams(n=2, temperature=0, max_new_tokens=bench.shape.response_tokens // 4)
    completions = make_engine(bench).generate(prompts, params, step=0)
    ids = torch.tensor([p.token_ids for p in prompts], device=bench.device)
    expected = hf_generate(bench, ids, params.max_new_tokens, sampled=False)
    different = [tuple(c.token_ids) != tuple(expected[i // 2]) for i, c in enumerate(completions)]
    bench.note("fp32 greedy tokens that differ from generate", float(sum(different)), f"of {len(different)} rows")


def check_half(bench: Bench) -> None:
    prompts, columns = sample_columns(bench)
    reference, mask = bench.values.pop("_reference"), columns["response_mask"].to(bench.device)
    with torch.no_grad():
        errors = {
            "packed": packed_log_probs(bench, columns) - reference,
            "Hugging Face": hf_log_probs(bench, columns) - reference,
        }
    for name, error in reversed(errors.items()):
        bench.note(f"half log-probs, {name} against fp32, mean abs", error[mask].abs().mean().item())
    apart, shared = (gradient(bench, partial(packed_log_probs, bench, columns, share)) for share in (False, True))
    exact = bench.values.pop("_gradient").to(bench.device)
    bench.note("half gradients, prompts apart against fp32, relative", relative_gap(apart, exact))
    bench.note("half gradients, prompt shared against not, relative", relative_gap(shared, apart))
    del apart, shared, exact
    params = SamplingParams(n=4, max_new_tokens=bench.shape.response_tokens // 2)
    completions = make_engine(bench).generate(prompts, params, step=0)
    drawn = columns_of(prompts, [(i // 4, c.token_ids) for i, c in enumerate(completions)])
    with torch.no_grad():
        trained = packed_log_probs(bench, drawn).cpu()
    gap = (trained - torch.tensor([c.log_probs for c in completions])).abs()
    bench.note("half sampled log-probs against the training forward, mean abs", gap.mean().item())
    bench.note("half sampled log-probs against the training forward, max abs", gap.max().item())


def hf_generate(bench: Bench, ids: torch.Tensor, num_tokens: int, sampled: bool = True) -> list[list[int]]:
    sampling = {"do_sample": True, "temperature": 1.0, "top_k": 0, "top_p": 1.0} if sampled else {"do_sample": False}
    with plain(bench.module) as module, torch.no_grad():
        out = module.eval().generate(
            ids, attention_mask=torch.ones_like(ids), max_new_tokens=num_tokens, min_new_tokens=num_tokens,
            eos_token_id=None, pad_token_id=0, disable_compile=True, **sampling,
        )  # fmt: skip
    return out[:, ids.shape[1] :].tolist()  # type: ignore[no-any-return]


def decoding_s(
    engine: NativeRollout, prompts: list[PromptRequest], params: SamplingParams, device: torch.device, repeats: int,
    warmup: int = 2,
) -> tuple[float, float]:  # fmt: skip
    """Seconds of the prompts, and of one step of decoding."""
    first, total = (
        median_s(partial(engine.generate, prompts, settings, step=1), device, repeats, warmup)
        for settings in (replace(params, max_new_tokens=1), params)
    )
    return first, (total - first) / (params.max_new_tokens - 1)


def measure_generation(bench: Bench, hf_batches: tuple[int, ...]) -> None:
    shape, module, device = bench.shape, bench.module, bench.device
    engine = make_engine(bench)
    for rows in shape.batches:
        samples = min(shape.samples, rows)
        prompts = make_prompts(rows // samples, shape.prompt_tokens, module.config.vocab_size)

        params = SamplingParams(n=samples, max_new_tokens=shape.response_tokens, ignore_eos=True)
        prefill, step = decoding_s(engine, prompts, params, device, shape.repeats)
        name = f"decode, {rows} rows"
        bench.note(f"prefill, {len(prompts)} prompts", len(prompts) * shape.prompt_tokens / prefill, "tokens/s")
        bench.note(name, rows / step, "tokens/s")
        bench.note(f"{name}, a step", 1000 * step, "ms")
        share = decode_bytes(module, rows, len(prompts), shape) / step / bench.limits["bytes"]
        bench.note(f"{name}, share of bandwidth", 100 * share, "%")
    waits = count_waits(partial(engine.generate, prompts, params, step=1), device)
    bench.note("waits of the host in one generation", float(waits))
    engine.release()
    for rows in hf_batches:
        ids = torch.randint(0, module.config.vocab_size, (rows, shape.prompt_tokens), device=device)
        few, many = (shape.response_tokens // 8, shape.response_tokens // 4)
        times = [median_s(partial(hf_generate, bench, ids, n), device, 1, warmup=1) for n in (few, many)]
        bench.note(
            f"Hugging Face generate, decode, {rows} rows", rows * (many - few) / (times[1] - times[0]), "tokens/s"
        )


def accumulate(bench: Bench, columns: dict[str, torch.Tensor], advantages: torch.Tensor) -> None:
    """The gradients of all rows, micro-batch by micro-batch."""
    aggregated = partial(agg_loss, loss_agg_mode="token-mean", batch_num_tokens=int(columns["response_mask"].sum()))
    micro = MicroBatching(max_tokens=bench.shape.micro_tokens)
    for rows in plan_micro_batches(unpadded_rows(columns), micro, share_prompts=True):
        part = {name: column[rows] for name, column in columns.items()}
        mask, weight = (x.to(bench.device, non_blocking=True) for x in (part["response_mask"], advantages[rows]))
        packed = pack_rows(part, device=bench.device)
        outputs = packed_outputs(bench.module, packed, ("log_probs",), gradients=bench.optimizer.gradients)
        log_probs = outputs["log_probs"]
        loss, _ = vanilla(log_probs.detach(), log_probs, weight, mask, agg=aggregated)
        loss.backward()


def measure_grpo(bench: Bench) -> None:
    shape, device, module = bench.shape, bench.device, bench.module
    engine = make_engine(bench)
    prompts = make_prompts(shape.prompts, shape.prompt_tokens, module.config.vocab_size)
    params = SamplingParams(n=shape.samples, max_new_tokens=shape.response_tokens, ignore_eos=True)
    completions: list[Completion] = []

    def generate() -> None:
        completions[:] = engine.generate(prompts, params, step=1)

    def train() -> None:
        accumulate(bench, columns, advantages)
        bench.optimizer.step(1e-6)

    with peak_gib(bench, "GRPO, generation"):
        generation = median_s(generate, device, shape.repeats)
    engine.release()
    rewards = torch.zeros(shape.rows, shape.response_tokens)
    rewards[:, -1] = torch.tensor([sum(c.token_ids) / len(c.token_ids) / 1e5 for c in completions])
    columns = columns_of(prompts, [(i // shape.samples, c.token_ids) for i, c in enumerate(completions)])
    advantages, _ = grpo(rewards, columns["response_mask"], index=[i // shape.samples for i in range(shape.rows)])
    before = next(module.parameters()).detach().clone()
    with peak_gib(bench, "GRPO, training"):
        training = median_s(train, device, shape.repeats, warmup=1)
    if torch.equal(before, next(module.parameters())):
        raise RuntimeError("training changed no weight")
    flops = 3 * forward_flops(module, shape)
    bench.note(f"GRPO, {shape.prompts} x {shape.samples}, generation", generation, "s")
    bench.note("GRPO, training", training, "s")
    bench.note("GRPO, training, MFU on needed FLOPs", 100 * flops / training / bench.limits["flops"], "%")
    bench.note("GRPO, step", generation + training, "s")
    waits = count_waits(train, device)
    bench.note("waits of the host in one training phase", float(waits))


def run_size(
    size: str, device: torch.device, shape: Shape, limits: dict[str, float], deadline: float
) -> dict[str, Any]:
    print(f"\n{size}", flush=True)
    half = torch.bfloat16 if device.type == "cuda" else torch.float32
    bench = Bench(build(size, device), device, half, shape, limits, deadline)
    bench.note("parameters", sum(p.numel() for p in bench.module.parameters()) / 1e6, "million")
    bench.section("correctness in float32", partial(check_fp32, bench))
    bench.optimizer = MasterOptimizer(bench.module, OptimConfig(), half)  # from here on the module is in `half`
    bench.section(f"correctness in {half}", partial(check_half, bench))
    bench.section("generation", partial(measure_generation, bench, shape.batches[:: max(1, len(shape.batches) // 2)]))
    bench.section("GRPO step", partial(measure_grpo, bench))
    return {name: value for name, value in bench.values.items() if not name.startswith("_")}


def main(arguments: list[str] | None = None) -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--size", choices=tuple(SIZES), default="0.5b")
    parser.add_argument("--json", type=Path, help="write all figures there")
    parser.add_argument("--limit-s", type=float, default=450, help="start no further part after this many seconds")
    parser.add_argument("--quick", action="store_true", help="a tiny model, little work: does everything run?")
    options = parser.parse_args(arguments)
    device = report_device()
    options.quick |= os.environ.get(DEVICE) == "cpu"
    if device.type == "cpu" and not options.quick:
        parser.error("there is no CUDA device; --quick runs a tiny model on the CPU")
    deadline = time.monotonic() + options.limit_s
    size = "tiny" if options.quick else options.size
    name = torch.cuda.get_device_name(device) if device.type == "cuda" else platform.processor() or platform.machine()
    print(f"{name}, torch {torch.__version__}, transformers {transformers.__version__}")
    limits = measure_limits(device, options.quick)
    print(
        f"limits: {limits['flops'] / 1e12:.1f} TFLOP/s in a matrix product, {limits['bytes'] / 1e9:.0f} GB/s in a copy"
    )
    full = replace(FULL, micro_tokens=MICRO_TOKENS.get(size, FULL.micro_tokens))
    values = run_size(size, device, QUICK if options.quick else full, limits, deadline)
    if options.json:
        options.json.write_text(json.dumps(values, indent=1))
    wrong = [n for n in (*TOLERANCES, *RELATIVE_TOLERANCES) if not values.get(n, 0) <= (most(n, values) or 0)]
    failed = [name for name in values if name.endswith(": error")]
    print("\n" + ("all checks passed" if not wrong + failed else "NOT RIGHT: " + "; ".join(wrong + failed)))
    return 1 if wrong or failed else 0


if __name__ == "__main__":
    sys.exit(main())
