"""Digests of what files hold: of small files every byte, of large ones blocks at fixed places.

    a file up to 1 GiB              every byte
    a larger file                   its size, its last 4 MiB (parquet keeps its footer there), 4096 blocks of 4 KiB
    weights (safetensors)           name, dtype and shape of each tensor; its bytes up to 16 KiB, else blocks of 4 KiB at its
                                    start, middle and end and one in each 16 MiB

Names and places of files do not count, nor does the division of tensors into weight files.
"""

import hashlib
import json
import os
import zlib
from collections.abc import Callable, Iterable, Sequence
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

_WHOLE_BYTES = 1 << 30
_END_BYTES = 4 << 20
_NUM_BLOCKS = 4096
_BLOCK = 4 << 10
_WHOLE_TENSOR_BYTES = 16 << 10
_TENSOR_STRIDE = 16 << 20
_MAX_HEADER_BYTES = 100 << 20  # the limit of the format
_NUM_THREADS = 8  # a network file system answers several reads at once

Span = tuple[int, int]  # offset in a file, bytes


def digest_of_text(*texts: str) -> str:
    """The digest of texts in order."""
    return _combined(text.encode() for text in texts)


def checksum_of(content: memoryview, *texts: str) -> str:
    """A digest of texts and of the CRC-32 of each part of a content: of damage, not of what someone has made on purpose."""
    parts = (content[at : at + _END_BYTES] for at in range(0, len(content), _END_BYTES))
    with ThreadPoolExecutor(_NUM_THREADS) as pool:
        return digest_of_text(*texts, str(len(content)), *map(str, pool.map(zlib.crc32, parts)))


def digest_of_files(files: Sequence[Path]) -> str:
    """The digest of the content of `files` in order. Raises OSError."""
    with ThreadPoolExecutor(_NUM_THREADS) as pool:
        return _combined(pool.map(_digest_of_file, files))


def digest_of_weights(files: Sequence[Path]) -> str:
    """The digest of the tensors in safetensors files. Raises OSError, ValueError for a file of another format."""
    tensors: dict[str, bytes] = {}
    for file in files:
        with open(file, "rb", buffering=0) as opened, ThreadPoolExecutor(_NUM_THREADS) as pool:
            _read_at_random(opened.fileno())
            start, header = _header(opened)
            for (name, row), content in zip(
                header.items(), pool.map(_tensor(opened, start), header.values()), strict=True
            ):
                tensors[name] = json.dumps([name, row["dtype"], row["shape"]]).encode() + content
    return _combined(content for _, content in sorted(tensors.items()))


def _combined(parts: Iterable[bytes]) -> str:
    digest = hashlib.blake2b(digest_size=16)
    for part in parts:
        digest.update(len(part).to_bytes(8, "little"))
        digest.update(part)
    return digest.hexdigest()


def _digest_of_file(path: Path) -> bytes:
    with open(path, "rb", buffering=0) as file:
        size = os.fstat(file.fileno()).st_size
        if size <= _WHOLE_BYTES:
            return _whole(file).encode()
        _read_at_random(file.fileno())
        spans = [(size * block // _NUM_BLOCKS, _BLOCK) for block in range(_NUM_BLOCKS)]
        return size.to_bytes(8, "little") + _content(file, [*spans, (size - _END_BYTES, _END_BYTES)])


def _whole(file: Any) -> str:
    digest, buffer = hashlib.blake2b(digest_size=32), memoryview(bytearray(_END_BYTES))
    while count := file.readinto(buffer):
        digest.update(buffer[:count])
    return digest.hexdigest()


def _header(file: Any) -> tuple[int, dict[str, Any]]:
    """(offset of the first tensor, the entry of each tensor)."""
    size = int.from_bytes(file.read(8), "little")
    if size > _MAX_HEADER_BYTES:
        raise ValueError("not a safetensors file")
    header = json.loads(os.pread(file.fileno(), size, 8))
    header.pop("__metadata__", None)
    return 8 + size, header


def _tensor(file: Any, start: int) -> Callable[[Any], bytes]:
    """The function that samples the tensor of a header's entry."""

    def sample(row: Any) -> bytes:
        begin, end = row["data_offsets"]
        size = end - begin
        if not 0 <= begin <= end <= os.fstat(file.fileno()).st_size:
            raise ValueError("a tensor outside of the file")
        if size <= _WHOLE_TENSOR_BYTES:
            return _content(file, [(start + begin, size)])
        places = {*range(0, size - _BLOCK, _TENSOR_STRIDE), size // 2, size - _BLOCK}
        return _content(file, [(start + begin + place, _BLOCK) for place in sorted(places)])

    return sample


def _content(file: Any, spans: Iterable[Span]) -> bytes:
    digest = hashlib.blake2b(digest_size=16)
    for offset, size in spans:
        digest.update(os.pread(file.fileno(), size, offset))
    return digest.digest()


def _read_at_random(descriptor: int) -> None:
    """Keep the system from reading ahead of each block."""
    if hasattr(os, "posix_fadvise"):
        os.posix_fadvise(descriptor, 0, 0, os.POSIX_FADV_RANDOM)
