"""The trusted process between the run and one scorer: `python -m verl.rewards.sandbox.keeper FD PARENT_PID`.

It alone holds the channel to the run. The scorer gets each request with a number that nobody can guess and answers over
a channel of its own; an answer counts when it bears the number of the request that is open and nothing else was written.
So a scorer can decide its own sample, and no write of it reaches the score of another. The keeper also watches what the
scorer takes while it works, and ends it with everything it has started.

consumes: one set-up message, then requests from the run     produces: one answer to each
waits for: the run (without limit) or the scorer (the run has the clock)     ends with: the run
"""

from __future__ import annotations

import contextlib
import json
import os
import secrets
import select
import signal
import socket
import sys
import time
import traceback
from types import FrameType

from verl.parallel.framing import (
    MAX_MESSAGE_BYTES,
    NUMBER_BYTES,
    ChannelClosed,
    encode,
    read_header,
    receive,
    receive_bytes,
    send,
)
from verl.rewards import worker
from verl.rewards.sandbox import kernel
from verl.rewards.sandbox.box import Box, Limits, Walls

FORGED = "wrote to the channel on which its result is sent"
CLOSED = "closed the channel on which its result is sent"
_LOOK_EVERY_S = 0.025  # at what a working scorer takes
_LOOK_IDLE_S = 1.0  # at what an idle one does behind our back


class ScorerLost(Exception):
    """The scorer can no longer be used; the message says what it did."""


class _Ended(BaseException):
    """The run, or what started it, is gone or wants us to end."""


class Keeper:
    """`channel` leads to the run, `scorer` to the scorer in `box`."""

    def __init__(self, channel: socket.socket, scorer: socket.socket, box: Box):
        self.channel = channel
        self.scorer = scorer
        self.box = box
        self._poll = select.poll()
        for waited_for in (channel, scorer, box.status):
            self._poll.register(waited_for, select.POLLIN)
        self._gone = ""  # how the scorer was lost while nobody waited for it

    def serve(self) -> None:
        """Hand requests to the scorer and its answers to the run, until the run closes the channel or the scorer is lost."""
        while True:
            request = self._next_request()
            if self._gone:
                send(self.channel, encode({"not_begun": f"Between two samples the scorer {self._gone}."}))
                return
            try:
                answer = self.ask(request)
            except ScorerLost as error:
                send(self.channel, encode({"lost": str(error)}))
                return
            send(self.channel, answer)

    def ask(self, request: bytes) -> bytes:
        """The scorer's answer. Raises ScorerLost."""
        number = secrets.token_bytes(NUMBER_BYTES)
        try:
            send(self.scorer, number + request)
        except ChannelClosed:
            raise ScorerLost(self._ending()) from None
        return self.answer_to(number)

    def answer_to(self, number: bytes, *, watched: bool = True) -> bytes:
        """The message that bears `number`. Raises ScorerLost when the scorer ends, writes anything else, or, while
        `watched`, takes too much."""
        received = bytearray()
        look_at, used_s = time.monotonic() + _LOOK_EVERY_S, -1.0
        while True:
            ready = dict(self._poll.poll(_LOOK_EVERY_S * 1000))
            if self.scorer.fileno() in ready:
                try:
                    chunk = self.scorer.recv(1 << 20)
                except OSError:
                    chunk = b""
                if not chunk:
                    raise ScorerLost(self._ending())
                received += chunk
                if (message := _whole(received, number)) is not None:
                    return message
            elif self.box.status in ready:
                raise ScorerLost(self.box.ending())
            if self.channel.fileno() in ready:
                raise _Ended  # the run sends nothing while it waits: it is gone
            if watched and time.monotonic() >= look_at:
                look_at = time.monotonic() + _LOOK_EVERY_S
                used_s = self.box.cpu_seconds() if used_s < 0 else used_s
                self._check(used_s)

    def _next_request(self) -> bytes:
        """The run's next message; meanwhile a scorer that ends, writes or starts processes unasked is ended."""
        while True:
            ready = dict(self._poll.poll(None if self._gone else _LOOK_IDLE_S * 1000))
            if not self._gone:
                try:
                    self._look_behind(set(ready))
                except ScorerLost as error:
                    self._gone = str(error)
                    self._poll.unregister(self.scorer)
                    self._poll.unregister(self.box.status)
                    self.box.end()
            if self.channel.fileno() in ready:
                return receive_bytes(self.channel)

    def _look_behind(self, ready: set[int]) -> None:
        if self.box.status in ready:
            raise ScorerLost(self.box.ending())
        if self.scorer.fileno() in ready:
            raise ScorerLost(FORGED)
        if not ready:
            self._check(self.box.cpu_seconds())

    def _check(self, used_s: float) -> None:
        if excess := self.box.excess(used_s):
            raise ScorerLost(excess)

    def _ending(self) -> str:
        """Why nothing can be read from the scorer any more; its process ends a moment after its channel."""
        readable, _, _ = select.select([self.box.status], [], [], 1.0)
        return self.box.ending() if readable else CLOSED


def _whole(received: bytearray, number: bytes) -> bytes | None:
    """The message in `received` without its number, None while it is not complete. Raises ScorerLost for anything that
    is not one message with that number."""
    header = read_header(received)
    if header is None:
        return None
    begin, end = header
    if end - begin > MAX_MESSAGE_BYTES or len(received) > end or end - begin < NUMBER_BYTES:
        raise ScorerLost(FORGED)
    if not number.startswith(received[begin : begin + NUMBER_BYTES]):
        raise ScorerLost(FORGED)
    return bytes(received[begin + NUMBER_BYTES :]) if len(received) == end else None


def _keep(channel: socket.socket) -> None:
    setup = receive(channel)
    limits = Limits(**setup.pop("limits"))
    outer, inner = socket.socketpair()
    number = secrets.token_bytes(NUMBER_BYTES)

    def scorer(walls: Walls) -> None:
        worker.run(inner, number, setup, limits, alone=walls.processes)

    box = Box(limits, setup["folder"], scorer, [channel, outer])
    try:
        inner.close()
        keeper = Keeper(channel, outer, box)
        try:
            answer = json.loads(keeper.answer_to(number, watched=False))
        except ScorerLost as error:
            answer = {"lost": str(error)}
        send(channel, encode({**answer, "notices": box.notices, "group": box.group}))
        if "ready" in answer:
            keeper.serve()
    finally:
        signal.signal(signal.SIGTERM, signal.SIG_IGN)  # what ends us has come; now everything below must end
        box.end()


def _end(signal_number: int, frame: FrameType | None) -> None:
    raise _Ended


def main() -> None:
    """Serve the run on the inherited socket until it closes it; leaves no process behind."""
    fd, parent_pid = int(sys.argv[1]), int(sys.argv[2])
    signal.signal(signal.SIGTERM, _end)
    os.set_inheritable(fd, False)
    try:
        with contextlib.suppress(OSError):
            kernel.end_with_parent(signal.SIGTERM)
        if os.getppid() != parent_pid:  # it ended before that took hold
            raise _Ended
        _keep(socket.socket(fileno=fd))
    except (_Ended, ChannelClosed):
        pass
    except BaseException:  # noqa: BLE001 - the process ends here; the log keeps the reason
        traceback.print_exc()
    # we lead a process group of our own: a guard that was forked and had not yet left it ends too
    os.killpg(0, signal.SIGKILL)


if __name__ == "__main__":
    main()
