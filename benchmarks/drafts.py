"""Decoding with drafts against decoding without, by the number of samples that run. The ways take turns in one process.

    python -m benchmarks.drafts --questions gsm8k/test.jsonl --rounds 3
    python -m benchmarks.drafts --cases "agents, 2" "agents, 4"         # needs no questions
    python -m benchmarks.drafts --cases "rows, 2" "rows, 64" --rounds 1  # nothing repeats: drafts must cost nothing
    python -m benchmarks.drafts --cut 6     # drafts of the model's first layers, in place of a draft model

tail       8 samples of each question at temperature 0.6. They end by themselves, so few run at the end.
agents, N  N agents at a time. Each repeats the result of a tool.
rows, N    N samples of 128 tokens at temperature 1.

Only steps without prompts count. Every way must give the same samples as the engine without drafts. If it is interrupted, by
SIGTERM too, it prints what it has.
"""

import argparse
import json
import random
import re
import shutil
import signal
import sys
import tempfile
import time
from collections import defaultdict
from collections.abc import Sequence
from contextlib import suppress
from dataclasses import replace
from pathlib import Path
from statistics import median
from typing import Any, NamedTuple

import torch
from safetensors.torch import load_file, save_file

from benchmarks.report import Report, number
from verl.config import load_config
from verl.data_proto.samples import PromptRequest, SamplingParams
from verl.models.load import eos_token_ids_of, load_causal_lm, load_tokenizer
from verl.rollout.native.engine import NativeRollout

BANDS = (2, 4, 8, 16, 32, 64)  # samples that run, at most
ROLLOUT = "actor_rollout_ref.rollout"
_NAMES = ("harbor", "lantern", "meadow", "copper", "willow", "granite", "falcon", "ember", "cobalt", "juniper")


class Case(NamedTuple):
    """Requests of a generation and how they are sampled."""

    texts: list[str]
    params: SamplingParams
    max_num_seqs: int


class Watched(NamedTuple):
    """Tokens and seconds of decode steps by band, and the samples."""

    tokens: dict[int, int]
    seconds: dict[int, float]
    samples: list[tuple[tuple[int, ...], tuple[float, ...]]]
    stats: dict[str, Any]


def tail(options: argparse.Namespace, tokenizer: Any) -> Case:
    """Samples that end by themselves."""
    rows = [json.loads(line)["question"] for line in options.questions.read_text().splitlines()]
    texts = [_chat(tokenizer, [{"role": "user", "content": row}]) for row in rows[: options.prompts]]
    return Case(texts, SamplingParams(n=8, max_new_tokens=options.tokens, temperature=0.6, seed=17), 64)


def agents(tokenizer: Any, running: int, temperature: float) -> Case:
    """Agents whose reply repeats the rows of a tool's result."""
    draw, texts = random.Random(17), []
    for _ in range(2 * running):
        rows = [
            {"id": draw.randrange(10**6), "name": draw.choice(_NAMES), "price": draw.randrange(1000) / 100}
            for _ in range(8)
        ]
        result = "\n".join(map(json.dumps, rows))
        question = f"The tool `list_orders` returned:\n\n{result}\n\nRepeat all rows exactly as they are."
        texts.append(_chat(tokenizer, [{"role": "user", "content": question}]) + "Here are the rows:\n\n" + result[:60])
    return Case(texts, SamplingParams(n=1, max_new_tokens=256, temperature=temperature, seed=17), running)


def rows(tokenizer: Any, running: int) -> Case:
    """Samples of equal length."""
    n = min(8, running)
    texts = [
        _chat(tokenizer, [{"role": "user", "content": f"Tell me about the {_NAMES[i]}."}]) for i in range(running // n)
    ]
    return Case(texts, SamplingParams(n=n, max_new_tokens=128, temperature=1.0, seed=17, ignore_eos=True), running)


def cut(folder: Path, num_layers: int, out: Path) -> Path:
    """The first layers of a model, with its embedding and output projection."""
    tensors = {n: x for file in folder.glob("*.safetensors") for n, x in load_file(file).items()}
    is_later = {n: int(m[1]) >= num_layers for n in tensors if (m := re.search(r"layers\.(\d+)\.", n))}
    for file in folder.iterdir():
        if "safetensors" not in file.name:
            shutil.copy(file, out)
    config = json.loads((out / "config.json").read_text()) | {"num_hidden_layers": num_layers, "layer_types": None}
    (out / "config.json").write_text(json.dumps(config))
    save_file({n: x for n, x in tensors.items() if not is_later.get(n)}, out / "model.safetensors", {"format": "pt"})
    return out


def _chat(tokenizer: Any, messages: list[dict[str, str]]) -> str:
    text: str = tokenizer.apply_chat_template(messages, tokenize=False, add_generation_prompt=True)
    return text


def decode(engine: NativeRollout, case: Case, requests: Sequence[PromptRequest], step: int) -> Watched:
    """One generation. A step counts for the smallest band that holds the samples that it computes."""
    generation = engine.open(case.params, step=step)
    tokens, seconds = defaultdict[int, int](int), defaultdict[int, float](float)
    scheduler, advance = generation.scheduler, generation.scheduler._advance

    def timed(chunks: list[Any]) -> None:
        rows, running = scheduler.rows, scheduler.rows.num_running
        before = int(rows.length[: rows.end].sum())
        began = time.perf_counter()
        advance(chunks)
        spent = time.perf_counter() - began
        if running and not chunks:
            band = min(limit for limit in BANDS if limit >= running)
            # the lengths of rows stay behind the end of their sample until the next one takes the row
            tokens[band] += int(rows.length[: rows.end].sum()) - before
            seconds[band] += spent

    vars(scheduler)["_advance"] = timed
    done = []
    for request in requests:
        generation.add(request)
    while ended := generation.poll():
        done += ended
    done.sort(key=lambda completion: completion.key)
    return Watched(tokens, seconds, [(c.token_ids, c.log_probs) for c in done], generation.close())


def engine_of(
    options: argparse.Namespace, module: Any, tokenizer: Any, keys: Sequence[str], case: Case
) -> NativeRollout:
    """A native engine with these keys of `rollout`."""
    keys = [f"actor_rollout_ref.model.path={options.model}", *(f"{ROLLOUT}.{key}" for key in keys)]
    config = load_config([*keys, f"{ROLLOUT}.max_num_seqs={case.max_num_seqs}"], check=False).config
    model, rollout = config.actor_rollout_ref.model, config.actor_rollout_ref.rollout
    return NativeRollout(module, tokenizer, rollout, eos_token_ids=eos_token_ids_of(model, tokenizer))


def measure(options: argparse.Namespace, name: str, module: Any, tokenizer: Any, report: Report) -> None:
    """Add a row of the table for each band of a case, and its numbers, after each round."""
    kind, _, count = name.partition(", ")
    case = tail(options, tokenizer) if kind == "tail" else rows(tokenizer, int(count)) if kind == "rows" else None
    case = case or agents(tokenizer, int(count), options.temperature)
    requests = [PromptRequest(i, tuple(tokenizer.encode(text))) for i, text in enumerate(case.texts)]
    ways = {"without": options.ours, "drafts": [*options.ours, *(f"speculative.{k}" for k in options.drafts)]}
    engines = {way: engine_of(options, module, tokenizer, keys, case) for way, keys in ways.items()}
    rates: dict[str, dict[int, list[float]]] = {way: defaultdict(list) for way in ways}
    stats, table, before = [], report.tables[0][1], list(report.tables[0][1])
    short = case._replace(params=replace(case.params, max_new_tokens=16))  # the first round warms up
    for step in range(options.rounds + 1):
        results = {}
        for way, engine in engines.items():
            results[way] = decode(engine, case if step else short, requests, step)
            engine.release()
            print(f"{name} {step} {way}: {sum(results[way].seconds.values()):.2f} s", file=sys.stderr, flush=True)
            for band, spent in results[way].seconds.items():
                rates[way][band] += [results[way].tokens[band] / spent] if step else []
        if results["drafts"].samples != results["without"].samples:
            raise RuntimeError(f"{name}: drafts changed samples.")
        if not step:
            continue
        stats.append(results["drafts"].stats)
        guessed = f"{sum(s['num_accepted_drafts'] for s in stats)} of {sum(s['num_drafts'] for s in stats)}"
        table[:] = before
        for band in sorted(rates["drafts"]):
            of = {way: median(rates[way][band]) for way in ways}
            ratio = f"{of['drafts'] / of['without']:.2f}"
            table.append([name, f"<= {band}", *(number(of[way]) for way in ways), ratio, guessed])
        report.results[name] = {"rates": rates, "saved_step_share": [s["saved_step_share"] for s in stats]}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--model", type=Path, default=Path("work/models/SmolLM2-135M-Instruct"))
    parser.add_argument("--dtype", choices=("float32", "bfloat16"), default="bfloat16")
    parser.add_argument("--questions", type=Path, help="GSM8K's test.jsonl, for the tail")
    parser.add_argument("--prompts", type=int, default=4, help="questions of the tail")
    parser.add_argument("--tokens", type=int, default=512, help="longest sample of the tail")
    parser.add_argument("--temperature", type=float, default=0.6, help="of agents")
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--cases", nargs="+", default=["tail", "agents, 2", "agents, 4"])
    parser.add_argument("--drafts", nargs="+", default=["methods=[ngram,history]"], help="keys of rollout.speculative")
    parser.add_argument("--cut", type=int, default=0, metavar="LAYERS", help="layers of the draft model")
    parser.add_argument("--ours", nargs="*", default=[], help="keys of rollout, of every way")
    parser.add_argument("--json", type=Path)
    options = parser.parse_args()
    module = load_causal_lm(options.model, dtype=getattr(torch, options.dtype))
    tokenizer = load_tokenizer(options.model)
    report = Report("Decoding with drafts", facts=vars(options) | {"threads": torch.get_num_threads()})
    report.tables.append((["case", "running", "without, tokens/s", "drafts", "drafts / without", "right guesses"], []))
    signal.signal(signal.SIGTERM, signal.default_int_handler)
    with tempfile.TemporaryDirectory() as scratch, suppress(KeyboardInterrupt):
        if options.cut:
            path = cut(options.model, options.cut, Path(scratch))
            options.drafts = ["methods=[model]", f"model_path={path}"]
        for name in options.cases:
            measure(options, name, module, tokenizer, report)
    report.finish(options.json)


if __name__ == "__main__":
    main()
