"""Connections of clients to a server of this process (uvicorn), closed if the server waits for a client in vain."""

import asyncio
from typing import NamedTuple

from uvicorn.protocols.http.h11_impl import H11Protocol, RequestResponseCycle

from verl.parallel.framing import most_connections

_LOOK_S = 20.0  # between two looks at a connection
_LEAST_RATE = 1 << 10  # bytes a second of a body that comes, or of an answer that is read


class _Wait(NamedTuple):
    """The reason why a server waits: the head of a request, its body, or a client that reads.

    `size` has the bytes of the request `cycle` that came, or that are to be read.
    """

    kind: str
    cycle: RequestResponseCycle | None
    size: int = 0


class PatientProtocol(H11Protocol):
    """HTTP/1.1 on a connection that is closed if the head of a request is incomplete after _LOOK_S, or if its body comes, or
    its answer is read, at less than _LEAST_RATE. Before connections take all files that the process may open, the connection
    with the longest wait of the server is closed."""

    def connection_made(self, transport: asyncio.Transport) -> None:  # type: ignore[override]
        super().connection_made(transport)
        self._received, self._moved_at = 0, self.loop.time()
        self.loop.call_later(_LOOK_S, self._look, self._wait())
        open_ones = [c for c in self.connections if isinstance(c, PatientProtocol) and not c.transport.is_closing()]
        if len(open_ones) > most_connections():
            waiting = [c for c in open_ones if c._wait() is not None]
            min(waiting, key=lambda c: c._moved_at).transport.abort()  # at least this one waits

    def data_received(self, data: bytes) -> None:
        self._received, self._moved_at = self._received + len(data), self.loop.time()
        super().data_received(data)

    def _wait(self) -> _Wait | None:
        """The reason why the server waits; None if the client waits."""
        cycle = self.cycle
        if self.flow.write_paused:
            return _Wait("read", cycle, -self.transport.get_write_buffer_size())
        if cycle is None or cycle.response_complete:
            return _Wait("head", cycle)
        return _Wait("body", cycle, self._received) if cycle.more_body and not self.flow.read_paused else None

    def _look(self, before: _Wait | None) -> None:
        """Close the connection if the server has waited for the same since the last look, and too little has moved."""
        now = self._wait()
        if now is not None and before is not None and (now.kind, now.cycle) == (before.kind, before.cycle):
            if now.size - before.size < _LEAST_RATE * _LOOK_S:
                self.transport.abort()
        if not self.transport.is_closing():
            self.loop.call_later(_LOOK_S, self._look, now)
