"""`verl eval`: validate a model on data.val_files and print its metrics."""

from __future__ import annotations

from verl.cli.arguments import parse

ABOUT = "Validate actor_rollout_ref.model.path on data.val_files; metrics go to trainer.default_local_dir/eval."


def run(argv: list[str]) -> int:
    loaded = parse("eval", ABOUT, argv).load()
    from verl.run.host import evaluate

    return evaluate(loaded)
