"""`python -m verl.experimental.one_step_off_policy.main_ppo` is `verl train` with one batch made ahead."""

from __future__ import annotations

import sys

from verl.compat.asynchronous import main_one_step_off

if __name__ == "__main__":
    raise SystemExit(main_one_step_off(sys.argv[1:]))
