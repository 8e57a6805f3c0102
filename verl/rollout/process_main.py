"""The process of an engine: makes it, answers calls one after the other, dies with its parent.

Started by process.py as `python -m verl.rollout.process_main FD PARENT_PID`. The engine's methods get their arguments by name,
and those that have `report` a function for what is to be known on the way.
"""

from __future__ import annotations

import faulthandler
import inspect
import logging
import socket
import sys
import time
import traceback
from typing import Any

from verl.errors import VerlError
from verl.parallel.child_processes import die_with
from verl.parallel.framing import ChannelClosed, encode, receive, send
from verl.parallel.stack_dump import DUMP_SIGNAL
from verl.registry import load_object

_ALIVE_AFTER_S = 1.0


class Reporter:
    """Tells the parent of events, and that work goes on where there have been none for a second."""

    def __init__(self, channel: socket.socket):
        self._channel, self._last = channel, time.monotonic()

    def __call__(self, event: Any) -> None:
        """Send `event` (JSON)."""
        self._send({"event": event})

    def alive(self) -> None:
        """Work goes on."""
        if time.monotonic() - self._last > _ALIVE_AFTER_S:
            self._send({"alive": True})

    def _send(self, message: dict[str, Any]) -> None:
        send(self._channel, encode(message))
        self._last = time.monotonic()


def serve(channel: socket.socket) -> None:
    """Answer calls until the parent closes the channel. An exception that is not a VerlError ends the process, since nobody
    knows what it left behind; its traceback is the end of the log."""
    first = receive(channel)
    engine = _answered(channel, lambda: load_object(first["factory"])(first["setup"]), shown=False)
    while engine is not None:
        call = receive(channel)
        method, arguments = getattr(engine, call["method"]), call["arguments"]
        if "report" in inspect.signature(method).parameters:
            arguments = {**arguments, "report": Reporter(channel)}
        _answered(channel, lambda method=method, arguments=arguments: method(**arguments))


def _answered(channel: socket.socket, what: Any, *, shown: bool = True) -> Any:
    try:
        result = what()
    except VerlError as error:
        send(channel, encode({"error": [type(error).__name__, str(error)]}))
        return None
    send(channel, encode({"result": result if shown else None}))
    return result


def main() -> int:
    """The exit code: 0 when the parent has closed the channel."""
    descriptor, parent = map(int, sys.argv[1:3])
    die_with(parent)
    faulthandler.register(DUMP_SIGNAL, all_threads=True)  # to the log: process.py reads it there
    logging.basicConfig(level=logging.WARNING)
    channel = socket.socket(fileno=descriptor)
    try:
        serve(channel)
    except ChannelClosed:
        return 0
    except Exception:  # noqa: BLE001 - the log is read by the parent, last line first
        traceback.print_exc()
        return 1
    return 1


if __name__ == "__main__":
    sys.exit(main())
