"""JSON messages behind a 4-byte length, over a pair of sockets between the run and a scorer."""

from __future__ import annotations

import json
import socket
import struct
import time
from typing import Any

from verl.errors import RewardError

_HEADER = struct.Struct(">I")
MAX_MESSAGE_BYTES = 256 << 20


class ChannelClosed(Exception):
    """The other process closed the channel or ended."""


class ChannelCorrupt(Exception):
    """The bytes received are not a message: another writer used the channel."""


def to_jsonable(value: Any) -> Any:
    """Convert a value unknown to JSON to a plain one: numpy arrays and scalars (anything with `tolist`), and sets.

    Raises RewardError for bytes and other objects; pass the path of a file instead.
    """
    if hasattr(value, "tolist"):
        return value.tolist()
    if isinstance(value, (set, frozenset)):
        return sorted(value)
    raise RewardError(
        f"A value of type {type(value).__name__} cannot be passed to a reward function: ground_truth and extra_info "
        "may hold text, numbers, lists and dicts; for binary data put a path there."
    )


def encode(message: dict[str, Any]) -> bytes:
    """Encode a message as JSON; numpy values become plain, keys of dicts text. Raises RewardError (to_jsonable)."""
    try:
        return json.dumps(message, default=to_jsonable, separators=(",", ":")).encode()
    except (TypeError, ValueError, RecursionError) as error:
        raise RewardError(f"ground_truth or extra_info cannot be written as JSON: {error}.") from error


def frame(payload: bytes) -> bytes:
    """The payload behind its length."""
    return _HEADER.pack(len(payload)) + payload


def send(channel: socket.socket, payload: bytes) -> None:
    """Send one message. Raises ChannelClosed, or TimeoutError past the channel's timeout."""
    try:
        channel.sendall(frame(payload))
    except TimeoutError:
        raise
    except OSError as error:
        raise ChannelClosed from error


def receive(channel: socket.socket, timeout_s: float | None = None) -> dict[str, Any]:
    """Receive one message within `timeout_s` (None: no limit, for a worker that waits for its parent).

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
    """Receive the bytes of one message, as `receive` does, without decoding them."""
    deadline = None if timeout_s is None else time.monotonic() + timeout_s
    (length,) = _HEADER.unpack(_read(channel, _HEADER.size, deadline))
    if length > MAX_MESSAGE_BYTES:
        raise ChannelCorrupt
    return _read(channel, length, deadline)


def read_header(received: bytes | bytearray) -> tuple[int, int] | None:
    """(begin, end) of the first message in the bytes received so far; None while its length is not known."""
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
