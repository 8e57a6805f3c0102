"""`python -m verl.trainer.main_generation`: responses into `data.output_path`, or else `verl generate`."""

from __future__ import annotations

import sys

from verl.compat.generation import main_generation

if __name__ == "__main__":
    raise SystemExit(main_generation(sys.argv[1:]))
