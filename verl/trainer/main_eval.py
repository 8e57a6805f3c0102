"""`python -m verl.trainer.main_eval`: scores the responses in `data.path`, or else is `verl eval`."""

from __future__ import annotations

import sys

from verl.compat.evaluation import main_eval

if __name__ == "__main__":
    raise SystemExit(main_eval(sys.argv[1:]))
