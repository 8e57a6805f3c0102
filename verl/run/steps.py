"""A run that Python code takes step by step: `verl.Trainer` and the trainers of other releases."""

from __future__ import annotations

from collections.abc import Callable
from contextlib import ExitStack
from typing import TYPE_CHECKING, TypeVar

from verl.config import LoadedConfig, RunConfig
from verl.errors import ConfigError

if TYPE_CHECKING:
    from verl.run.loop import Loop

T = TypeVar("T", bound="SteppedRun")


class SteppedRun:
    """The run of `loaded` by `program`, a name of PROGRAMS. Use it as a context manager, or call `close` at the end."""

    def __init__(self, loaded: LoadedConfig[RunConfig], program: str = "ppo"):
        self.loaded, self.program_name = loaded, program
        self._stack = ExitStack()
        self._running: tuple[Loop, Callable[[], None]] | None = None
        self._closed = False

    def step(self) -> dict[str, float] | None:
        """Take the next step, with validation and checkpoints when due; returns its metrics, or None after the last step. The
        first call loads models and starts processes. Raises InterruptedRun after saving on Ctrl-C and SIGTERM."""
        loop, finish = self._started()
        if not loop.advance():
            return None
        if loop.state.step >= loop.data.num_steps:
            loop.store.finish()
            finish()
        return dict(loop.metrics)

    def close(self) -> None:
        """End the processes of the run. The steps after the newest checkpoint are lost."""
        self._running, self._closed = None, True
        self._stack.close()

    def __enter__(self: T) -> T:
        return self

    def __exit__(self, *error: object) -> None:
        self.close()

    def _started(self) -> tuple[Loop, Callable[[], None]]:
        """The loop of the run, and the function that ends the run. Raises ConfigError after `close`."""
        if self._closed:
            raise ConfigError(
                f"The {type(self).__name__} is closed. Make another with the same run folder to resume from its checkpoint."
            )
        if self._running is None:
            from verl.run.host import open_run

            self._running = self._stack.enter_context(open_run(self.loaded, self.program_name))
        return self._running
