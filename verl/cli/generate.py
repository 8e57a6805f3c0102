"""`verl generate`: write samples for the prompts of data.val_files."""

from __future__ import annotations

from pathlib import Path

from verl.cli.arguments import parse

ABOUT = "Sample from actor_rollout_ref.model.path for every prompt of data.val_files, as rollout.* says, with scores."


def run(argv: list[str]) -> int:
    output = {
        "required": True,
        "metavar": "FILE",
        "help": "JSON-lines file to write, one line a sample; or .parquet: the rows, each with its responses",
    }
    arguments = parse("generate", ABOUT, argv, {"--output": output})
    loaded = arguments.load()
    from verl.run.host import generate

    return generate(loaded, Path(arguments.options.output).expanduser())
