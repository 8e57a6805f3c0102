"""`python -m verl.trainer.main_eval key=value ...` is `verl eval key=value ...`."""

from __future__ import annotations

import sys

from verl.cli.main import run_verb

if __name__ == "__main__":
    raise SystemExit(run_verb("eval", sys.argv[1:]))
