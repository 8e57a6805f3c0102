"""`verl train`: train a policy; with --dry-run, check everything and stop."""

from __future__ import annotations

from verl.cli.arguments import parse

ABOUT = "Train a policy with PPO, GRPO or their kin. Run the same command again to go on after an interruption."


def run(argv: list[str]) -> int:
    dry_run = {"action": "store_true", "help": "check everything that can be known, then stop"}
    arguments = parse("train", ABOUT, argv, {"--dry-run": dry_run})
    if arguments.options.dry_run:
        from verl.cli.check import check

        return check(arguments)
    loaded = arguments.load()
    from verl.trainer.run import train

    return train(loaded)
