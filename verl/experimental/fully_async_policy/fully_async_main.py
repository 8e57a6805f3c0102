"""`python -m verl.experimental.fully_async_policy.fully_async_main` is `verl train` with samples made ahead."""

from __future__ import annotations

import sys

from verl.compat.asynchronous import main_fully_async

if __name__ == "__main__":
    raise SystemExit(main_fully_async(sys.argv[1:]))
