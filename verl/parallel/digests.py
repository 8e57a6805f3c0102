"""Digests of files that threads compute: the BLAKE2b-256 of the BLAKE2b-256 of each MiB, or of the content up to a MiB."""

import ctypes
import functools
import hashlib
import os
import sys
from collections.abc import Callable, Iterable, Iterator
from concurrent.futures import Executor, Future
from pathlib import Path

import numpy as np

from verl.parallel.compiled import open_library

LEAF_BYTES = 1 << 20
_LANES, _SIZE = 8, 32  # messages of one call of blake2b.c, bytes of a digest
CHUNK_BYTES = _LANES * LEAF_BYTES
THREADS = 4  # digests leave the other threads of the process free
AHEAD = 4  # chunks in memory, at most

_blake2b = functools.partial(hashlib.blake2b, digest_size=_SIZE)


def of_leaves(chunk: memoryview) -> bytes:
    """The digests of the leaves of `chunk`, joined. The last leaf may be shorter."""
    compiled = _compiled() if len(chunk) == CHUNK_BYTES else None
    if compiled is None:
        return b"".join(_blake2b(chunk[at : at + LEAF_BYTES]).digest() for at in range(0, len(chunk), LEAF_BYTES))
    digests = np.empty(_LANES * _SIZE, np.uint8)
    compiled(digests.ctypes.data, np.frombuffer(chunk, np.uint8).ctypes.data, LEAF_BYTES)
    return digests.tobytes()


def of_file(leaves: Iterable[bytes]) -> str:
    """The digest of a file from the digests of its leaves."""
    joined = b"".join(leaves)
    return joined.hex() if len(joined) == _SIZE else _blake2b(joined).hexdigest()


def copied_chunks(parts: Iterable[bytes | memoryview], buffers: Iterator[memoryview]) -> Iterator[memoryview]:
    """`parts` joined, cut into chunks, and copied to `buffers`."""
    buffer, size = next(buffers), 0
    for part in parts:
        at = 0
        while at < len(part):
            count = min(CHUNK_BYTES - size, len(part) - at)
            buffer[size : size + count] = part[at : at + count]
            size, at = size + count, at + count
            if size == CHUNK_BYTES:
                yield buffer
                buffer, size = next(buffers), 0
    if size:
        yield buffer[:size]


def read_digest(path: Path, threads: Executor) -> tuple[int, str]:
    """Bytes and digest of a file as the disk returns it. One thread reads from start to end: several would take turns on the
    disk, and the system could not read ahead of them."""
    with open(path, "rb") as file:
        size, leaves = os.fstat(file.fileno()).st_size, list[Future[bytes]]()
        num_chunks = -(-size // CHUNK_BYTES)
        buffers = [np.empty(min(CHUNK_BYTES, size), np.uint8).data for _ in range(min(AHEAD, num_chunks))]
        for number in range(num_chunks):
            if number >= AHEAD:
                leaves[number - AHEAD].result()
            buffer = buffers[number % AHEAD]
            leaves.append(threads.submit(of_leaves, buffer[: file.readinto(buffer)]))
        return size, of_file(leaf.result() for leaf in leaves)


@functools.cache
def _compiled() -> Callable[..., None] | None:
    """The function of blake2b.c; None if it was not compiled."""
    library = open_library(Path(__file__).parents[1] / "checkpoint/_blake2b")
    if library is None or sys.byteorder != "little":
        return None
    function = library.verl_blake2b
    function.argtypes, function.restype = [ctypes.c_void_p, ctypes.c_void_p, ctypes.c_int64], None
    return function
