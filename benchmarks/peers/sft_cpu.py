"""Supervised fine-tuning of ours against TRL's SFTTrainer on the same rows, alternating, on a CPU.

    python benchmarks/peers/sft_cpu.py                                   # 16 rows a step, 40 to 600 tokens each, float32
    python benchmarks/peers/sft_cpu.py --trl shipped packed unpacked --json results.json

Every side is a process that builds its trainer once, takes one step to warm up, and then one per round while the others
wait. The rows are worked answers of the counting-letters task, words of mixed length. Ours and TRL without packing train
on the same rows in each step, and their losses are compared; with packing TRL forms other batches of the same rows, so
only its speed is compared.
"""

from __future__ import annotations

import argparse
import json
import os
import random
import sys
import tempfile
from collections.abc import Callable, Mapping
from contextlib import ExitStack
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

from peer import Peer
from peer_env import default_folder, ensure, python_of
from peers_cpu import OURS, TUNED_MALLOC, Unequal, add_run_options, peak_bytes, shares
from report import Report, gigabytes, number, ratio, series_of
from workload import draw_pictures, prepare_model

MAX_LOSS_GAP = 1e-3  # relative, of a step's loss between the sides that train on the same rows


@dataclass(frozen=True)
class TRLForm:
    """One way to run TRL. `pack_tokens` is the length of a pack; None: rows are padded to the longest of a micro-batch."""

    micro_batch: int
    pack_tokens: int | None = None
    settings: dict[str, Any] = field(default_factory=dict)
    environment: dict[str, str] = field(default_factory=dict)


MALLOC = {"GLIBC_TUNABLES": TUNED_MALLOC}
TRL_FORMS = {
    "shipped": TRLForm(8),  # SFTConfig's own defaults: micro-batches of 8 padded rows, activations recomputed
    "unpacked": TRLForm(4, None, {"gradient_checkpointing": False}, MALLOC),
    "packed": TRLForm(1, 1024, {"gradient_checkpointing": False, "packing": True, "max_length": 1024}, MALLOC),
}


def parse(argv: list[str] | None = None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    add_common_arguments(parser, TRL_FORMS, rows=16)
    parser.add_argument("--images", action="store_true", help="a picture in each row, of 64 x 64 pixels")
    parser.add_argument("--letters", type=int, nargs=2, default=(4, 80), help="shortest and longest word of a row")
    return parser.parse_args(argv)


def add_common_arguments(parser: argparse.ArgumentParser, forms: Mapping[str, TRLForm], *, rows: int) -> None:
    """The arguments that `compare` reads."""
    add_run_options(parser, learning_rate=2e-5)
    parser.add_argument("--rows", type=int, default=rows, help="rows of an optimizer step")
    parser.add_argument("--rounds", type=int, default=5, help="measured steps of each side (after one to warm up)")
    parser.add_argument("--trl", nargs="*", choices=sorted(forms), default=list(forms))
    parser.add_argument("--trl-env", type=Path, help="TRL's environment (made if absent; default under work/)")
    parser.add_argument("--ours", nargs="*", default=[], metavar="KEY=VALUE", help="overrides of our config")


def make_work(options: argparse.Namespace, folder: Path) -> dict[str, Any]:
    """The rows of all steps in a file, twice as many as ours takes, because packs may hold more rows than a step has."""
    os.environ.setdefault("HF_HUB_OFFLINE", "1")
    from verl.cli.model_folders import run_convert as convert
    from verl.data.tasks.char_count import row_of, sample_word

    rng, num_steps = random.Random(17), options.rounds + 1
    count = 2 * num_steps * options.rows
    rows = (
        draw_pictures(count, 17)
        if options.images
        else [row_of(*sample_word(rng, *options.letters), "train", i) for i in range(count)]
    )
    file = folder / "rows.jsonl"
    images = ["images"] if options.images else []
    pairs = [
        {"prompt": row["messages"][:1], "completion": row["messages"][1:], **{n: row[n] for n in images}}
        for row in rows
    ]
    file.parent.mkdir(parents=True, exist_ok=True)
    file.write_text("".join(json.dumps(pair) + "\n" for pair in pairs))
    return {
        "trainer": "SFT",
        "model": str(prepare_model(options.model, convert)),
        "dtype": options.dtype,
        "file": str(file),
        "rows_per_step": options.rows,
        "num_steps": num_steps,
        "learning_rate": options.learning_rate,
    }


def start_trl(
    stack: ExitStack, work: dict[str, Any], logs: Path, options: argparse.Namespace, form: str, chosen: TRLForm
) -> Peer:
    """TRL's process in one of its forms, built."""
    peer = stack.enter_context(
        Peer(
            f"trl {form}",
            "child_trl_rows.py",
            log=logs / f"trl-{form}.log",
            python=python_of(options.trl_env or default_folder("trl")),
            environment={"HF_HUB_OFFLINE": "1", "HF_DATASETS_CACHE": str(logs / "datasets"), **chosen.environment},
        )
    )
    settings = dict(chosen.settings)
    if chosen.pack_tokens is not None:  # as many packs as hold about the tokens of our step
        settings["gradient_accumulation_steps"] = max(1, round(work["tokens_per_step"] / chosen.pack_tokens))
    peer.build(
        options.limit_s,
        work=work,
        micro_batch=min(chosen.micro_batch, options.rows),
        settings=settings,
        folder=str(logs / f"trl-{form}"),
    )
    return peer


def alternate(peers: list[Peer], rounds: int, limit_s: float) -> dict[str, list[dict[str, Any]]]:
    """One step of each side to warm up, then `rounds` of each in turn; every other round in reverse order."""
    steps: dict[str, list[dict[str, Any]]] = {peer.name: [] for peer in peers}
    for round_number in range(rounds + 1):
        for peer in peers if round_number % 2 == 0 else peers[::-1]:
            answer = peer.ask("step", limit_s)
            answer["tokens_per_s"] = answer["num_tokens"] / answer["step_s"]
            print(
                f"round {round_number} {peer.name}: {answer['tokens_per_s']:.0f} tokens/s", file=sys.stderr, flush=True
            )
            if answer["weight_change"] == 0:
                raise Unequal(f"{peer.name} did not change its weights in round {round_number}; see its log.")
            steps[peer.name].append(answer)
    return steps


def check_equal(steps: dict[str, list[dict[str, Any]]]) -> dict[str, float]:
    """The largest relative difference of a step's loss to ours, by side. Raises Unequal when tokens or losses differ."""
    gaps = {}
    for name, answers in steps.items():
        if name == OURS or "packed" in name.split():
            continue
        pairs = list(zip(steps[OURS], answers, strict=True))
        if any(ours["num_tokens"] != theirs["num_tokens"] for ours, theirs in pairs):
            raise Unequal(f"{name} and {OURS} trained on different numbers of tokens.")
        gaps[name] = max(abs(theirs["loss"] / ours["loss"] - 1) for ours, theirs in pairs)
        if gaps[name] > MAX_LOSS_GAP:
            raise Unequal(f"The losses of {name} and {OURS} differ by {gaps[name]:.2g}, more than {MAX_LOSS_GAP:g}.")
    return gaps


def fill(report: Report, steps: dict[str, list[dict[str, Any]]], idle: dict[str, float]) -> None:
    """Tokens per second with ratios, losses, memory. The first step of each side is its warm-up."""
    measured = {name: answers[1:] for name, answers in steps.items()}
    speed = {name: series_of(answers, "tokens_per_s") for name, answers in measured.items()}
    faster = {name: ratio(speed[OURS], speed[name]) for name in speed}
    rows = [
        [
            name,
            speed[name].text(),
            f"{number(faster[name])}x",
            " ".join(f"{answer['loss']:.4f}" for answer in steps[name]),
            gigabytes(peak_bytes(steps[name])),
        ]
        for name in steps
    ]
    report.add_table(["side", "tokens/s", f"{OURS} is", "losses", "peak memory"], rows)
    report.results = {
        "tokens_per_s": {name: series.to_json() for name, series in speed.items()},
        "times_faster": {name: times for name, times in faster.items() if name != OURS},
        "losses": {name: [answer["loss"] for answer in answers] for name, answers in steps.items()},
        "loss_gaps": check_equal(steps),
        "peak_rss_bytes": {name: peak_bytes(answers) for name, answers in steps.items()},
        "idle_processor_share": idle,
    }
    report.notes.append("Processor time while another side computed, share of one core: " + shares(idle) + ".")


def compare(
    title: str,
    options: argparse.Namespace,
    forms: Mapping[str, TRLForm],
    make_work: Callable[[argparse.Namespace, Path], dict[str, Any]],
) -> Report:
    """Steps of ours and of TRL's forms on the work of `make_work`, as a report."""
    if options.trl:
        ensure("trl", options.trl_env)
    report = Report(title)
    with ExitStack() as stack:
        logs = options.logs or Path(stack.enter_context(tempfile.TemporaryDirectory(prefix="rows-")))
        work = make_work(options, logs)
        ours = stack.enter_context(Peer(OURS, "child_verl_rows.py", log=logs / "verl.log"))
        ours.build(options.limit_s, work=work, folder=str(logs / "verl"), overrides=options.ours)
        work["tokens_per_step"] = ours.facts["tokens_per_step"]
        chosen = dict.fromkeys(options.trl)
        peers = [ours, *(start_trl(stack, work, logs, options, form, forms[form]) for form in chosen)]
        steps = alternate(peers, options.rounds, options.limit_s)
        report.facts = {
            "workload": f"{Path(work['model']).name} {options.dtype}, {options.rows} rows a step, "
            f"{number(work['tokens_per_step'])} tokens on average",
            **{peer.name: peer.facts for peer in peers},
        }
        fill(report, steps, {peer.name: peer.idle_share for peer in peers})
    report.finish(options.json)
    return report


def main(argv: list[str] | None = None) -> Report:
    return compare("SFT step on the same rows", parse(argv), TRL_FORMS, make_work)


if __name__ == "__main__":
    main()
