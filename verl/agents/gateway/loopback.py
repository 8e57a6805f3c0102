"""The loopback of a sandbox without a network: a listening socket on its 127.0.0.1, served by the run from outside.

    python -I -S loopback.py FD PORT COMMAND...    in the sandbox, before rights are dropped: sends the socket, becomes COMMAND

It imports only the standard library, so that it starts in a few milliseconds.
"""

import fcntl
import os
import socket
import struct
import sys

ADDRESS = "127.0.0.1"
_GET_FLAGS, _SET_FLAGS, _UP = 0x8913, 0x8914, 1  # SIOCGIFFLAGS, SIOCSIFFLAGS, IFF_UP
_REQUEST = "16sh14x"  # struct ifreq: name, flags


def command(fd: int, port: int) -> tuple[str, ...]:
    """The command that makes the listening socket and sends it through the socket `fd`."""
    return (sys.executable, "-I", "-S", __file__, str(fd), str(port))


def received(way: socket.socket, timeout_s: float) -> socket.socket | None:
    """The listening socket, from the other end of `fd`; None when the sandbox ended before it was sent."""
    way.settimeout(timeout_s)
    _, fds, _, _ = socket.recv_fds(way, 1, 1)
    return socket.socket(fileno=fds[0]) if fds else None


def main() -> None:
    fd, port, words = int(sys.argv[1]), int(sys.argv[2]), sys.argv[3:]
    listening = socket.socket()
    _bring_up(listening, b"lo")
    listening.bind((ADDRESS, port))
    listening.listen(128)
    with socket.socket(fileno=fd) as way:
        socket.send_fds(way, [b"."], [listening.fileno()])
    os.execvp(words[0], words)


def _bring_up(any_socket: socket.socket, name: bytes) -> None:
    """A new network namespace has its loopback interface down."""
    request = fcntl.ioctl(any_socket, _GET_FLAGS, struct.pack(_REQUEST, name, 0))
    _, flags = struct.unpack(_REQUEST, request)
    fcntl.ioctl(any_socket, _SET_FLAGS, struct.pack(_REQUEST, name, flags | _UP))


if __name__ == "__main__":
    main()
