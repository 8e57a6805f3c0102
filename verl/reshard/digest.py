"""Digests of numbers where they lie: quick enough to be taken of a whole model at every update of weights.

On a CPU it is XXH3 with 128 bits (xxhash.com): it reads a cache faster than memory is copied, where a cryptographic hash takes
several times as long as the copy. It guards against faults, not against somebody who forges weights. Numbers that are
copied anyway are digested in portions while they are in the cache.

On a GPU the bytes are taken as a matrix of words, and what is hashed are the sums of its rows and of its columns, modulo 2^64:
those need no kernel of our own, and a hash of all bytes would have to leave the GPU. Words that are others, or in another
order, have other sums, unless the changes cancel out in each row and each column, for which it takes four words at least. A
digest taken there is another one than that of the same numbers on a CPU.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence

import torch
import xxhash

DIGEST_BYTES = 16
PORTION_BYTES = 1 << 19  # copied and digested at a time: what is read and written stays in a cache, and calls are few
_DEVICE_BYTES = 1 << 25  # on a GPU: enough for a kernel
_WORD_BYTES = 8
_ROW_WORDS = 1023  # odd: if the sign bits of all words changed, sums of an even number would not show it


def digest(label: str, numbers: torch.Tensor) -> bytes:
    """Of a label (name and place), number format and bytes in order; the same for equal numbers of one shape wherever they
    lie in memory of one kind of device."""
    return _digest(label, numbers.dtype, _pieces(numbers.detach()))


def copy_with_digest(label: str, target: torch.Tensor, source: torch.Tensor) -> bytes:
    """Copy `source` into `target` of the same shape, cast on the way; returns the digest of what was written."""
    target, source = target.detach(), source.detach()
    if not (_is_on_host(target) and _is_on_host(source)):
        return digest(label, target.copy_(source))
    most = PORTION_BYTES // target.itemsize
    return _digest(label, target.dtype, (to.copy_(portion) for to, portion in _portions((target, source), most)))


def spread_with_digest(
    label: str, targets: Sequence[torch.Tensor], source: torch.Tensor, dtype: torch.dtype, portion_bytes: int
) -> bytes:
    """Cast `source` to `dtype` and copy that into all `targets` of its shape, into which others may write too; returns the
    digest of what was cast. At most `portion_bytes` of that are in memory at a time, or a row where tensors have gaps."""
    source = source.detach()
    if not _is_on_host(source):
        numbers = source.to(dtype)
        for target in targets:
            target.copy_(numbers)
        return digest(label, numbers)
    return _digest(label, dtype, _spread(targets, source, dtype, min(portion_bytes, PORTION_BYTES)))


def _spread(
    targets: Sequence[torch.Tensor], source: torch.Tensor, dtype: torch.dtype, portion_bytes: int
) -> Iterator[torch.Tensor]:
    cast = torch.empty(0, dtype=dtype)
    for portion, *places in _portions((source, *targets), max(1, portion_bytes // dtype.itemsize)):
        if portion.dtype == dtype and portion.is_contiguous():
            numbers = portion
        else:
            if cast.shape != portion.shape:
                cast = torch.empty(portion.shape, dtype=dtype)
            numbers = cast.copy_(portion)
        for place in places:
            place.copy_(numbers)
        yield numbers


def _digest(label: str, dtype: torch.dtype, pieces: Iterator[torch.Tensor]) -> bytes:
    found = xxhash.xxh3_128(f"{label} {dtype}".encode())
    for piece in pieces:
        found.update(_bytes(piece))
    return found.digest()


def _pieces(numbers: torch.Tensor) -> Iterator[torch.Tensor]:
    """What is hashed of numbers, in order."""
    on_host = _is_on_host(numbers)
    most = (PORTION_BYTES if on_host else _DEVICE_BYTES) // numbers.itemsize
    if on_host and numbers.is_contiguous():
        yield numbers
        return
    for (portion,) in _portions((numbers,), most, by_rows=True):
        if on_host:
            yield portion
        else:
            yield from _sums(portion)


def _sums(portion: torch.Tensor) -> Iterator[torch.Tensor]:
    """Of columns and rows of words, and the bytes that make no row."""
    flat = portion.contiguous().view(-1).view(torch.uint8)
    num_rows = flat.numel() // (_WORD_BYTES * _ROW_WORDS)
    stop = num_rows * _WORD_BYTES * _ROW_WORDS
    if num_rows:
        words = flat[:stop].clone() if flat.storage_offset() % _WORD_BYTES else flat[:stop]
        matrix = words.view(torch.int64).view(num_rows, _ROW_WORDS)
        yield torch.cat([matrix.sum(0), matrix.sum(1)])
    yield flat[stop:]


def _portions(
    tensors: Sequence[torch.Tensor], most: int, *, by_rows: bool = False
) -> Iterator[tuple[torch.Tensor, ...]]:
    """Views of tensors of one shape, side by side, in order, of at most `most` numbers: stretches where all are without gaps
    (not `by_rows`: that depends on the shape alone), else rows [some rows, columns], at least one."""
    first = tensors[0]
    if first.numel() <= most:
        yield tuple(tensors)
    elif not by_rows and all(tensor.is_contiguous() for tensor in tensors):
        yield from zip(*(tensor.view(-1).split(most) for tensor in tensors), strict=True)
    elif first.dim() > 2:
        for inner in zip(*tensors, strict=True):
            yield from _portions(inner, most, by_rows=by_rows)
    else:
        num_rows = max(1, most // (first.shape[1] if first.dim() == 2 else 1))
        yield from zip(*(tensor.split(num_rows) for tensor in tensors), strict=True)


def _is_on_host(numbers: torch.Tensor) -> bool:
    return numbers.device.type == "cpu"


def _bytes(numbers: torch.Tensor) -> memoryview:
    return numbers.contiguous().view(-1).cpu().view(torch.uint8).numpy().data
