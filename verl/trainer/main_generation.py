"""`python -m verl.trainer.main_generation key=value ...` is `verl generate key=value ...`."""

from __future__ import annotations

import sys

from verl.cli.main import run_verb

if __name__ == "__main__":
    raise SystemExit(run_verb("generate", sys.argv[1:]))
