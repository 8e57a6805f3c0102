"""`verl generate`: write samples for the prompts of data.val_files."""

from __future__ import annotations

from pathlib import Path

from verl.cli.arguments import parse

ABOUT = "Sample from actor_rollout_ref.model.path for every prompt of data.val_files, as rollout.* says, with scores."


def run(argv: list[str]) -> int:
    output = ("--output", {"required": True, "help": "JSON-lines file to write, one line a sample"})
    arguments = parse("generate", ABOUT, argv, options=(output,))
    loaded = arguments.load()
    from verl.trainer.run import generate

    return generate(loaded, Path(arguments.options.output).expanduser())
