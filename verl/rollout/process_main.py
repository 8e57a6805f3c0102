"""The process of an engine: makes it, answers calls one after the other, dies with its parent.

Started by process.py as `python -m verl.rollout.process_main FD PARENT_PID`.
"""

import faulthandler
import logging
import socket
import sys
import traceback
from collections.abc import Callable
from functools import partial

from verl.errors import VerlError
from verl.parallel.child_processes import die_with
from verl.parallel.framing import ChannelClosed, receive_bytes, send
from verl.parallel.process_settings import imports_stay
from verl.parallel.serialize import from_bytes, to_bytes
from verl.parallel.stack_dump import DUMP_SIGNAL
from verl.registry import load_object


def serve(channel: socket.socket) -> None:
    """Answer calls until the parent closes the channel. An exception that is not a VerlError ends the process, since its state
    is unknown; its traceback is the end of the log."""
    factory, setup = from_bytes(receive_bytes(channel))

    def make() -> object:
        with imports_stay():
            constructor = load_object(factory)
        return constructor(setup)

    engine = _answered(channel, make, sends_result=False)
    while engine is not None:
        method, arguments = from_bytes(receive_bytes(channel))
        _answered(channel, partial(getattr(engine, method), *arguments))


def _answered(channel: socket.socket, call: Callable[[], object], *, sends_result: bool = True) -> object:
    """The result of `call`, sent to the parent as [result, None], or [None, [kind, sentence]] for an error."""
    try:
        result = call()
    except VerlError as error:
        send(channel, to_bytes([None, [type(error).__name__, str(error)]]))
        return None
    send(channel, to_bytes([result if sends_result else None, None]))
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
