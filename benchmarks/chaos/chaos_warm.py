"""`verl train` whose supervisor has imported everything beforehand, so that a restart takes a second.

python benchmarks/chaos/chaos_warm.py key=value ...
"""

from __future__ import annotations

import sys

from verl.cli.main import run_verb

if __name__ == "__main__":
    raise SystemExit(run_verb("train", sys.argv[1:], whole_process=True))
