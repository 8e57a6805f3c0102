"""Running code in the process that `verl train` makes of itself: its environment, its handling of errors."""

from __future__ import annotations

import sys
import types
from collections.abc import Callable

from verl.cli.main import run_verb

VERB = "measured"


def as_verb(function: Callable[[], object]) -> int:
    """Call `function` as the command line calls a verb; returns the exit code.

    What the command line sets must be set before torch is imported, so `function` imports it, not its file.
    """

    def run(arguments: list[str]) -> int:
        function()
        return 0

    module = types.ModuleType(f"verl.cli.{VERB}")
    vars(module)["run"] = run
    sys.modules[module.__name__] = module
    try:
        return run_verb(VERB, [])
    finally:
        del sys.modules[module.__name__]
