"""Work on a thread behind the step that asked for it."""

from __future__ import annotations

import threading
from collections.abc import Callable

from verl.errors import DeadlineError


class Behind:
    """Starts `work`; `name` says what it writes."""

    def __init__(self, work: Callable[[], None], name: str):
        self._work, self._name = work, name
        self._error: BaseException | None = None
        # a daemon: a disk that hangs must not keep the process alive
        self._thread = threading.Thread(target=self._run, name=name, daemon=True)
        self._thread.start()

    def finish(self, timeout_s: float) -> None:
        """Wait for the end. Raises the error of the work, DeadlineError after `timeout_s`."""
        self._thread.join(timeout_s)
        if self._thread.is_alive():
            raise DeadlineError(
                f"The {self._name} were not written within {timeout_s:g} s. Check the disk of the run folder."
            )
        if self._error is not None:
            raise self._error

    def _run(self) -> None:
        try:
            self._work()
        except BaseException as error:  # noqa: BLE001 - raised by `finish`, in the thread that waits
            self._error = error
