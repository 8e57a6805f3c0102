"""`verl data`: tasks that are made on this machine (verl/data/prepare.py), rows of an environment, and preferences that a judge
labels."""

import argparse
from pathlib import Path

from verl.cli.parser import Parser
from verl.families import DEFAULT_ROLLOUT, engines_with

_ABOUT = (
    "Ask a judge which of the responses to a prompt is better, and write rows for verl dpo and verl rm. The judge sees "
    "each pair in both orders, so a judge that prefers the first response decides nothing."
)


def run_data(argv: list[str]) -> int:
    """Make a data set: the exit code."""
    if argv[:1] == ["preferences"]:
        options = _parser().parse_args(argv[1:])
        from verl.programs.label import label

        print("\n".join(label(options)))
        return 0
    if argv[:1] == ["verifiers"]:
        options = _environment_parser().parse_args(argv[1:])
        from verl.agents.verifiers import prepare

        print("\n".join(prepare(options.name, options.output, options.train, options.test)))
        return 0
    from verl.data.prepare import main

    return main(argv)


def _environment_parser() -> argparse.ArgumentParser:
    about = (
        "Write a row for each task of an environment of the package verifiers, for agent.environment=verifiers:NAME."
    )
    parser = Parser(prog="verl data verifiers", description=about)
    parser.add_argument("name", help="installed environment, or a .toml file of one")
    parser.add_argument("--output", type=Path, required=True, help="folder to write train.parquet and test.parquet to")
    parser.add_argument("--train", type=int, default=1000, help="tasks to train on, at most (default %(default)s)")
    parser.add_argument("--test", type=int, default=100, help="tasks to hold out, at most (default %(default)s)")
    return parser


def _parser() -> argparse.ArgumentParser:
    parser = Parser(prog="verl data preferences", description=_ABOUT)
    parser.add_argument(
        "--input",
        required=True,
        help="rows with a prompt and its responses, as verl generate --output FILE.parquet writes them",
    )
    parser.add_argument("--output", required=True, help="file of preferences to write: .jsonl or .parquet")
    parser.add_argument(
        "--judge", required=True, help="folder or hub name of a model, or http(s)://... of a chat service"
    )
    parser.add_argument("--model", help="name under which the service serves the judge (default: its only one)")
    parser.add_argument(
        "--engine",
        choices=engines_with(lambda facts: not facts.asks_service),
        default=DEFAULT_ROLLOUT,
        help="engine of a local judge (default %(default)s)",
    )
    parser.add_argument("--dtype", default="auto", help="compute dtype of a local judge (default %(default)s)")
    parser.add_argument(
        "--pairs",
        choices=("best_worst", "first_last", "all"),
        default="best_worst",
        help="rows of a prompt with several responses (default %(default)s)",
    )
    parser.add_argument(
        "--rubric", metavar="FILE", help="YAML list of {name, question, weight}: grade instead of compare"
    )
    parser.add_argument(
        "--template",
        metavar="FILE",
        help="the question: {prompt}, {first}, {second}; for a rubric {response}, {criterion}",
    )
    parser.add_argument("--cache", metavar="FILE", help="keep the judge's replies here, and ask no question again")
    parser.add_argument("--max-reply-tokens", type=int, default=512, help="longest reply (default %(default)s)")
    parser.add_argument("--prompt-key", default="prompt", help="field of the prompt (default %(default)s)")
    parser.add_argument("--responses-key", default="responses", help="field of the responses (default %(default)s)")
    return parser
