"""Buckets of new weights for engines on other hosts: their workers fetch them from the process that has the weights.

    with Link(address) as link:                         # an address of this host that the engine reaches
        for bucket in buckets:                          # in memory of this host
            engine.update(link.offered(bucket))         # a small description; the engine replies after reading

    for name, tensor in read_link(description):         # in a worker of the engine

A worker sends the token of a bucket and gets its bytes; digests verify them. Nothing is encrypted.
"""

import secrets
import socket
import threading
from collections import OrderedDict
from collections.abc import Iterator
from contextlib import closing, suppress

import torch

from verl.errors import ModelError
from verl.parallel.framing import most_connections
from verl.reshard.shared_memory import HEAD_BYTES, Description, Named, bucket_memory, read_bucket, tensor_bytes

_TOKEN_BYTES = 32
_SILENCE_S = 60.0  # of the other side, until a connection ends
_MAX_BYTES = 1 << 36  # of a bucket; a description may come from elsewhere
_MOST_SILENT = 128  # connections that have sent no token; a worker sends its token at once


class Link:
    """Sends the bucket that is offered to workers that connect to `address`, at a free port."""

    def __init__(self, address: str):
        self._server = socket.create_server((address, 0), family=socket.AF_INET6 if ":" in address else socket.AF_INET)
        self._place = self._server.getsockname()[:2]
        self._token, self._content = b"", memoryview(b"")
        self.num_sent_bytes, self._lock, self._is_closed = 0, threading.Lock(), threading.Event()
        self._silent: OrderedDict[socket.socket, None] = OrderedDict()  # the longest silent first
        threading.Thread(target=self._serve, name="weights", daemon=True).start()

    def offered(self, bucket: Description) -> Description:
        """The description, for workers elsewhere, of a bucket in memory of this host. It replaces the bucket before."""
        content = tensor_bytes(bucket_memory(bucket), bucket["entries"])
        self._token, self._content = secrets.token_bytes(_TOKEN_BYTES), content.numpy().data
        facts = {"number": bucket["number"], "entries": bucket["entries"], "num_bytes": content.nbytes}
        return {**facts, "link": [*self._place], "token": self._token.hex()}

    def close(self) -> None:
        """Accept no further connection."""
        self._is_closed.set()
        self._server.shutdown(socket.SHUT_RDWR)  # wakes the thread that accepts
        self._server.close()

    def _serve(self) -> None:
        while not self._is_closed.is_set():
            try:
                connection, _ = self._server.accept()
            except OSError:  # it is closed, the client has gone, or the process has no file left
                self._is_closed.wait(0.05)
                continue
            self._silent[connection] = None
            if len(self._silent) > min(_MOST_SILENT, most_connections()):
                with suppress(KeyError, OSError):  # its thread has ended meanwhile
                    self._silent.popitem(last=False)[0].shutdown(socket.SHUT_RDWR)  # ends its thread
            threading.Thread(target=self._send, args=(connection,), name="weights", daemon=True).start()

    def _send(self, connection: socket.socket) -> None:
        with closing(connection), suppress(OSError):  # the other side reports that bytes are missing
            connection.settimeout(_SILENCE_S)
            content, token = self._content, self._token
            try:
                received = connection.recv(_TOKEN_BYTES, socket.MSG_WAITALL)
            finally:
                self._silent.pop(connection, None)
            if secrets.compare_digest(received, token):
                with self._lock:
                    self.num_sent_bytes += content.nbytes
                connection.sendall(content)


def read_link(description: Description) -> Iterator[Named]:
    """The tensors of an offered bucket, in order, as views of memory of this process. Raises ModelError when the bucket cannot
    be fetched, or a tensor does not match its digest."""
    (host, port), num_bytes, number = description["link"], description["num_bytes"], description["number"]
    if not 0 <= num_bytes <= _MAX_BYTES:
        raise ModelError(f"Bucket {number} of the new weights has {num_bytes} bytes, which no bucket has.")
    memory = torch.empty(HEAD_BYTES + num_bytes, dtype=torch.uint8)
    try:
        with socket.create_connection((host, port), _SILENCE_S) as connection:
            connection.sendall(bytes.fromhex(description["token"]))
            connection.shutdown(socket.SHUT_WR)  # a token that is cut short is refused at once
            _fill(connection, memory.numpy().data[HEAD_BYTES:])
    except (OSError, EOFError) as error:
        raise ModelError(
            f"Bucket {number} of the new weights cannot be fetched from {host}:{port} ({error or 'it ended early'}). Let the "
            "engine connect to that address, or set a folder that both hosts see."
        ) from error
    memory[:8].view(torch.int64).fill_(number)
    entries = description["entries"]
    return read_bucket(memory, number, entries, [entry[5] for entry in entries])


def _fill(connection: socket.socket, content: memoryview) -> None:
    while content:
        num_received = connection.recv_into(content)
        if not num_received:
            raise EOFError
        content = content[num_received:]


def address_towards(host: str, port: int) -> str:
    """The address of this host that a connection to `host` comes from. Raises OSError."""
    with socket.create_connection((host, port), _SILENCE_S) as connection:
        return str(connection.getsockname()[0])
