"""Work on a thread behind the step that asked for it."""

from __future__ import annotations

from collections.abc import Callable
from concurrent.futures import Future, wait
from threading import Thread

from verl.errors import DeadlineError


class Behind:
    """Starts `work`; `name` says what it writes."""

    def __init__(self, work: Callable[[], object], name: str):
        self._name = name
        self._done: Future[object] = Future()
        # a daemon: a disk that hangs must not keep the process alive
        Thread(target=self._run, args=(work,), name=name, daemon=True).start()

    def finish(self, timeout_s: float) -> None:
        """Wait for the end. Raises the error of the work, DeadlineError after `timeout_s`."""
        if not wait([self._done], timeout_s).done:
            raise DeadlineError(f"{self._name} not written within {timeout_s:g} s. Check the disk of the run folder.")
        self._done.result()

    def _run(self, work: Callable[[], object]) -> None:
        try:
            self._done.set_result(work())
        except BaseException as error:  # noqa: BLE001 - raised by `finish`, in the thread that waits
            self._done.set_exception(error)
