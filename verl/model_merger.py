"""Door: `python -m verl.model_merger merge --local_dir RUN/global_step_N/actor --target_dir OUT` is `verl export`."""

from __future__ import annotations

import sys

from verl.cli.main import run_verb


def main(argv: list[str]) -> int:
    """Exit code of the older command; see verl/cli/merge.py."""
    return run_verb("merge", argv)


if __name__ == "__main__":
    raise SystemExit(main(sys.argv[1:]))
