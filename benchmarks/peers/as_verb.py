"""Running code in the process that `verl train` makes of itself: its environment, its handling of errors."""

from __future__ import annotations

from collections.abc import Callable

from verl.cli.main import run_guarded


def as_verb(function: Callable[[], object]) -> int:
    """Call `function` as the command line calls a verb; returns the exit code.

    The command line's settings must precede the import of torch, so `function` imports torch, not its file.
    """

    def run(arguments: list[str]) -> int:
        function()
        return 0

    return run_guarded("measured", run, [])
