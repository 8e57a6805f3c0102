"""Commands that make training data: `python -m verl.data.prepare {gsm8k,reasoning_gym} --output DIR ...`."""

from __future__ import annotations

import argparse
import json
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from verl.data.tasks import gsm8k, reasoning_gym
from verl.errors import DataError, VerlError


def parse_task(text: str) -> tuple[str, dict[str, Any]]:
    """`name` or `name:{json settings}`. Raises DataError when the settings are not a JSON object."""
    name, _, settings = text.partition(":")
    try:
        found = json.loads(settings) if settings else {}
    except json.JSONDecodeError as error:
        raise DataError(f"--tasks {text}: the settings after ':' are not valid JSON ({error}).") from error
    if not isinstance(found, dict):
        raise DataError(f"--tasks {text}: the settings after ':' must be a JSON object.")
    return name, found


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(prog="verl data", description="Make train.parquet and test.parquet of a task.")
    commands = parser.add_subparsers(dest="command", required=True)
    command = commands.add_parser("gsm8k", help="grade-school word problems from train.jsonl and test.jsonl")
    command.add_argument("--source", type=Path, required=True, help="folder with train.jsonl and test.jsonl")
    command.add_argument("--output", type=Path, required=True, help="folder to write to")
    command = commands.add_parser("reasoning_gym", help="generated questions, test questions held out")
    command.add_argument("--output", type=Path, required=True, help="folder to write to")
    command.add_argument(
        "--tasks", nargs="+", metavar="NAME[:JSON]", help="tasks with settings; default: small arithmetic"
    )
    command.add_argument("--train", type=_count, default=400, help="rows to train on (default %(default)s)")
    command.add_argument("--test", type=_count, default=100, help="rows to hold out (default %(default)s)")
    command.add_argument("--seed", type=int, default=1, help="seed of the questions (default %(default)s)")
    command.add_argument(
        "--prompt",
        choices=("short", "plain"),
        default="short",
        help="short: ask for the final answer and nothing else; plain: the question alone (default %(default)s)",
    )
    return parser


def _count(text: str) -> int:
    number = int(text)
    if number < 1:
        raise argparse.ArgumentTypeError(f"{number} rows cannot be made; give at least 1")
    return number


def main(argv: Sequence[str] | None = None) -> int:
    """Run one command and write what was made to stdout; returns 0. Raises VerlError, or SystemExit for wrong usage."""
    args = _parser().parse_args(argv)
    if args.command == "gsm8k":
        said = gsm8k.prepare(args.source, args.output)
    else:
        tasks = dict(parse_task(text) for text in args.tasks) if args.tasks else reasoning_gym.DEFAULT_TASKS
        said = reasoning_gym.prepare(
            args.output, tasks, num_train=args.train, num_test=args.test, seed=args.seed, style=args.prompt
        )
    sys.stdout.write("\n".join(said) + "\n")
    return 0


if __name__ == "__main__":
    try:
        sys.exit(main())
    except VerlError as failure:
        sys.stderr.write(f"{failure}\n")
        sys.exit(failure.exit_code)
