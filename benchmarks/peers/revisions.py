"""Steps of the main job by two revisions of verl, in turns: by how much did a change make a step slower?

    git worktree add ../verl-before 7e46003 && make -C ../verl-before venv
    python benchmarks/peers/revisions.py --before ../verl-before

With a learning rate of 1e-30 both sample from the model's first weights: responses of a round are equally long where the
revisions sample alike. Starts and rounds are as in ranks_cpu.py.
"""

import argparse
import sys
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

from ranks_cpu import Ranks, add_options, compare
from report import Report


def main(argv: list[str] | None = None) -> Report:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--before", type=Path, required=True, help="checkout of the older revision, with its .venv")
    parser.add_argument("--model", type=Path, default=Path("work/models/SmolLM2-135M-Instruct"))
    parser.add_argument("--data", type=Path, default=Path("work/data/arithmetic/train.parquet"))
    add_options(parser, starts=4)
    options = parser.parse_args(argv)
    keys = [f"actor_rollout_ref.model.path={options.model.resolve()}", f"data.train_files={options.data.resolve()}"]
    keys += ["data.val_files=[]", "actor_rollout_ref.actor.optim.lr=1e-30", *options.set]
    pythons = {"before": (options.before / ".venv/bin/python").absolute(), "now": Path(sys.executable)}

    def start(name: str, folder: Path) -> Ranks:
        return Ranks(name, 1, folder, options.rounds, "build_run", keys, config=options.config, python=pythons[name])

    report = Report("Seconds of a step by two revisions")
    return compare(options, report, start, ("before", "now"), ("step_s", "generation_s", "update_s"))


if __name__ == "__main__":
    main()
