"""Damage of any kind: to the bytes of a file, to a value within another one, and things that are no files."""

import os
import signal
import socket

# texts that are no JSON, or other JSON than a reader expects
ODD_TEXTS = (
    "", "{", "null", "[]", "{}", "[" * 100_000, "9" * 5000, "\0" * 9, "NaN", '{"step": -1}', '{"step": 2}', '{"format": 1}',
    '{"step": "\\ud800"}', "\x1b[31m",
)  # fmt: skip


def flip(rng, data, end=None):
    """Another bit, of the first `end` bytes."""
    data = data or b"\0"
    place = rng.randrange(end or len(data))
    return data[:place] + bytes([data[place] ^ 1 << rng.randrange(8)]) + data[place + 1 :]


def cut(rng, data):
    return data[: rng.randrange(len(data) or 1)]


def append(rng, data):
    return data + rng.choice([b"\0", b"\n\n", b" ", b"{", b"}", b"[" * 5000, b"\xff\xfe", rng.randbytes(100)])


def zero_block(rng, data):
    """A block that never reached the disk."""
    begin = rng.randrange(len(data) + 1)
    end = min(len(data), begin + rng.choice([16, 512]))
    return data[:begin] + bytes(end - begin) + data[end:]


def of_files(change, choose=lambda rng, place: place):
    """`change` of bytes as a change of the file that `choose` names."""

    def damage(rng, place):
        file = choose(rng, place)
        file.write_bytes(change(rng, file.read_bytes()))

    damage.__name__ = change.__name__
    return damage


def put_no_file(rng, file, kinds, other=None):
    """Put something of `kinds` at `file`: a folder, a pipe, a socket, a device, or a link that leads nowhere or to `other`."""
    kind = rng.choice(kinds)
    if kind == "folder":
        file.mkdir()
    elif kind == "pipe":
        os.mkfifo(file)
    elif kind == "socket":
        here = os.getcwd()
        os.chdir(file.parent)  # the path of a socket is short
        try:
            with socket.socket(socket.AF_UNIX) as end:
                end.bind(file.name)
        finally:
            os.chdir(here)
    else:
        links = {"loop": file.name, "nowhere": "no such\x1b[31m file", "device": "/dev/zero", "other": other}
        file.symlink_to(links[kind])


def places(value, path=(), limit=None):
    """Every place in a nested value, of each part the first `limit`; the value itself is at ()."""
    yield path
    if isinstance(value, dict | list):
        for key in list(value if isinstance(value, dict) else range(len(value)))[:limit]:
            yield from places(value[key], (*path, key), limit)


def parent_of(value, path):
    for key in path[:-1]:
        value = value[key]
    return value


class deadline:  # noqa: N801 - reads as a statement
    """Raises TimeoutError in the main thread after `seconds`."""

    def __init__(self, seconds):
        self.seconds = seconds

    def __enter__(self):
        self.before = signal.signal(signal.SIGALRM, self.ring)
        signal.alarm(self.seconds)

    def ring(self, *_):
        raise TimeoutError(f"loading took more than {self.seconds} s")

    def __exit__(self, *_):
        signal.alarm(0)
        signal.signal(signal.SIGALRM, self.before)
