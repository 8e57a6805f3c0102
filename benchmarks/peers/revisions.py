"""Steps of the main job by two revisions of verl, in turns: by how much did a change make a step slower?

    git worktree add ../verl-before 7e46003 && make -C ../verl-before venv
    python benchmarks/peers/revisions.py --before ../verl-before

Each revision is a process that builds the run once. A round is a step of each, and the first of the two changes with the round,
so that a slow minute of the machine counts for both. With a learning rate of 1e-30 both sample from the model's first weights:
responses of a round are equally long where the revisions sample alike, and other rounds are reported.

A process can be 5% slower than another one of the same revision for as long as it lives. So the processes start several times,
in changing order, and the standard error is of the starts.
"""

from __future__ import annotations

import argparse
import statistics
import sys
import tempfile
from contextlib import ExitStack
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

from peer import Peer, in_turns
from report import Report, number, series_of

LIMIT_S = 600.0
MEASURED = ("step_s", "generation_s", "update_s")


def parse(argv: list[str] | None = None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--before", type=Path, required=True, help="checkout of the older revision, with its .venv")
    parser.add_argument("--model", type=Path, default=Path("work/models/SmolLM2-135M-Instruct"))
    parser.add_argument("--data", type=Path, default=Path("work/data/arithmetic/train.parquet"))
    parser.add_argument("--config", default="grpo_smollm2", help="of examples/configs")
    parser.add_argument("--starts", type=int, default=4, help="starts of both processes, two at least")
    parser.add_argument("--rounds", type=int, default=4, help="measured steps of each process (after one to warm up)")
    parser.add_argument("--set", nargs="*", default=[], metavar="KEY=VALUE", help="further overrides of both sides")
    parser.add_argument("--json", type=Path, metavar="FILE", help="write the figures there too")
    return parser.parse_args(argv)


def overrides(options: argparse.Namespace, folder: Path) -> list[str]:
    """Keys of a run without validation and checkpoints, whose weights do not move."""
    return [
        f"actor_rollout_ref.model.path={options.model.resolve()}",
        f"data.train_files={options.data.resolve()}",
        "data.val_files=[]",
        f"trainer.total_training_steps={options.rounds + 1}",
        "actor_rollout_ref.actor.optim.lr=1e-30",
        *("trainer.test_freq=-1", "trainer.save_freq=-1", "trainer.val_before_train=False"),
        *("trainer.resume_mode=disable", "trainer.logger=[file]", f"trainer.default_local_dir={folder}"),
        *options.set,
    ]


def measured(
    options: argparse.Namespace, folder: Path, order: list[str]
) -> tuple[list[dict[str, Any]], dict[str, Any]]:
    """The rounds of processes that start in `order`; and where each side's verl is."""
    pythons = {"before": (options.before / ".venv/bin/python").absolute(), "now": Path(sys.executable)}
    settings = {"HF_HUB_OFFLINE": "1", "OMP_WAIT_POLICY": "passive", "VERL_PAGE": "0"}
    folder.mkdir()
    with ExitStack() as stack:
        sides: dict[str, Peer] = {}
        for side in order:
            log = folder / f"{side}.log"
            peer = Peer(side, "child_verl.py", log=log, python=pythons[side], environment=settings)
            sides[side] = stack.enter_context(peer)
            peer.build(LIMIT_S, "build_run", config=options.config, overrides=overrides(options, folder / side))
        peers = [sides["before"], sides["now"]]
        rounds = [answers for _, answers in in_turns(peers, options.rounds, LIMIT_S, "step_of_run")]
    return rounds[1:], {side: peer.facts["package"] for side, peer in sides.items()}


def main(argv: list[str] | None = None) -> int:
    options = parse(argv)
    starts: list[list[dict[str, Any]]] = []
    with tempfile.TemporaryDirectory(prefix="verl-revisions-") as name:
        for start in range(max(2, options.starts)):
            order = ["before", "now"] if start % 2 == 0 else ["now", "before"]
            rounds, packages = measured(options, Path(name) / str(start), order)
            starts.append([r for r in rounds if r["before"]["response_tokens"] == r["now"]["response_tokens"]])
    equal = [r for rounds in starts for r in rounds]
    facts = {"rounds": len(starts) * options.rounds, "rounds of equal samples": len(equal), **packages}
    report, rows = Report("Seconds of a step by two revisions", facts), []
    for quantity in MEASURED:
        by_start = [[r["now"][quantity] / r["before"][quantity] for r in rounds] for rounds in starts if rounds]
        ratios, means = [ratio for part in by_start for ratio in part], [statistics.mean(part) for part in by_start]
        error = statistics.stdev(means) / len(means) ** 0.5
        columns = [series_of([r[side] for r in equal], quantity) for side in ("before", "now")]
        mean = f"{statistics.mean(means):.3f} ± {error:.3f}"
        rows.append([quantity, *(number(c.median) for c in columns), f"{statistics.median(ratios):.3f}", mean])
        report.results[quantity] = {"ratios": ratios, "before": columns[0].to_json(), "now": columns[1].to_json()}
    report.tables.append((["seconds", "before", "now", "median of now/before", "mean and its standard error"], rows))
    report.finish(options.json)
    return 0


if __name__ == "__main__":
    raise SystemExit(main())
