"""Supervised fine-tuning, or DPO, of ours against TRL's trainer on the same rows, alternating, on a CPU.

    python benchmarks/peers/sft_cpu.py                                   # 16 rows a step, 40 to 600 tokens each, float32
    python benchmarks/peers/sft_cpu.py --trl shipped packed unpacked --json results.json
    python benchmarks/peers/sft_cpu.py --dpo --ours ref.precompute=False # 8 pairs a step, 128 and 64 tokens

Rounds are as in peers_cpu.py. The rows are worked answers of the counting-letters task, words of mixed length. Ours and TRL
without packing train on the same rows in each step, and their losses are compared; with packing TRL forms other batches of
the same rows, so only its speed is compared. Tokens of pairs count both completions with their prompts. By default our DPO
computes the reference's log-probabilities once, before its first step (`start_s` among its facts); so does TRL's `precomputed`.
"""

import argparse
import json
import random
import sys
import tempfile
from collections.abc import Iterable, Mapping
from contextlib import ExitStack
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

from peer import Peer, in_turns

from peers_cpu import MALLOC, OURS, TRLForm, Unequal, add_run_options, add_trl_options  # isort: skip
from peers_cpu import model_of, peak_bytes, shares, start_trl  # isort: skip
from report import Report, gigabytes, number, ratio, series_of
from workload import draw_pictures, make_prompts

MAX_LOSS_GAP = 1e-3  # relative, of a step's loss between the sides that train on the same rows
TRL_FORMS = {
    "shipped": TRLForm(8),  # SFTConfig's own defaults: micro-batches of 8 padded rows, activations recomputed
    "unpacked": TRLForm(4, {"gradient_checkpointing": False}, MALLOC),
    "packed": TRLForm(1, {"gradient_checkpointing": False, "packing": True, "max_length": 1024}, MALLOC, 1024),
}

DPO_FORMS = {
    "shipped": TRLForm(8),  # DPOConfig's own defaults: micro-batches of 8 pairs, activations recomputed, a second model
    "plain": TRLForm(4, {"gradient_checkpointing": False}, MALLOC),
    "precomputed": TRLForm(4, {"gradient_checkpointing": False, "precompute_ref_log_probs": True}, MALLOC),
}


def pairs_of(options: argparse.Namespace) -> list[dict[str, Any]]:
    """The pairs of all steps: words that are one token each."""
    model = model_of(options)
    from verl.models.load import load_tokenizer

    tokenizer, count = load_tokenizer(model), (options.rounds + 1) * options.rows
    completion = options.completion_tokens - 1
    lengths = {"prompt": options.prompt_tokens, "chosen": completion, "rejected": completion}
    columns = [make_prompts(tokenizer, count=count, num_tokens=n, seed=s) for s, n in enumerate(lengths.values())]
    return [dict(zip(lengths, row, strict=True)) for row in zip(*columns, strict=True)]


def rows_of(options: argparse.Namespace) -> list[dict[str, Any]]:
    """The rows of all steps, twice as many as ours takes, because packs may hold more rows than a step has."""
    from verl.data.tasks.char_count import row_of, sample_word

    rng, count = random.Random(17), 2 * (options.rounds + 1) * options.rows
    if options.images:
        rows = draw_pictures(count, 17)
    else:
        rows = [row_of(*sample_word(rng, *options.letters), "train", i) for i in range(count)]
    system = [{"role": "system", "content": "Count each letter. " * options.preamble}] if options.preamble else []
    pairs = [{"prompt": system + row["messages"][:1], "completion": row["messages"][1:]} for row in rows]
    media = [{"images": row["images"]} if options.images else {} for row in rows]
    return [pair | images for pair, images in zip(pairs, media, strict=True)]


def alternate(peers: list[Peer], rounds: int, limit_s: float) -> dict[str, list[dict[str, Any]]]:
    """The answers of each side to all steps, the warm-up first."""
    steps: dict[str, list[dict[str, Any]]] = {peer.name: [] for peer in peers}
    for round_number, answers in in_turns(peers, rounds, limit_s):
        for name, answer in answers.items():
            rate = answer["tokens_per_s"] = answer["num_tokens"] / answer["step_s"]
            print(f"round {round_number} {name}: {rate:.0f} tokens/s", file=sys.stderr, flush=True)
            if answer["weight_change"] == 0:
                raise Unequal(f"{name} did not change its weights in round {round_number}; see its log.")
            steps[name].append(answer)
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
    speed = {name: series_of(answers[1:], "tokens_per_s") for name, answers in steps.items()}
    faster = {name: ratio(speed[OURS], speed[name]) for name in speed}
    losses = {name: [answer["loss"] for answer in answers] for name, answers in steps.items()}
    peaks = {name: peak_bytes(answers) for name, answers in steps.items()}
    rows = [
        [name, speed[name].text(), f"{number(faster[name])}x", " ".join(f"{loss:.4f}" for loss in losses[name]),
         gigabytes(peaks[name])]
        for name in steps
    ]  # fmt: skip
    report.tables.append((["side", "tokens/s", f"{OURS} is", "losses", "peak memory"], rows))
    report.results = {
        "tokens_per_s": {name: series.to_json() for name, series in speed.items()},
        "times_faster": {name: times for name, times in faster.items() if name != OURS}, "losses": losses,
        "loss_gaps": check_equal(steps), "peak_rss_bytes": peaks, "idle_processor_share": idle,
    }  # fmt: skip
    report.notes.append("Processor time while another side computed, share of one core: " + shares(idle) + ".")


def compare(
    trainer: str, options: argparse.Namespace, forms: Mapping[str, TRLForm], rows: Iterable[dict[str, Any]]
) -> Report:
    """Steps of ours and of TRL's forms on `rows`, as a report. `trainer`: SFT or DPO."""
    report = Report(f"{trainer} step on the same {'pairs' if trainer == 'DPO' else 'rows'}")
    with ExitStack() as stack:
        logs = options.logs or Path(stack.enter_context(tempfile.TemporaryDirectory(prefix="rows-")))
        work = {
            "trainer": trainer, "model": str(model_of(options)), "dtype": options.dtype, "file": str(logs / "rows.jsonl"),
            "rows_per_step": options.rows, "num_steps": options.rounds + 1, "learning_rate": options.learning_rate,
        }  # fmt: skip
        logs.mkdir(parents=True, exist_ok=True)
        Path(work["file"]).write_text("".join(json.dumps(row) + "\n" for row in rows))
        ours = stack.enter_context(Peer(OURS, "child_verl.py", log=logs / "verl.log"))
        ours.build(options.limit_s, work=work, folder=str(logs / "verl"), overrides=options.ours)
        work["tokens_per_step"] = ours.facts["tokens_per_step"]
        names = dict.fromkeys(options.trl)
        peers = [ours, *(start_trl(stack, work, logs, options, name, forms[name], options.rows) for name in names)]
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
    is_dpo = "--dpo" in (sys.argv if argv is None else argv)
    forms = DPO_FORMS if is_dpo else TRL_FORMS
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    add_run_options(parser, learning_rate=2e-5)
    add_trl_options(parser, forms, list(forms))
    parser.add_argument("--dpo", action="store_true", help="pairs, by the DPO trainers")
    parser.add_argument("--rows", type=int, default=8 if is_dpo else 16, help="rows of an optimizer step")
    parser.add_argument("--prompt-tokens", type=int, default=128, help="of a pair")
    parser.add_argument("--completion-tokens", type=int, default=64, help="of a pair, with the end of sequence")
    parser.add_argument("--preamble", type=int, default=0, help="sentences of four tokens in each row's system prompt")
    parser.set_defaults(rounds=5)
    parser.add_argument("--images", action="store_true", help="a picture in each row, of 64 x 64 pixels")
    parser.add_argument("--letters", type=int, nargs=2, default=(4, 80), help="shortest and longest word of a row")
    options = parser.parse_args(argv)
    return compare("DPO" if is_dpo else "SFT", options, forms, (pairs_of if is_dpo else rows_of)(options))


if __name__ == "__main__":
    main()
