"""Commands that make training data: `python -m verl.data.prepare {gsm8k,reasoning_gym,char_count,...} ...`."""

from __future__ import annotations

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
        epilog="`verl data preferences --help`: rows for verl dpo and verl rm, labelled by a judge.",
    )
    commands = parser.add_subparsers(dest="command", required=True)
    command = commands.add_parser("gsm8k", help="grade-school word problems from train.jsonl and test.jsonl")
    command.add_argument("--source", type=Path, required=True, help="folder with train.jsonl and test.jsonl")
    command.add_argument("--output", type=Path, required=True, help="folder to write to")
    command = commands.add_parser("reasoning_gym", help="generated questions, test questions held out")
    command.add_argument("--output", type=Path, required=True, help="folder to write to")
    command.add_argument(
        "--tasks", nargs="+", metavar="NAME[:JSON]", help="tasks with settings; default: small arithmetic"
    )
    _add_counts(command, train=400, test=100)
    command.add_argument(
        "--prompt",
        choices=("short", "plain"),
        default="short",
        help="short: ask for the final answer and nothing else; plain: the question alone (default %(default)s)",
    )
    command = commands.add_parser("char_count", help="letters of a word counted step by step, for SFT and for RL")
    command.add_argument("--output", type=Path, required=True, help="folder to write to")
    _add_counts(command, train=9000, test=1000)
    command.add_argument("--min-length", type=_count, default=5, help="letters of a word (default %(default)s)")
    command.add_argument("--max-length", type=_count, default=20, help="letters of a word (default %(default)s)")
    command = commands.add_parser("sentiment", help="pairs of rated sentences, for verl rm and verl dpo")
    command.add_argument("--source", type=Path, required=True, help="source archive of vaderSentiment 3.3.2 (.tar.gz)")
    command.add_argument("--output", type=Path, required=True, help="folder to write to")
    _add_counts(command, train=2000, test=200)
    command = commands.add_parser("shapes", help="questions about pictures, for SFT and for RL")
    command.add_argument(
        "--source", type=Path, required=True, help="wheel of scikit-learn, which has the digits (.whl)"
    )
    command.add_argument("--output", type=Path, required=True, help="folder to write to")
    _add_counts(command, train=4000, test=200)
    command = commands.add_parser("split", help="training and test files of your own rows, divided by prompt")
    command.add_argument("--source", type=Path, required=True, help="file of rows")
    command.add_argument("--output", type=Path, required=True, help="folder to write to")
    command.add_argument(
        "--test-share", type=_share, default=0.2, help="share of rows to hold out (default %(default)s)"
    )
    command.add_argument("--key", default="prompt", help="field of the prompt (default %(default)s)")
    command.add_argument("--chat", action="store_true", help="turn texts into messages, also Human: ... Assistant: ...")
    command.add_argument("--seed", type=int, default=1, help="seed of the choice (default %(default)s)")
    return parser


def _add_counts(command: argparse.ArgumentParser, *, train: int, test: int) -> None:
    command.add_argument("--train", type=_count, default=train, help="rows to train on (default %(default)s)")
    command.add_argument("--test", type=_count, default=test, help="rows to hold out (default %(default)s)")
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
    args = _parser().parse_args(argv)
    sys.stdout.write("\n".join(_PREPARE[args.command](args)) + "\n")
    return 0


def _reasoning_gym(args: argparse.Namespace) -> list[str]:
    tasks = dict(parse_task(text) for text in args.tasks) if args.tasks else reasoning_gym.DEFAULT_TASKS
    return reasoning_gym.prepare(
        args.output, tasks, num_train=args.train, num_test=args.test, seed=args.seed, style=args.prompt
    )


def _char_count(args: argparse.Namespace) -> list[str]:
    return char_count.prepare(
        args.output,
        num_train=args.train,
        num_test=args.test,
        min_length=args.min_length,
        max_length=args.max_length,
        seed=args.seed,
    )


_PREPARE: dict[str, Callable[[argparse.Namespace], list[str]]] = {
    "gsm8k": lambda args: gsm8k.prepare(args.source, args.output),
    "reasoning_gym": _reasoning_gym,
    "char_count": _char_count,
    "sentiment": lambda args: sentiment.prepare(
        args.source, args.output, num_train=args.train, num_test=args.test, seed=args.seed
    ),
    "shapes": lambda args: shapes.prepare(
        args.source, args.output, num_train=args.train, num_test=args.test, seed=args.seed
    ),
    "split": lambda args: split.prepare(
        args.source, args.output, share=args.test_share, key=args.key, seed=args.seed, chat=args.chat
    ),
}


if __name__ == "__main__":
    try:
        sys.exit(main())
    except VerlError as failure:
        sys.stderr.write(f"{failure}\n")
        sys.exit(failure.exit_code)
