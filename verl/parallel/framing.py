"""Listening sockets, and messages behind a 4-byte length. A message is JSON, or bytes that the receiver checks: no pickle."""

import errno
import json
import resource
import socket
import struct
import time
from collections.abc import Mapping
from typing import Any

from verl.errors import RewardError

_HEADER = struct.Struct(">I")
MAX_MESSAGE_BYTES = 256 << 20
_OTHER_FILES = 256  # of a process that has connections


def listening_socket(host: str, port: int, backlog: int) -> socket.socket:
    """A socket that listens at an address of this machine. Raises OSError when the address is taken or is none of it."""
    if not 0 <= port < 1 << 16:
        raise OSError(errno.EINVAL, f"a port is at most {(1 << 16) - 1}")
    listener = socket.socket(socket.AF_INET6 if ":" in host else socket.AF_INET, socket.SOCK_STREAM)
    try:
        listener.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        listener.bind((host, port))
        listener.listen(backlog)
    except OSError:
        listener.close()
        raise
    return listener


def most_connections() -> int:
    """Connections that this process can have open beside its files."""
    limit = resource.getrlimit(resource.RLIMIT_NOFILE)[0]
    return 1 << 16 if limit == resource.RLIM_INFINITY else max(16, limit - _OTHER_FILES)


class ChannelClosed(Exception):
    """The other side is gone."""


class ChannelCorrupt(Exception):
    """The received bytes are not a message: another process wrote to the channel."""


def to_jsonable(value: object) -> object:
    """Plain form of values that JSON lacks: numpy arrays and scalars (anything with `tolist`), and sets.

    Raises RewardError for bytes and for objects without a plain form; such values belong in a file: pass its path.
    """
    if hasattr(value, "tolist"):
        return value.tolist()
    if isinstance(value, (set, frozenset)):
        return sorted(value)
    raise RewardError(
        f"A value of type {type(value).__name__} cannot be passed to a reward function: ground_truth and extra_info "
        "may hold text, numbers, lists and dicts; for binary data put a path there."
    )


def encode_frame(message: Mapping[str, object]) -> bytes:
    """JSON bytes of a message; numpy values become plain. Keys of dicts become text. Raises RewardError
    (to_jsonable)."""
    try:
        return json.dumps(message, default=to_jsonable, separators=(",", ":")).encode()
    except (TypeError, ValueError, RecursionError) as error:
        raise RewardError(f"ground_truth or extra_info cannot be written as JSON: {error}.") from error


def frame(payload: bytes) -> bytes:
    """The payload behind its length."""
    return _HEADER.pack(len(payload)) + payload


def send(channel: socket.socket, payload: bytes) -> None:
    """Write one message. Raises ChannelClosed when the other side is gone, TimeoutError past the channel's timeout."""
    try:
        channel.sendall(frame(payload))
    except TimeoutError:
        raise
    except OSError as error:
        raise ChannelClosed from error


def receive(channel: socket.socket, timeout_s: float | None = None) -> dict[str, Any]:
    """Read one JSON message within `timeout_s` seconds in all (None: no limit, for a child that waits for its parent).

    Raises TimeoutError, ChannelClosed, or ChannelCorrupt.
    """
    try:
        message = json.loads(receive_bytes(channel, timeout_s))
    except (ValueError, RecursionError) as error:
        raise ChannelCorrupt from error
    if not isinstance(message, dict):
        raise ChannelCorrupt
    return message


def receive_bytes(channel: socket.socket, timeout_s: float | None = None) -> bytes:
    """`receive` without decoding."""
    deadline = None if timeout_s is None else time.monotonic() + timeout_s
    (length,) = _HEADER.unpack(_read(channel, _HEADER.size, deadline))
    if length > MAX_MESSAGE_BYTES:
        raise ChannelCorrupt
    return _read(channel, length, deadline)


def read_header(received: bytes | bytearray) -> tuple[int, int] | None:
    """(begin, end) of the first message in the bytes received so far; None while its length is unknown."""
    if len(received) < _HEADER.size:
        return None
    (length,) = _HEADER.unpack_from(received)
    return _HEADER.size, _HEADER.size + length


def _read(channel: socket.socket, length: int, deadline: float | None) -> bytes:
    chunks, missing = [], length
    while missing:
        left_s = None if deadline is None else deadline - time.monotonic()
        if left_s is not None and left_s <= 0:
            raise TimeoutError
        channel.settimeout(left_s)
        try:
            chunk = channel.recv(min(missing, 1 << 20))
        except TimeoutError:
            raise
        except OSError as error:
            raise ChannelClosed from error
        if not chunk:
            raise ChannelClosed
        chunks.append(chunk)
        missing -= len(chunk)
    return b"".join(chunks)
