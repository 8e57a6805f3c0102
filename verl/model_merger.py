"""Door: `python -m verl.model_merger merge --local_dir RUN/global_step_N/actor --target_dir OUT` is `verl export`.

Nothing is merged: a checkpoint holds its model as a Hugging Face folder already.
"""

from __future__ import annotations

import itertools
import sys
from pathlib import Path

from verl.cli.main import run_verb


def main(argv: list[str]) -> int:
    """Exit code of `verl export` for the arguments of the older command; those that it does not need are passed over."""
    given = dict(itertools.pairwise(argv))
    if "--local_dir" not in given or "--target_dir" not in given:
        return run_verb("export", [])  # which says what it needs
    folder = Path(given["--local_dir"])
    folder = folder.parent if folder.name == "huggingface" else folder
    checkpoint, role = (folder.parent, folder.name) if folder.name in ("actor", "critic") else (folder, "actor")
    return run_verb("export", [str(checkpoint), given["--target_dir"], "--role", role])


if __name__ == "__main__":
    raise SystemExit(main(sys.argv[1:]))
