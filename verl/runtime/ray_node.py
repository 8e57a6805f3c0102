"""Ray's own processes on this node (raylet, gcs_server): apart from the signals of the run that starts them, and named when
they end."""

import contextlib
import logging
import os
import select
import signal
import sys
import threading
from collections.abc import Iterator
from typing import Any, cast

import psutil

from verl.errors import WorkerLostError
from verl.parallel.child_processes import blocked_sigterm

log = logging.getLogger(__name__)

_NAMES = ("raylet", "gcs_server")
_LOOK_MS = 2000
_WHY = (
    "it was killed, or has crashed (see /tmp/ray/session_latest/logs). Run the same command again to resume from the last "
    "checkpoint."
)

_watched: list[psutil.Process] = []


@contextlib.contextmanager
def apart_from_signals(services: Any) -> Iterator[None]:
    """Processes that `services`, Ray's module, starts meanwhile get neither SIGTERM nor the signals of the run's process group.

    `timeout`, SLURM, systemd and terminals send them to the group or to every process of a job: a raylet that heeds one would
    take the ranks with it before they have saved. Applies only on Linux: these processes end with this one there. The handler
    of SIGTERM stays; Ray's handler would exit.
    """
    plain, handler = services.ConsolePopen, signal.getsignal(signal.SIGTERM)

    class Apart(plain):  # type: ignore[misc, valid-type]
        """A process in its own session; only SIGKILL ends it."""

        def __init__(self, *arguments: object, **options: object):
            super().__init__(*arguments, start_new_session=True, **options)

        def terminate(self) -> None:
            self.kill()

        def kill(self) -> None:
            """SIGKILL, also for all that it has started: Ray's agents live on for a minute after a raylet that was killed."""
            family = _descendants(self.pid) if self.poll() is None else []
            super().kill()
            for process in family:
                with contextlib.suppress(psutil.Error):
                    process.kill()

    if sys.platform == "linux":
        services.ConsolePopen = Apart
    with blocked_sigterm():
        try:
            yield
        finally:
            services.ConsolePopen = plain
            if threading.current_thread() is threading.main_thread():
                signal.signal(signal.SIGTERM, handler)


def watch(node: Any) -> None:
    """From now on the end of one of them is an error in the log.

    Those are processes that this one has started, or the raylet of `node`, Ray's object (None for a client of ray://). Ray ends
    this process soon after its raylet, at some calls without a word.
    """
    children = [p for p in psutil.Process().children() if p.name() in _NAMES]
    _watched.extend(children or (_raylets_at(node.raylet_socket_name) if node else ()))
    if sys.platform == "linux":
        threading.Thread(target=_report_end, args=(list(_watched),), name="ray-node", daemon=True).start()


def _descendants(pid: int) -> list[psutil.Process]:
    with contextlib.suppress(psutil.Error):
        return cast("list[psutil.Process]", psutil.Process(pid).children(recursive=True))
    return []


def _raylets_at(socket: str) -> list[psutil.Process]:
    raylets = []
    for process in psutil.process_iter():
        with contextlib.suppress(psutil.Error):
            if process.name() == "raylet" and any(word.endswith(f"={socket}") for word in process.cmdline()):
                raylets.append(process)
    return raylets


def forget() -> None:
    """Their end is no error any more."""
    _watched.clear()


def lost() -> str:
    """One of them that has ended; "" while there is none."""
    for process in _watched:
        if not process.is_running() or process.status() == psutil.STATUS_ZOMBIE:
            return f"{process.name()} (pid {process.pid})"
    return ""


def require(call: str) -> None:
    """Raises WorkerLostError when one of them has ended; `call` says during what."""
    if name := lost():
        raise WorkerLostError(f"Ray's process {name} has ended during {call}, and the run with it: {_WHY}")


def _report_end(processes: list[psutil.Process]) -> None:
    with contextlib.ExitStack() as stack, contextlib.suppress(ProcessLookupError):
        poll = select.poll()
        for process in processes:
            descriptor = os.pidfd_open(process.pid)
            stack.callback(os.close, descriptor)
            poll.register(descriptor, select.POLLIN)
        while _watched:
            if poll.poll(_LOOK_MS):
                break
    if name := lost():
        log.error("Ray's process %s has ended, and the run with it: %s", name, _WHY)
