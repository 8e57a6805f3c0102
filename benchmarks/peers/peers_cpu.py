"""One GRPO step of ours against TRL's on identical work, alternating, on a CPU.

    python benchmarks/peers/peers_cpu.py                          # 8 prompts x 8 samples, 64 + 64 tokens, float32
    python benchmarks/peers/peers_cpu.py --prompt-tokens 256 --trl shipped best --json results.json
    python benchmarks/peers/peers_cpu.py --images --model work/models/SmolLM2-135M-shapes   # of `make train CONFIG=sft_shapes`

Every side is a process that builds its trainer once, takes one step to warm up, and then one per round while the others
wait. A run is refused when a side got other prompts, made samples of another length, or did not change its weights.
"""

import argparse
import json
import os
import sys
import tempfile
from collections.abc import Mapping, Sequence
from contextlib import ExitStack
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

from peer import Peer, in_turns
from peer_env import ensure
from report import Report, Series, gigabytes, number, ratio, series_of
from workload import DEFAULT_MODEL, Workload, draw_pictures, make_prompts, prepare_model

# the last counts the step on a machine with other work, too
PHASES = ("generate_s", "train_s", "step_s", "processor_s")
OURS = "verl"

# glibc gives large temporaries back to the kernel and faults them in again; TRL trains a quarter faster without that
_TUNED = ("mmap_threshold=4294967295", "trim_threshold=8589934592", "hugetlb=1")
MALLOC = {"GLIBC_TUNABLES": ":".join(f"glibc.malloc.{setting}" for setting in _TUNED)}


@dataclass(frozen=True)
class TRLForm:
    """A way to run TRL: its micro-batch, settings of its config, and the process's environment. `pack_tokens` is the length of
    a pack; None: rows are padded to the longest of a micro-batch."""

    micro_batch: int
    settings: dict[str, Any] = field(default_factory=dict)
    environment: dict[str, str] = field(default_factory=dict)
    pack_tokens: int | None = None


TRL_FORMS = {
    "shipped": TRLForm(micro_batch=8),  # GRPOConfig's own defaults: micro-batches of 8, activations recomputed
    "best": TRLForm(16, {"gradient_checkpointing": False}, MALLOC),
}


class Unequal(RuntimeError):
    """The sides did not do the same work, so their times must not be compared."""


def parse(argv: list[str] | None = None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    add_workload_options(parser)
    add_trl_options(parser, TRL_FORMS, ["shipped"])
    parser.add_argument("--device", choices=("cpu", "cuda"), default="cpu", help="cuda: see benchmarks/gpu/report.py")
    parser.add_argument("--images", action="store_true", help="a picture in each prompt, of 64 x 64 pixels")
    return parser.parse_args(argv)


def add_run_options(parser: argparse.ArgumentParser, *, learning_rate: float = 1e-5) -> None:
    """Options of every comparison."""
    parser.add_argument("--model", type=Path, default=DEFAULT_MODEL, help="Hugging Face folder (default: SmolLM2-135M)")
    parser.add_argument("--dtype", choices=("float32", "bfloat16"), default="float32")
    parser.add_argument("--learning-rate", type=float, default=learning_rate)
    parser.add_argument("--limit-s", type=float, default=1800.0, help="longest wait for one step of one side")
    parser.add_argument("--logs", type=Path, help="folder for the processes' output (default: a temporary one)")
    parser.add_argument("--json", type=Path, metavar="FILE", help="write the results there too")
    parser.add_argument("--ours", nargs="*", default=[], metavar="KEY=VALUE", help="overrides of our config")
    parser.add_argument("--rounds", type=int, default=3, help="measured rounds of each side (after one to warm up)")


def add_workload_options(parser: argparse.ArgumentParser, *, response_tokens: int = 64) -> None:
    """Options of every script that runs the workload."""
    add_run_options(parser)
    parser.add_argument("--prompts", type=int, default=8)
    parser.add_argument("--samples", type=int, default=8, help="of each prompt")
    parser.add_argument("--prompt-tokens", type=int, default=64)
    parser.add_argument("--response-tokens", type=int, default=response_tokens)


def add_trl_options(parser: argparse.ArgumentParser, forms: Mapping[str, TRLForm], default: Sequence[str]) -> None:
    """Options that `start_trl` reads."""
    parser.add_argument("--trl", nargs="*", choices=sorted(forms), default=list(default), help="forms of TRL to run")
    parser.add_argument("--trl-env", type=Path, help="TRL's environment (made if absent; default under work/)")
    parser.add_argument("--same-python", action="store_true", help="TRL runs in this Python, which has it")
    parser.add_argument("--trl-micro-batch", type=int, help="samples in a micro-batch of every form of TRL")
    parser.add_argument("--trl-set", nargs="*", default=[], metavar="NAME=VALUE", help="settings of every form")


def model_of(options: argparse.Namespace) -> Path:
    """The model folder; the default model is converted if it is absent."""
    os.environ.setdefault("HF_HUB_OFFLINE", "1")
    from verl.cli.model_folders import run_convert

    return prepare_model(options.model, run_convert)


def make_workload(options: argparse.Namespace, num_steps: int) -> Workload:
    """The work of `num_steps` steps as the options say."""
    model = model_of(options)
    from verl.models.load import load_tokenizer

    count = num_steps * options.prompts
    prompts = make_prompts(load_tokenizer(model), count=count, num_tokens=options.prompt_tokens, seed=17)
    return Workload(
        str(model), options.dtype, options.prompts, options.samples, options.prompt_tokens, options.response_tokens,
        num_steps=num_steps, learning_rate=options.learning_rate, prompts=prompts,
    )  # fmt: skip


def start_verl(
    stack: ExitStack, work: Workload, logs: Path, limit_s: float, overrides: list[str], name: str = OURS
) -> Peer:
    """Our process, built."""
    ours = stack.enter_context(Peer(name, "child_verl.py", log=logs / f"{name}.log"))
    ours.build(limit_s, work=work.to_json(), folder=str(logs / name), overrides=overrides)
    return ours


def start_trl(
    stack: ExitStack, work: dict[str, Any], logs: Path, options: argparse.Namespace, name: str, form: TRLForm, rows: int
) -> Peer:
    """TRL's process in one of its forms, built; a step has `rows` rows."""
    python = None if options.same_python else ensure("trl", options.trl_env)
    environment = {"HF_HUB_OFFLINE": "1", "HF_DATASETS_CACHE": str(logs / "datasets"), **form.environment}
    peer = stack.enter_context(
        Peer(f"trl {name}", "child_trl.py", log=logs / f"trl-{name}.log", python=python, environment=environment)
    )
    settings = {**form.settings, **dict(typed(text) for text in options.trl_set)}
    if form.pack_tokens is not None:  # as many packs as hold about the tokens of our step
        settings["gradient_accumulation_steps"] = max(1, round(work["tokens_per_step"] / form.pack_tokens))
    micro_batch = min(options.trl_micro_batch or form.micro_batch, rows)
    folder = str(logs / f"trl-{name}")
    peer.build(options.limit_s, work=work, micro_batch=micro_batch, settings=settings, folder=folder)
    return peer


def typed(text: str) -> tuple[str, Any]:
    """ "beta=0.04" as ("beta", 0.04): JSON where it reads as JSON, else the text."""
    name, _, value = text.partition("=")
    try:
        return name, json.loads(value.lower() if value in ("True", "False") else value)
    except json.JSONDecodeError:
        return name, value


def alternate(peers: list[Peer], rounds: int, limit_s: float) -> dict[str, list[dict[str, Any]]]:
    """The answers of each side to its steps after the warm-up."""
    steps: dict[str, list[dict[str, Any]]] = {peer.name: [] for peer in peers}
    for number_of_round, answers in in_turns(peers, rounds, limit_s):
        check_equal(answers)
        for name, answer in answers.items():
            answer["processor_s"] = answer["cpu_s"] - answer["cpu_before_s"]
            print(f"round {number_of_round} {name}: {answer['step_s']:.2f} s", file=sys.stderr, flush=True)
            steps[name] += [answer] if number_of_round else []
    return steps


def check_equal(answers: dict[str, dict[str, Any]]) -> None:
    """Raise Unequal unless every side worked on the same prompts and made as many samples of one length, and moved."""
    names = ("num_sequences", "shortest", "longest", "prompts")
    kinds = {tuple(a[name] for name in names) for a in answers.values()}
    if len(kinds) > 1:
        raise Unequal(f"The sides did different work ({', '.join(names)}): {sorted(kinds)}.")
    still = [name for name, a in answers.items() if a["weight_change"] == 0]
    if still:
        raise Unequal(f"The weights of {', '.join(still)} did not change: that step trained nothing.")


def fill(report: Report, steps: dict[str, list[dict[str, Any]]], idle: dict[str, float]) -> None:
    """Times per phase with their ratios, then memory."""
    series = {name: {phase: series_of(rounds, phase) for phase in PHASES} for name, rounds in steps.items()}
    peers = [name for name in steps if name != OURS]
    rows = []
    for phase in PHASES:
        cells = [phase.removesuffix("_s"), series[OURS][phase].text("s")]
        for name in peers:
            cells += [series[name][phase].text("s"), f"{number(ratio(series[name][phase], series[OURS][phase]))}x"]
        rows.append(cells)
    peaks = {name: peak_bytes(rounds) for name, rounds in steps.items()}
    cells = ["peak memory", gigabytes(peaks[OURS])]
    for name in peers:
        cells += [gigabytes(peaks[name]), f"{number(peaks[name] / peaks[OURS])}x"]
    report.tables.append(
        (["phase", OURS, *(cell for name in peers for cell in (name, f"ratio to {OURS}"))], [*rows, cells])
    )
    report.results = {
        "phases": {name: {p: s.to_json() for p, s in phases.items()} for name, phases in series.items()},
        "ratios": {n: {p: ratio(series[n][p], series[OURS][p]) for p in PHASES} for n in peers},
        "peak_rss_bytes": peaks,
        "weight_change": {n: series_of(r, "weight_change").to_json() for n, r in steps.items()},
        "idle_processor_share": idle,
    }
    changes = ", ".join(f"{n} {number(Series(tuple(a['weight_change'] for a in r)).median)}" for n, r in steps.items())
    report.notes.append(f"Norm of the weight change of a step, sampled elements: {changes}.")
    report.notes.append("Processor time while another side computed, share of one core: " + shares(idle) + ".")


def peak_bytes(rounds: list[dict[str, Any]]) -> float:
    """Most resident memory of a side's process and its children, up to the last round."""
    return rounds[-1]["peak_rss_bytes"] + rounds[-1]["children_peak_rss_bytes"]


def shares(idle: dict[str, float]) -> str:
    return ", ".join(f"{name} {100 * share:.1f}%" for name, share in idle.items())


def main(argv: list[str] | None = None) -> Report:
    options = parse(argv)
    work = replace(make_workload(options, num_steps=options.rounds + 1), device=options.device)
    if options.images:
        work = replace(work, images=tuple(row["images"][0] for row in draw_pictures(len(work.prompts), work.seed)))
    report = Report("GRPO step on identical work")
    with ExitStack() as stack:
        logs = options.logs or Path(stack.enter_context(tempfile.TemporaryDirectory(prefix="peers-")))
        ours = start_verl(stack, work, logs, options.limit_s, options.ours)
        forms = {form: TRL_FORMS[form] for form in options.trl}
        trl = [start_trl(stack, work.to_json(), logs, options, *form, work.num_sequences) for form in forms.items()]
        peers = [ours, *trl]
        steps = alternate(peers, options.rounds, options.limit_s)
        gap = ours.ask("log_prob_gap", options.limit_s)["log_prob_gap"]
        report.facts = {"workload": describe(work), **{peer.name: peer.facts for peer in peers}}
        fill(report, steps, {peer.name: peer.idle_share for peer in peers})
    report.results["log_prob_gap"] = gap
    report.notes.append(f"Sampled log-probs against the training forward, largest difference: {number(gap)}.")
    report.finish(options.json)
    return report


def describe(work: Workload) -> str:
    """One line that says what every side did."""
    return (
        f"{Path(work.model).name} {work.dtype}, {work.num_prompts} prompts x {work.num_samples} samples, "
        f"{'a picture and ' if work.images else ''}{work.prompt_tokens} + {work.response_tokens} tokens, "
        f"one optimizer update, lr {work.learning_rate:g}"
    )


if __name__ == "__main__":
    main()
