"""Cost of a run against its size, with the fitted exponent: a start against rows, the ledger against samples, records against
steps.

    python -m benchmarks.scale                      the tables of starts in docs/scale.md
    python -m benchmarks.scale --ledger             the table of the sample ledger (10 million samples: 3 GB)
    python -m benchmarks.scale --steps              the table of the records of steps (a million steps: 4 GB)
    python -m benchmarks.scale --checkpoints        the table of checkpoints (1 billion parameters: 12 GB, twice)
    python -m benchmarks.scale --tails              the table of response lengths; --model PATH: of a real model, once
    python -m benchmarks.controller                 the table of the controller

Each size has a generated parquet file and a GRPO run of a tiny model, started twice in new run folders: the first start has an
empty cache. Seconds count from the start of the process to the end of the first step. Memory is the highest sum over the
processes of a run, where processes share the memory that they have in common (PSS).
"""

from __future__ import annotations

import argparse
import contextlib
import json
import math
import os
import shutil
import subprocess
import sys
import tempfile
import time
from collections import namedtuple
from collections.abc import Callable, Mapping, Sequence
from functools import partial
from itertools import pairwise
from pathlib import Path
from typing import Any

import numpy as np
import psutil
import pyarrow
import pyarrow.parquet
import torch
from transformers import AutoModelForCausalLM

from verl.checkpoint.files import SMALL_BYTES
from verl.checkpoint.store import CheckpointStore, RoleCheckpoint, read_role
from verl.config import RolloutConfig
from verl.data_proto.samples import PromptRequest, SamplingParams
from verl.engines.api import EngineState
from verl.engines.state import ReadBuffer
from verl.manifest import verification
from verl.models.tiny import make_tiny_model
from verl.page.index import SampleIndex
from verl.page.pages import Site
from verl.rollout.native.engine import NativeRollout
from verl.tracking.files import read_json_rows
from verl.tracking.ledger.reader import Ledger
from verl.tracking.ledger.records import Prompt, Scored, SegmentRecord
from verl.tracking.ledger.tracker import SampleTracker, start_ledger
from verl.tracking.ledger.writer import LedgerWriter
from verl.tracking.progress import read_progress
from verl.tracking.run_folder import RunFolder

SIZES = (1_000, 20_000, 400_000, 5_000_000)
SAMPLES = (10_240, 102_400, 1_024_000, 10_240_000)
PARAMETERS = (16_777_216, 67_108_864, 268_435_456, 1_006_632_960)
RESPONSES = (64, 128, 256, 512)
_SLOTS, _LIMIT, _PROMPT = 64, 1024, 16  # responses at a time, tokens of a response and of a prompt
_BLOCK = 1 << 22  # parameters of a tensor of a checkpoint
STEPS = (1_000, 10_000, 100_000, 1_000_000)
_PROMPTS, _SAMPLES, _TOKENS = 128, 8, 16  # of a recorded step
MODES = {"": (), " with filter_overlong_prompts": ("data.filter_overlong_prompts=True",)}
_RUN_LIMIT_S = 1200.0
_POLL_S = 0.25
_ROWS_WRITTEN = 100_000  # at once
REWARD = "def compute_score(solution_str, **columns):\n    return len(solution_str) % 7\n"


def write_rows(path: Path, num_rows: int) -> None:
    """A parquet file of questions, each with one message, a reference answer and an index."""
    with pyarrow.parquet.ParquetWriter(path, _table(range(1)).schema) as writer:
        for start in range(0, num_rows, _ROWS_WRITTEN):
            writer.write_table(_table(range(start, min(start + _ROWS_WRITTEN, num_rows))))


def _table(numbers: range) -> pyarrow.Table:
    ask = "What is {} + {}? Think about it, then answer with a number.".format
    terms = [(i, i * 7 % 1000) for i in numbers]
    columns = {
        "data_source": ["sums"] * len(terms),
        "prompt": [[{"role": "user", "content": ask(a, b)}] for a, b in terms],
        "reward_model": [{"style": "rule", "ground_truth": str(a + b)} for a, b in terms],
        "extra_info": [{"index": i} for i in numbers],
    }
    return pyarrow.table(columns)


def overrides(model: Path, folder: Path, rows: Path) -> list[str]:
    """Keys of a run of two small steps on the file `rows`."""
    (folder / "reward.py").write_text(REWARD)
    keys = {
        "algorithm.adv_estimator": "grpo", "actor_rollout_ref.model.path": model, "actor_rollout_ref.rollout.n": 2,
        "actor_rollout_ref.actor.ppo_mini_batch_size": 8, "data.train_files": rows, "data.val_files": "[]",
        "data.train_batch_size": 8, "data.max_prompt_length": 256, "data.max_response_length": 8,
        "reward.custom_reward_function.path": folder / "reward.py", "reward.num_workers": 1, "trainer.device": "cpu",
        "trainer.page.enable": False, "trainer.logger": "[file]", "trainer.val_before_train": False,
        "trainer.total_training_steps": 2,
    }  # fmt: skip
    return [f"{key}={value}" for key, value in keys.items()]


def measure(run: Path, changes: Sequence[str], cache: Path) -> tuple[float, float]:
    """Start `verl train` in the new folder `run`: seconds to the end of the first step, GB of memory."""
    command = [sys.executable, "-m", "verl", "train", *changes, f"trainer.default_local_dir={run}"]
    started, memory = time.time(), 0
    environment = {**os.environ, "VERL_DATA_CACHE": str(cache)}
    with subprocess.Popen(command, stdout=subprocess.DEVNULL, env=environment) as process:
        while process.poll() is None:
            memory = max(memory, shared_bytes(process.pid))
            if time.time() - started > _RUN_LIMIT_S:
                process.terminate()
            time.sleep(_POLL_S)
    if process.returncode:
        raise RuntimeError(f"{' '.join(command)} ended with {process.returncode}")
    lines = (json.loads(line) for line in (run / "metrics.jsonl").read_text().splitlines())
    return next(line["time"] for line in lines if line["step"] == 1) - started, memory / 1e9


def shared_bytes(pid: int) -> int:
    """PSS of a process and its descendants; 0 where one of them has just ended."""
    with contextlib.suppress(psutil.Error):
        parent = psutil.Process(pid)
        return sum(process.memory_full_info().pss for process in (parent, *parent.children(recursive=True)))
    return 0


def exponent(sizes: Sequence[int], costs: Sequence[float]) -> float:
    """The slope of log cost against log size, by least squares: 0 for a constant, 1 where cost is proportional to size."""
    slope, _ = np.polyfit([math.log(size) for size in sizes], [math.log(cost) for cost in costs], 1)
    return float(slope)


class Costs:
    """Quantity -> its cost at each size so far."""

    def __init__(self, sizes: Sequence[int]):
        self.sizes, self.rows = sizes, dict[str, list[float]]()

    def add(self, size: int, row: Mapping[str, float]) -> None:
        for name, cost in row.items():
            self.rows.setdefault(name, []).append(cost)
        print(f"{size:,}: {', '.join(f'{name} {cost:.3g}' for name, cost in row.items())}", flush=True)

    def table(self) -> str:
        """A Markdown table with a row for each quantity."""
        head = f"| | {' | '.join(f'{size:,}' for size in self.sizes)} | exponent |"
        lines = [head, "|---|" + "---|" * (len(self.sizes) + 1)]
        for name, row in self.rows.items():
            slope = f"{exponent(self.sizes, row):.2f}" if len(row) > 1 else ""
            lines.append(f"| {name} | {' | '.join(f'{cost:.3g}' for cost in row)} | {slope} |")
        return "\n".join(lines)


def measure_starts(sizes: Sequence[int], folder: Path) -> None:
    model = make_tiny_model(folder / "model")
    for size in sizes:
        write_rows(folder / f"{size}.parquet", size)
    for mode, keys in MODES.items():
        seconds, memory = Costs(sizes), Costs(sizes)
        for size in sizes:
            changes = (*overrides(model, folder, folder / f"{size}.parquet"), *keys)
            for attempt in ("first start", "second start"):
                run = folder / f"{size}{mode}-{attempt}".replace(" ", "-")
                start_s, memory_gb = measure(run, changes, folder / f"cache-{size}-{len(mode)}")
                seconds.add(size, {f"seconds to the first step, {attempt}{mode}": start_s})
                memory.add(size, {f"memory (GB), {attempt}{mode}": memory_gb})
        seconds.rows |= memory.rows
        print(seconds.table(), flush=True)


def measure_ledger(sizes: Sequence[int], folder: Path) -> None:
    """One ledger grows through the sizes; a run of small steps recorded it."""
    path = folder / "ledger.sqlite"
    tracker, costs = SampleTracker(), Costs(sizes)
    tracker.start(start_ledger(path), LedgerWriter(path))
    for size in sizes:
        while tracker.offset.num_trained < size - _PROMPTS * _SAMPLES:
            record_step(tracker)
        tracker.commit()
        recorded_s, _ = timed(lambda: (record_step(tracker), tracker.commit()))
        record = tracker.commit()
        record_step(tracker)  # lost by the resume
        tracker.close()
        resumed_s, snapshot = timed(partial(start_ledger, path, folder / "global_step_1", record))
        with Ledger.open(path) as ledger:
            counted_s, counts = timed(ledger.counts)
        if counts.trained != size:
            raise RuntimeError(f"the ledger has {counts.trained} samples instead of {size}")
        row = {f"seconds to record and sync a step of {_PROMPTS * _SAMPLES:,} samples": recorded_s}
        row |= {"seconds to resume": resumed_s, "seconds to count the outcomes": counted_s}
        costs.add(size, {**row, "bytes a sample": path.stat().st_size / size})
        tracker.start(snapshot, LedgerWriter(path))
    tracker.close()
    print(costs.table(), flush=True)


def measure_steps(sizes: Sequence[int], folder: Path) -> None:
    """Runs of many steps: records of the second step of a tiny run, repeated. A resume removes the last step."""
    write_rows(folder / "rows.parquet", 100)
    measure(folder / "run", overrides(make_tiny_model(folder / "model"), folder, folder / "rows.parquet"), folder)
    costs = Costs(sizes)
    for size in sizes:
        run = folder / str(size)
        run.mkdir()
        for name in ("config.yaml", "curves.json"):
            shutil.copy(folder / "run" / name, run)
        for name in ("metrics.jsonl", "timeline.jsonl", "spans.jsonl"):
            repeat_step(folder / "run" / name, run / name, size)
        num_bytes = sum(file.stat().st_size for file in run.iterdir())
        link_samples(folder / "run" / "samples" / "train" / "step_000002.jsonl", run, size)
        works = {
            "`verl show`": partial(read_progress, run),
            "the page's first view": partial(first_view, run),
            "a resume": partial(resume, run, size - 1),
        }
        costs.add(size, {**{name: timed(work)[0] for name, work in works.items()}, "bytes a step": num_bytes / size})
        shutil.rmtree(run)
    print(costs.table(), flush=True)


def first_view(run: Path) -> None:
    with contextlib.closing(Site([run], cache=run)) as site:
        site.page(f"/run/{run.name}")


def resume(run: Path, step: int) -> None:
    with RunFolder(run) as records:
        records.truncate_after(step)


def measure_checkpoints(sizes: Sequence[int], folder: Path) -> None:
    """Float32 weights with the two moments of Adam: 12 bytes a parameter. The tensors share one block of memory."""
    block, costs = torch.rand(_BLOCK), Costs(sizes)
    buffer = memoryview(block.numpy()).cast("B")
    for size in sizes:
        names, store = [f"w{i}" for i in range(size // _BLOCK)], CheckpointStore(folder / str(size))
        moments = {f"{moment}.{name}": block for moment in ("exp_avg", "exp_avg_sq") for name in names}
        writer = RoleCheckpoint(EngineState(dict.fromkeys(names, block), moments, {}), lambda _: None)
        with (folder / "plain").open("wb+", buffering=0) as file:
            work = lambda file=file, moments=moments: [file.write(buffer) for _ in range(len(moments) * 3 // 2)]  # noqa: E731
            written_s = timed(work)[0] + timed(partial(os.fsync, file.fileno()))[0]
            os.posix_fadvise(file.fileno(), 0, 0, os.POSIX_FADV_DONTNEED)
            file.seek(0)
            read_s, _ = timed(lambda file=file: [None for _ in iter(lambda: file.readinto(buffer), 0)])
        saved_s, _ = timed(partial(store.save, 1, {"actor": writer}, {}))
        for path in store.root.rglob("*.safetensors"):
            with path.open("rb") as file:
                os.posix_fadvise(file.fileno(), 0, 0, os.POSIX_FADV_DONTNEED)
        loaded_s, _ = timed(partial(load, store, block))
        shutil.rmtree(store.root)
        seconds = {"disk written": written_s, "disk read": read_s, "save": saved_s, "load": loaded_s}
        costs.add(size, {f"GB/s, {name}": 12e-9 * size / s for name, s in seconds.items()})
    print(costs.table(), flush=True)


# tokens of a response: earlier, new, expected; whether it ends with them; earlier ones without keys
Part = namedtuple("Part", "before new expected ends computed", defaults=(0.0, True, 0))


def measure_tails(sizes: Sequence[int], folder: Path, path: Path | None = None) -> None:
    """Generation against responses of equal length, for lengths of a log-normal distribution with 1% at the limit, half
    of whose variance is between prompts: of a synchronous step in a first and in a later epoch, and of a step of partial
    rollouts, in which all cohorts make a part, with and without keys and values of earlier parts. Processor time, decode
    steps (as multiples of tokens / slots), and prompt tokens computed, a new token."""
    shape = {"hidden_size": 256, "intermediate_size": 512, "max_position_embeddings": 2 * _LIMIT}
    path, num_rounds = (path, 1) if path else (make_tiny_model(folder / "model", **shape), 3)
    model = AutoModelForCausalLM.from_pretrained(path, attn_implementation="verl", dtype="auto").eval()
    config = RolloutConfig(max_num_seqs=_SLOTS, keep_partial_kv_cache=True)
    engine = NativeRollout(model, None, config, eos_token_ids=[])
    params, costs = SamplingParams(max_new_tokens=_LIMIT, ignore_eos=True), Costs(sizes)

    def cost_of_token(requests: list[Part], step: int = 2) -> np.ndarray:
        """[processor seconds, decode steps of all slots, prompt tokens]."""
        generation, started = engine.open(params, step=step), time.process_time()
        for number, (before, new, expected, ends, _) in enumerate(requests):
            drawn = _LIMIT if before and ends else before  # at the limit nothing is kept
            ids = (5,) * (_PROMPT + before)
            generation.add(PromptRequest(number, ids, 0, drawn, max_new_tokens=new, expected_tokens=expected))
        while generation.poll():
            pass
        seconds, facts = time.process_time() - started, generation.close()
        counts = _SLOTS * int(facts["num_decode_steps"]), int(facts["num_prompt_tokens_computed"])
        return np.array([seconds, *counts]) / int(facts["num_generated_tokens"])

    def cost_with_keys(requests: list[Part]) -> np.ndarray:
        """As `cost_of_token`, with keys and values of all earlier tokens but the last and `Part.computed`."""
        engine.forget()
        engine.trains, engine.resumes_below = True, _LIMIT
        cost_of_token([Part(max(p.before - p.computed - 1, 0), 1, 0.0, False) for p in requests], step=1)
        cost, engine.trains = cost_of_token(requests), False
        return cost

    cost_of_token([Part(0, 8)] * _SLOTS)  # the first generation starts threads
    for size in sizes:
        earlier, lengths = lengths_of_epochs(size)
        mean, squares = int(lengths.mean()), float((lengths**2).mean())
        mixes = {"": [Part(0, mean)] * size, "a first epoch": [Part(0, n) for n in lengths.tolist()]}
        mixes["a later epoch"] = [Part(0, *pair) for pair in zip(lengths.tolist(), earlier.tolist(), strict=True)]
        # responses of equal length, whose tokens see as many keys as these, and which compute a prompt
        continued = {"kept, equal lengths": [Part(int(squares / mean - mean) // 2, mean, computed=_PROMPT)] * size}
        for parts in (2, 4, 8):
            first = _LIMIT // (parts * min(parts, 4))  # as in verl/programs/rollout_queue.py
            ends = [0, *range(first, _LIMIT, -(-(_LIMIT - first) // (parts - 1))), _LIMIT]
            cuts = reversed([*pairwise(ends)])
            mixes[f"{parts} parts"] = continued[f"kept, {parts} parts"] = [
                Part(at, min(end, n) - at, 0.0, n <= end) for at, end in cuts for n in lengths.tolist() if n > at
            ]
        works = [(cost_of_token, mixes), (cost_with_keys, continued)]
        rounds = [[work(parts) for work, kind in works for parts in kind.values()] for _ in range(num_rounds)]
        bound, *least = np.min(rounds, axis=0).tolist()
        row = {}
        for name, (seconds, steps, computed) in zip([*mixes, *continued][1:], least, strict=True):
            row |= {f"processor time, {name}": seconds / bound[0], f"decode steps, {name}": steps}
            row[f"prompt tokens, {name}"] = computed
        costs.add(size, row)
    print(costs.table())


def lengths_of_epochs(size: int) -> tuple[np.ndarray, np.ndarray]:
    """The mean length of each response's prompt in an epoch, and the response's own length in the next; eight have a prompt."""
    rng = np.random.default_rng(0)
    prompts = rng.normal(size=(1, size // _SAMPLES, 1))
    deviations = math.sqrt(0.5) * (prompts + rng.normal(size=(2, size // _SAMPLES, _SAMPLES)))
    earlier, lengths = np.exp(math.log(_LIMIT) - 2.326 + deviations).clip(1, _LIMIT).astype(int)
    return np.repeat(earlier.mean(axis=1), _SAMPLES), lengths.reshape(-1)


def load(store: CheckpointStore, block: torch.Tensor) -> None:
    """Verify and read the newest checkpoint, whose tensors are copied into memory, as engines do."""
    path = store.find(max_bytes=SMALL_BYTES)
    with verification(path) as damage:
        state, read = read_role(path / "actor", ("model", "optimizer")), ReadBuffer()
        for tensor in state.model.values():
            read.whole(tensor, block)
        for tensor in state.optimizer.values():
            block.copy_(read.whole(tensor))
        if damage():
            raise RuntimeError(damage())


def repeat_step(source: Path, target: Path, num_steps: int) -> None:
    """The rows of step 2 in `source`, for each step from 1 on."""
    rows = [row for row in read_json_rows(source) if row["step"] == 2]
    text = "".join(json.dumps({"step": "STEP", **{n: v for n, v in row.items() if n != "step"}}) + "\n" for row in rows)
    with target.open("w", encoding="utf-8") as file:
        file.writelines(text.replace('"STEP"', str(step)) for step in range(1, num_steps + 1))


def link_samples(source: Path, run: Path, num_steps: int) -> None:
    """A file of samples for each step, as links to one; all of them indexed, without their samples."""
    index, train, status = SampleIndex(run, run), run / "samples" / "train", source.stat()
    train.mkdir(parents=True)
    for step in range(1, num_steps + 1):
        os.symlink(source, train / f"step_{step:06d}.jsonl")
    index.db.execute(
        "INSERT INTO files (split, step, stamp, complete, rows, mean, low, high) WITH RECURSIVE n(step) AS "
        "(SELECT 1 UNION ALL SELECT step + 1 FROM n WHERE step < ?) SELECT 'train', step, ?, 1, 10, 0.5, 0.2, 0.8 FROM n",
        (num_steps, f"{status.st_mtime_ns}-{status.st_size}-{status.st_ino}"),
    )
    index.update()


def timed(work: Callable[[], Any]) -> tuple[float, Any]:
    """Seconds of one call, and its result."""
    start = time.perf_counter()
    result = work()
    return time.perf_counter() - start, result


def record_step(tracker: SampleTracker) -> None:
    """Issue, generate, score and train the samples of a step."""
    step, first = tracker.offset.step + 1, tracker.cursor
    ordinals = range(first, first + _PROMPTS)
    tracker.issue(
        step, [Prompt(i, 0, i, f"{i:016x}") for i in ordinals], num_samples=_SAMPLES, split="train", limit=_TOKENS
    )
    keys = [(ordinal, sample) for ordinal in ordinals for sample in range(_SAMPLES)]
    tokens = np.arange(_TOKENS, dtype="<i4")
    log_probs = (-tokens / 7).astype("<f4")
    tracker.generate(step, [SegmentRecord(*key, tokens, log_probs, step - 1, "stop", 0) for key in keys])
    tracker.score(step, [Scored(*key, 0.5, {"acc": 0.5}, None) for key in keys])
    tracker.train(step, keys)


def main() -> None:
    modes = {"ledger": (measure_ledger, SAMPLES), "steps": (measure_steps, STEPS), "tails": (measure_tails, RESPONSES)}
    modes["checkpoints"] = (measure_checkpoints, PARAMETERS)
    parser = argparse.ArgumentParser(description="Cost of a run against its size.")
    parser.add_argument("--sizes", type=lambda text: [*map(int, text.split(","))], help="rows or samples, increasing")
    parser.add_argument("--model", type=Path, help="a folder of a model for --tails")
    for mode in modes:
        parser.add_argument(f"--{mode}", action="store_true")
    arguments = parser.parse_args()
    work, sizes = next((modes[name] for name in modes if getattr(arguments, name)), (measure_starts, SIZES))
    if arguments.model:
        work = partial(measure_tails, path=arguments.model)
    with tempfile.TemporaryDirectory() as folder:
        work(arguments.sizes or sizes, Path(folder))


if __name__ == "__main__":
    main()
