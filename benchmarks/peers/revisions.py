"""Steps of the main job by two revisions of verl, in turns: by how much did a change make a step slower?

    git worktree add ../verl-before 7e46003 && make -C ../verl-before venv
    python benchmarks/peers/revisions.py --before ../verl-before --rounds 17

Each revision is a process that builds the run once. A round is a step of each, and the first of the two changes with the round,
so that a slow minute of the machine counts for both. With a learning rate of 1e-30 both sample from the model's first weights:
responses of a round are equally long where the revisions sample alike, and other rounds are reported.
"""

from __future__ import annotations

import argparse
import statistics
import sys
import tempfile
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

from peer import Peer
from report import Report, number, series_of

LIMIT_S = 600.0
MEASURED = ("step_s", "generation_s", "update_s")


def parse(argv: list[str] | None = None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--before", type=Path, required=True, help="checkout of the older revision, with its .venv")
    parser.add_argument("--model", type=Path, default=Path("work/models/SmolLM2-135M-Instruct"))
    parser.add_argument("--data", type=Path, default=Path("work/data/arithmetic/train.parquet"))
    parser.add_argument("--config", default="grpo_smollm2", help="of examples/configs")
    parser.add_argument("--rounds", type=int, default=17, help="measured steps of each side (after one to warm up)")
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


def main(argv: list[str] | None = None) -> int:
    options = parse(argv)
    pythons = {"before": (options.before / ".venv/bin/python").absolute(), "now": Path(sys.executable)}
    sides: dict[str, Peer] = {}
    with tempfile.TemporaryDirectory(prefix="verl-revisions-") as name:
        try:
            for side, python in pythons.items():
                log = Path(name) / f"{side}.log"
                settings = {"HF_HUB_OFFLINE": "1", "OMP_WAIT_POLICY": "passive", "VERL_PAGE": "0"}
                sides[side] = Peer(side, "child_step.py", log=log, python=python, environment=settings)
                keys = overrides(options, Path(name) / side)
                sides[side].build(LIMIT_S, config=options.config, overrides=keys)
            rounds = [
                {side: sides[side].ask("step", LIMIT_S) for side in sorted(sides, reverse=bool(turn % 2))}
                for turn in range(options.rounds + 1)
            ][1:]
        finally:
            for peer in sides.values():
                peer.close()
    equal = [r for r in rounds if r["before"]["response_tokens"] == r["now"]["response_tokens"]]
    report = Report(
        "Seconds of a step by two revisions", {"rounds": len(rounds), "rounds of equal samples": len(equal)}
    )
    report.facts |= {side: peer.facts["package"] for side, peer in sides.items()}
    rows = []
    for quantity in MEASURED:
        ratios = [r["now"][quantity] / r["before"][quantity] for r in equal]
        error = statistics.stdev(ratios) / len(ratios) ** 0.5
        columns = [series_of([r[side] for r in equal], quantity) for side in ("before", "now")]
        mean = f"{statistics.mean(ratios):.3f} ± {error:.3f}"
        rows.append([quantity, *(number(c.median) for c in columns), f"{statistics.median(ratios):.3f}", mean])
        report.results[quantity] = {"ratios": ratios, "before": columns[0].to_json(), "now": columns[1].to_json()}
    report.add_table(["seconds", "before", "now", "median of now/before", "mean and its standard error"], rows)
    report.finish(options.json)
    return 0


if __name__ == "__main__":
    raise SystemExit(main())
