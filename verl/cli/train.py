"""`verl train`: train a policy; with --dry-run, check everything and stop."""

from __future__ import annotations

import os
from dataclasses import replace
from pathlib import Path

from verl.cli.arguments import parse
from verl.config import LoadedConfig
from verl.parallel.child_processes import die_with

ABOUT = "Train a policy with PPO, GRPO or their kin. Run the same command again to go on after an interruption."


def run(argv: list[str], *, supervised: bool = False) -> int:
    """Train here, or as a child of this process, which starts it again after a crash."""
    dry_run = {"action": "store_true", "help": "check everything that can be known, then stop"}
    arguments = parse("train", ABOUT, argv, {"--dry-run": dry_run})
    if arguments.options.dry_run:
        from verl.cli.check import check

        return check(arguments)
    loaded = arguments.load()
    trainer = loaded.config.trainer
    if "TORCHELASTIC_RUN_ID" in os.environ:
        die_with(os.getppid())  # torchrun watches its ranks and starts them again; it must not leave them behind
    elif supervised and "RANK" not in os.environ and trainer.max_restarts and not trainer.val_only:
        from verl.cli.supervise import supervise

        folder = Path(trainer.default_local_dir).expanduser()
        return supervise(lambda saved: _train(_going_on(loaded, saved)), folder, trainer)
    return _train(loaded)


def run_process(argv: list[str]) -> int:
    """What the command `verl train` does, as opposed to a call from Python."""
    return run(argv, supervised=True)


def _train(loaded: LoadedConfig) -> int:
    from verl.run.host import train

    return train(loaded)


def _going_on(loaded: LoadedConfig, saved: Path | None) -> LoadedConfig:
    """The config of a restart: a run that was told to start afresh, or from a given checkpoint, goes on from its own newest."""
    config = loaded.config
    if saved is None or config.trainer.resume_mode == "auto":
        return loaded
    trainer = replace(config.trainer, resume_mode="resume_path", resume_from_path=str(saved.absolute()))
    return replace(loaded, config=replace(config, trainer=trainer))
