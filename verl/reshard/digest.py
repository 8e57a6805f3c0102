"""Digests of numbers where they lie: quick enough to be taken of a whole model at every update of weights.

The bytes are taken as a matrix of words, and what is hashed are the sums of its rows and of its columns, modulo 2^64: a hash
of all bytes takes a processor core several times as long as copying them, the sums a fraction of it. Words that are others,
or in another order, have other sums, unless the changes cancel out in each row and each column. That takes four words at
least, at the corners of a rectangle; one, two or three words never do it. Numbers that are copied anyway are summed while
they are in the cache.
"""

from __future__ import annotations

import hashlib
from collections.abc import Iterable, Iterator

import torch

DIGEST_BYTES = 16
_WORD_BYTES = 8
_CACHED_WORDS, _DEVICE_WORDS = (
    1 << 15,
    1 << 22,
)  # summed at a time: few enough to stay in a cache, or enough for a kernel
_FOLDED_WORDS = 1 << 10  # of a row, where rows of the numbers themselves do not end where words do


def digest(label: str, numbers: torch.Tensor) -> bytes:
    """Of a label (name and place), number format and bytes in order; the same for equal numbers of one shape wherever they
    lie in memory."""
    numbers = numbers.detach()
    if _has_words(numbers):
        return _hash(label, numbers, _portions(numbers), numbers.new_empty(0))
    flat = numbers.reshape(-1)
    columns = _FOLDED_WORDS * _WORD_BYTES // flat.itemsize
    rows = flat.numel() // columns
    matrix = flat[: rows * columns].view(rows, columns)
    return _hash(label, matrix, _portions(matrix), flat[matrix.numel() :])


def copy_with_digest(label: str, target: torch.Tensor, source: torch.Tensor) -> bytes:
    """Copy `source` into `target` of the same shape, cast on the way; returns the digest of what was written."""
    target, source = target.detach(), source.detach()
    if target.device.type != "cpu" or source.device.type != "cpu" or not _has_words(target):
        return digest(label, target.copy_(source))
    return _hash(label, target, _copied(target, source), target.new_empty(0))


def _copied(target: torch.Tensor, source: torch.Tensor) -> Iterator[torch.Tensor]:
    for to, portion in zip(_portions(target), _portions(source, target.itemsize), strict=True):
        yield to.copy_(portion)


def _has_words(numbers: torch.Tensor) -> bool:
    """Whether the numbers are rows that end where words do."""
    return numbers.dim() > 1 and numbers.shape[-1] * numbers.itemsize % _WORD_BYTES == 0


def _portions(numbers: torch.Tensor, itemsize: int | None = None) -> Iterator[torch.Tensor]:
    """[some rows, columns] in order, as views; as many rows as make a portion with elements of `itemsize` bytes (default:
    their own)."""
    if numbers.numel() == 0:
        return
    if numbers.dim() > 2:
        for inner in numbers:
            yield from _portions(inner, itemsize)
        return
    most = _WORD_BYTES * (_CACHED_WORDS if numbers.device.type == "cpu" else _DEVICE_WORDS)
    yield from numbers.split(max(1, most // (itemsize or numbers.itemsize) // numbers.shape[1]))


def _hash(label: str, matrix: torch.Tensor, portions: Iterable[torch.Tensor], rest: torch.Tensor) -> bytes:
    """Of `matrix` [..., columns], which comes in `portions`, and of the bytes of `rest`.

    An odd number of rows is summed up to columns, and the first one apart where there is one more: if all of an even number
    had their sign bits changed, which are the uppermost ones, no sum would show it.
    """
    found = hashlib.blake2b(f"{label} {matrix.dtype}".encode(), digest_size=DIGEST_BYTES)
    if matrix.numel():
        rows, columns = [], torch.zeros((), dtype=torch.int64, device=matrix.device)
        apart = 1 - matrix.numel() // matrix.shape[-1] % 2
        for portion in portions:
            words = _words(portion)
            rows.append(words.sum(1))
            if apart:
                rows.append(words[0])
                words, apart = words[1:], 0
            columns = words.sum(0).add_(columns)
        found.update(_bytes(torch.cat([columns, *rows])))
    found.update(_bytes(rest))
    return found.digest()


def _words(portion: torch.Tensor) -> torch.Tensor:
    """The same memory as int64 [rows, words]; a copy where words do not begin at multiples of their size."""
    per_word = _WORD_BYTES // portion.itemsize
    if portion.stride(1) != 1 or portion.storage_offset() % per_word or portion.stride(0) % per_word:
        portion = portion.clone(memory_format=torch.contiguous_format)
    return portion.view(torch.int64)


def _bytes(numbers: torch.Tensor) -> bytes:
    return bytes(numbers.contiguous().cpu().view(torch.uint8).numpy().data)
