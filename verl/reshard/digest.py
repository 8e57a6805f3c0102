"""Digests of numbers where they lie: quick enough to be taken of a whole model at every update of weights.

The bytes are taken as a matrix of words, and what is hashed are the sums of its rows and of its columns, modulo 2^64: a hash
of all bytes takes a processor core several times as long as copying them, the sums a fraction of it. Words that are others,
or in another order, have other sums, unless the changes cancel out in each row and each column. That takes four words at
least, at the corners of a rectangle; one, two or three words never do it. Numbers that are copied anyway are summed while
they are in the cache.
"""

from __future__ import annotations

import hashlib
import math
from collections.abc import Iterable, Iterator, Sequence

import torch

DIGEST_BYTES = 16
_WORD_BYTES = 8
PORTION_BYTES = 1 << 20  # summed at a time: few enough to stay in a cache, and few calls
_DEVICE_BYTES = 1 << 25  # on a GPU: enough for a kernel
_FOLDED_WORDS = 1 << 10  # of a row, where rows of the numbers themselves do not end where words do


def digest(label: str, numbers: torch.Tensor) -> bytes:
    """Of a label (name and place), number format and bytes in order; the same for equal numbers of one shape wherever they
    lie in memory."""
    numbers = numbers.detach()
    if _has_words(numbers.shape, numbers.dtype):
        return _hash(label, numbers.shape, numbers.dtype, _portions(numbers))
    flat = numbers.reshape(-1)
    columns = _FOLDED_WORDS * _WORD_BYTES // flat.itemsize
    rows = flat.numel() // columns
    if rows == 0:
        return _hash(label, flat.shape, flat.dtype, (), _bytes(flat))
    matrix = flat[: rows * columns].view(rows, columns)
    return _hash(label, matrix.shape, flat.dtype, _portions(matrix), _bytes(flat[matrix.numel() :]))


def copy_with_digest(label: str, target: torch.Tensor, source: torch.Tensor) -> bytes:
    """Copy `source` into `target` of the same shape, cast on the way; returns the digest of what was written."""
    target, source = target.detach(), source.detach()
    if target.device.type != "cpu" or source.device.type != "cpu" or not _has_words(target.shape, target.dtype):
        return digest(label, target.copy_(source))
    return _hash(label, target.shape, target.dtype, _copied(target, source))


def spread_with_digest(
    label: str, targets: Sequence[torch.Tensor], source: torch.Tensor, dtype: torch.dtype, portion_bytes: int
) -> bytes:
    """Cast `source` to `dtype` and copy that into all `targets` of its shape, into which others may write too; returns the
    digest of what was cast. At most `portion_bytes` of it, or a row, are in memory at a time where rows end with words."""
    source = source.detach()
    if source.device.type != "cpu" or not _has_words(source.shape, dtype):
        numbers = source.to(dtype)
        for target in targets:
            target.copy_(numbers)
        return digest(label, numbers)
    return _hash(label, source.shape, dtype, _spread(targets, source, dtype, portion_bytes))


def _copied(target: torch.Tensor, source: torch.Tensor) -> Iterator[torch.Tensor]:
    for to, portion in zip(_portions(target), _portions(source, target.itemsize), strict=True):
        yield to.copy_(portion)


def _spread(
    targets: Sequence[torch.Tensor], source: torch.Tensor, dtype: torch.dtype, portion_bytes: int
) -> Iterator[torch.Tensor]:
    size, most = dtype.itemsize, min(portion_bytes, PORTION_BYTES)
    cast = torch.empty(0, dtype=dtype)
    for portion, *places in zip(*(_portions(t, size, most) for t in (source, *targets)), strict=True):
        if portion.dtype == dtype:
            numbers = portion
        else:
            if cast.shape != portion.shape:
                cast = torch.empty(portion.shape, dtype=dtype)
            numbers = cast.copy_(portion)
        for place in places:
            place.copy_(numbers)
        yield numbers


def _has_words(shape: torch.Size, dtype: torch.dtype) -> bool:
    """Whether numbers are rows that end where words do."""
    return len(shape) > 1 and shape[-1] * dtype.itemsize % _WORD_BYTES == 0


def _portions(
    numbers: torch.Tensor, itemsize: int | None = None, most_bytes: int | None = None
) -> Iterator[torch.Tensor]:
    """[some rows, columns] in order, as views; as many rows as make a portion with elements of `itemsize` bytes (default:
    their own)."""
    if numbers.numel() == 0:
        return
    if numbers.dim() > 2:
        for inner in numbers:
            yield from _portions(inner, itemsize, most_bytes)
        return
    most = most_bytes or (PORTION_BYTES if numbers.device.type == "cpu" else _DEVICE_BYTES)
    num_rows = max(1, most // (itemsize or numbers.itemsize) // numbers.shape[1])
    yield from numbers.split(num_rows) if num_rows < len(numbers) else (numbers,)


def _hash(
    label: str, shape: torch.Size, dtype: torch.dtype, portions: Iterable[torch.Tensor], rest: bytes | memoryview = b""
) -> bytes:
    """Of numbers [..., columns], which come in `portions`, and of `rest`.

    An odd number of rows is summed up to columns, and the first one apart where there is one more: if all of an even number
    had their sign bits changed, which are the uppermost ones, no sum would show it.
    """
    found = hashlib.blake2b(f"{label} {dtype}".encode(), digest_size=DIGEST_BYTES)
    apart: list[torch.Tensor] = []
    columns: torch.Tensor | None = None
    rows = []
    for portion in portions:
        words = _words(portion)
        rows.append(words.sum(1))
        if columns is None and math.prod(shape[:-1]) % 2 == 0:
            apart = [words[0].clone()]
            words = words[1:]
        columns = words.sum(0) if columns is None else columns.add_(words.sum(0))
    if columns is not None:
        found.update(_bytes(torch.cat([columns, *apart, *rows])))
    found.update(rest)
    return found.digest()


def _words(portion: torch.Tensor) -> torch.Tensor:
    """The same memory as int64 [rows, words]; a copy where words do not begin at multiples of their size."""
    per_word = _WORD_BYTES // portion.itemsize
    if portion.stride(1) != 1 or portion.storage_offset() % per_word or portion.stride(0) % per_word:
        portion = portion.clone(memory_format=torch.contiguous_format)
    return portion.view(torch.int64)


def _bytes(numbers: torch.Tensor) -> memoryview:
    return numbers.contiguous().cpu().view(torch.uint8).numpy().data
