"""Our rollout engine against Hugging Face `generate` and vLLM's CPU build, alternating, on identical work.

    python benchmarks/peers/rollout_cpu.py                       # 8 prompts x 8 samples, 64 + 128 tokens, against generate
    python benchmarks/peers/rollout_cpu.py --vllm --dtype bfloat16 --json results.json
    python benchmarks/peers/rollout_cpu.py --dtype bfloat16 --forms float32 int8 --prompts 1    # our engine in other numbers
    python benchmarks/peers/rollout_cpu.py --temperature 0.3 --vllm-set 'speculative_config={"method": "ngram", \
        "num_speculative_tokens": 5, "prompt_lookup_max": 4}' --ours actor_rollout_ref.rollout.speculative.methods=[ngram]

Rounds are as in peers_cpu.py; every sample has the full length. A further result is the distance of sampled log-probs from
the training forward.
"""

import argparse
import os
import sys
import tempfile
from contextlib import ExitStack
from dataclasses import replace
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

from peer import Peer, in_turns
from peer_env import ensure
from peers_cpu import OURS, Unequal, add_workload_options, describe, make_workload, shares, start_verl, typed
from report import Report, number, ratio, series_of
from workload import Workload


def vllm_environment() -> dict[str, str]:
    """Settings with which vLLM is fastest here: its engine in a separate process, threads on every core, a cache of 1 GiB."""
    cores = {"VLLM_CPU_OMP_THREADS_BIND": f"0-{(os.cpu_count() or 1) - 1}", "VLLM_CPU_KVCACHE_SPACE": "1"}
    return {**cores, "VLLM_NO_USAGE_STATS": "1", "HF_HUB_OFFLINE": "1"}


def start(stack: ExitStack, options: argparse.Namespace, work: Workload, logs: Path) -> list[Peer]:
    """Every engine's process, built."""
    peers = [start_verl(stack, work, logs, options.limit_s, options.ours)]
    for form in options.forms:  # a dtype, or what layers of the dtype are quantized to
        quantized = [] if form.startswith(("float", "bfloat")) else [f"actor_rollout_ref.rollout.quantization={form}"]
        its_work = work if quantized else replace(work, dtype=form)
        peers.append(start_verl(stack, its_work, logs, options.limit_s, [*options.ours, *quantized], form))
    engines: dict[str, dict[str, Any]] = (
        {"generate": {"environment": {"HF_HUB_OFFLINE": "1"}}} if not options.forms else {}
    )
    settings_of_vllm = dict(typed(text) for text in options.vllm_set)
    if options.vllm or options.vllm_env or settings_of_vllm:
        engines["vllm"] = {"python": ensure("vllm", options.vllm_env), "environment": vllm_environment()}
    for name, settings in engines.items():
        peer = stack.enter_context(Peer(name, "child_generate.py", log=logs / f"{name}.log", **settings))
        peer.build(options.limit_s, engine=name, work=work.to_json(), settings=settings_of_vllm)
        peers.append(peer)
    return peers


def alternate(peers: list[Peer], work: Workload, rounds: int, limit_s: float) -> dict[str, list[dict[str, Any]]]:
    """The answers of each engine to its generations after the warm-up."""
    generations: dict[str, list[dict[str, Any]]] = {peer.name: [] for peer in peers}
    for number_of_round, answers in in_turns(peers, rounds, limit_s, "generate", tells_round=True):
        for name, answer in answers.items():
            if answer["lengths"] != [work.response_tokens] or answer["num_sequences"] != work.num_sequences:
                raise Unequal(f"{name} made {answer['num_sequences']} samples of {answer['lengths']} tokens.")
            rate = work.num_new_tokens / answer["generate_s"]
            print(f"round {number_of_round} {name}: {rate:.1f} tokens/s", file=sys.stderr, flush=True)
            generations[name] += [{**answer, "tokens_per_s": rate}] if number_of_round else []
    return generations


def fill(report: Report, work: Workload, generations: dict[str, list[dict[str, Any]]]) -> None:
    """Tokens per second of each engine and how many times as fast ours is."""
    rates = {name: series_of(rounds, "tokens_per_s") for name, rounds in generations.items()}
    ours = rates[OURS]
    rows = [
        [name, rate.text(), f"{number(work.num_new_tokens / rate.median)} s", f"{number(ratio(ours, rate))}x"]
        for name, rate in rates.items()
    ]
    report.tables.append((["engine", "tokens/s", "one generation", f"{OURS} is faster by"], rows))
    report.results["tokens_per_s"] = {name: rate.to_json() for name, rate in rates.items()}
    report.results["ratios"] = {name: ratio(ours, rate) for name, rate in rates.items() if name != OURS}


def main(argv: list[str] | None = None) -> Report:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    add_workload_options(parser, response_tokens=128)
    parser.add_argument("--vllm", action="store_true", help="run vLLM too, in its own environment (made if absent)")
    parser.add_argument(
        "--forms", nargs="*", default=[], help="our engine with these numbers, in place of other engines"
    )
    parser.add_argument("--vllm-env", type=Path, help="vLLM's environment; implies --vllm")
    parser.add_argument("--vllm-set", nargs="*", default=[], metavar="NAME=VALUE", help="arguments of vLLM; implies it")
    parser.add_argument("--temperature", type=float, default=1.0)
    options = parser.parse_args(argv)
    work = replace(make_workload(options, num_steps=options.rounds + 1), temperature=options.temperature)
    report = Report("Rollout on identical work")
    with ExitStack() as stack:
        logs = options.logs or Path(stack.enter_context(tempfile.TemporaryDirectory(prefix="rollout-")))
        peers = start(stack, options, work, logs)
        generations = alternate(peers, work, options.rounds, options.limit_s)
        report.facts = {"workload": describe(work), **{peer.name: peer.facts for peer in peers}}
        fill(report, work, generations)
        idle = {peer.name: peer.idle_share for peer in peers}
        gaps = {p.name: p.ask("log_prob_gap", options.limit_s)["log_prob_gap"] for p in peers[: 1 + len(options.forms)]}
    report.results |= {"idle_processor_share": idle, "log_prob_gap": gaps[OURS], "log_prob_gaps": gaps}
    report.notes.append("Processor time while another engine computed, share of one core: " + shares(idle) + ".")
    words = ", ".join(f"{name} {number(gap)}" for name, gap in gaps.items())
    report.notes.append(f"Sampled log-probs against the training forward, largest difference: {words}.")
    report.finish(options.json)
    return report


if __name__ == "__main__":
    main()
