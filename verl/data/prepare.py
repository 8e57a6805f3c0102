"""Commands that make training data: `python -m verl.data.prepare {gsm8k,reasoning_gym,char_count,...} ...`."""

import argparse
import sys
from collections.abc import Callable, Sequence
from pathlib import Path

from verl.data.tables import parse_json
from verl.data.tasks import char_count, gsm8k, reasoning_gym, sentiment, shapes, split
from verl.errors import DataError, VerlError
from verl.foreign_text import clean


def parse_task(text: str) -> tuple[str, dict[str, object]]:
    """`name` or `name:{json settings}`. Raises DataError when the settings are not a JSON object."""
    name, _, settings = text.partition(":")
    try:
        parsed = parse_json(settings) if settings else {}
    except ValueError as error:
        raise DataError(
            f"--tasks {clean(text)}: the settings after ':' are not valid JSON ({clean(error)})."
        ) from error
    if not isinstance(parsed, dict):
        raise DataError(f"--tasks {clean(text)}: the settings after ':' must be a JSON object.")
    return name, parsed


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(
        prog="verl data",
        description="Make train.parquet and test.parquet of a task.",
        epilog="`verl data preferences --help`: rows for verl dpo and verl rm, labelled by a judge. `verl data verifiers "
        "--help`: rows of an environment.",
    )
    commands = parser.add_subparsers(dest="command", required=True)

    def command(prepare: Callable[..., list[str]], description: str, source: str = "") -> argparse.ArgumentParser:
        added = commands.add_parser(prepare.__module__.rpartition(".")[2], help=description)
        if source:
            added.add_argument("--source", type=Path, required=True, help=source)
        added.add_argument("--output", type=Path, required=True, help="folder to write to")
        added.set_defaults(prepare=prepare)
        return added

    command(
        gsm8k.prepare,
        "grade-school word problems from train.jsonl and test.jsonl",
        "folder with train.jsonl and test.jsonl",
    )
    task = command(reasoning_gym.prepare, "generated questions, test questions held out")
    task.add_argument(
        "--tasks", nargs="+", metavar="NAME[:JSON]", help="tasks with settings; default: small arithmetic"
    )
    _add_counts(task, train=400, test=100)
    styles = "short: ask for the final answer and nothing else; plain: the question alone (default %(default)s)"
    task.add_argument("--prompt", dest="style", choices=("short", "plain"), default="short", help=styles)
    task = command(char_count.prepare, "letters of a word counted step by step, for SFT and for RL")
    _add_counts(task, train=9000, test=1000)
    for name, default in (("--min-length", 5), ("--max-length", 20)):
        task.add_argument(name, type=_count, default=default, help="letters of a word (default %(default)s)")
    wheel = "wheel of scikit-learn, which has the digits (.whl)"
    archive = "source archive of vaderSentiment 3.3.2 (.tar.gz)"
    _add_counts(command(sentiment.prepare, "pairs of rated sentences, for verl rm and verl dpo", archive), 2000, 200)
    _add_counts(command(shapes.prepare, "questions about pictures, for SFT and for RL", wheel), train=4000, test=200)
    task = command(split.prepare, "training and test files of your own rows, divided by prompt", "file of rows")
    task.add_argument(
        "--test-share", dest="share", type=_share, default=0.2, help="share of rows to hold out (default %(default)s)"
    )
    task.add_argument("--key", default="prompt", help="field of the prompt (default %(default)s)")
    task.add_argument("--chat", action="store_true", help="turn texts into messages, also Human: ... Assistant: ...")
    task.add_argument("--seed", type=int, default=1, help="seed of the choice (default %(default)s)")
    return parser


def _add_counts(command: argparse.ArgumentParser, train: int, test: int) -> None:
    counts = (("--train", "num_train", train, "train on"), ("--test", "num_test", test, "hold out"))
    for name, dest, default, use in counts:
        command.add_argument(
            name,
            dest=dest,
            type=_count,
            default=default,
            metavar=name[2:].upper(),
            help=f"rows to {use} (default {default})",
        )
    command.add_argument("--seed", type=int, default=1, help="seed of the questions (default %(default)s)")


def _count(text: str) -> int:
    number = int(text)
    if number < 1:
        raise argparse.ArgumentTypeError(f"{number} rows cannot be made; give at least 1")
    return number


def _share(text: str) -> float:
    number = float(text)
    if not 0 < number < 1:
        raise argparse.ArgumentTypeError(f"{number} is no share of rows; give one between 0 and 1")
    return number


def main(argv: Sequence[str] | None = None) -> int:
    """Run one command and write one line per file to stdout; returns 0. Raises VerlError, or SystemExit for wrong usage."""
    args = vars(_parser().parse_args(argv))
    del args["command"]
    if "tasks" in args:
        args["tasks"] = dict(map(parse_task, args["tasks"])) if args["tasks"] else reasoning_gym.DEFAULT_TASKS
    sys.stdout.write("\n".join(args.pop("prepare")(**args)) + "\n")
    return 0


if __name__ == "__main__":
    try:
        sys.exit(main())
    except VerlError as failure:
        sys.stderr.write(f"{failure}\n")
        sys.exit(failure.exit_code)
