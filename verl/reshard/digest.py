"""Digests of tensors on their device, fast enough for a model at every weight sync.

On a CPU the digest is XXH3 with 128 bits (xxhash.com): it reads a cache faster than memory is copied, while a cryptographic
hash takes several times as long as the copy. It detects faults, not forgery. Values that are copied anyway are hashed in
chunks while they are in the cache.

On a GPU the bytes form a matrix of words, and the hash is of its row and column sums modulo 2^64. That needs no custom kernel,
and only the sums leave the GPU. Changed or reordered words change the sums, unless the changes cancel in each row and each
column: at least four words. The digest differs from a CPU's digest of the same values.
"""

from collections.abc import Iterator, Sequence

import torch
import xxhash

DIGEST_BYTES = 16
CHUNK_BYTES = 1 << 19  # copied and hashed at a time: fits a cache, and calls are few
_DEVICE_BYTES = 1 << 25  # on a GPU: enough work for a kernel
_WORD_BYTES = 8
_ROW_WORDS = 1023  # odd: sums of an even number would not change if the sign bits of all words did


def digest(label: str, values: torch.Tensor) -> bytes:
    """Digest of a label (name and place), dtype and bytes in order; equal for equal values of one shape on one kind of device,
    with any strides."""
    return _digest(label, values.dtype, _hashed(values.detach()))


def copy_with_digest(label: str, target: torch.Tensor, source: torch.Tensor) -> bytes:
    """Copy and cast `source` into `target` of the same shape; returns the digest of the written values."""
    target, source = target.detach(), source.detach()
    if not (_is_on_host(target) and _is_on_host(source)):
        return digest(label, target.copy_(source))
    size = CHUNK_BYTES // target.itemsize
    return _digest(label, target.dtype, (to.copy_(chunk) for to, chunk in _chunks((target, source), size)))


def spread_with_digest(
    label: str, targets: Sequence[torch.Tensor], source: torch.Tensor, dtype: torch.dtype, chunk_bytes: int
) -> bytes:
    """Cast `source` to `dtype` and copy it into all `targets` of its shape (shared with other writers); returns the digest of
    the cast values. At most `chunk_bytes` of them are in memory at a time, or one row of strided tensors."""
    source = source.detach()
    if not _is_on_host(source):
        values = source.to(dtype)
        for target in targets:
            target.copy_(values)
        return digest(label, values)
    return _digest(label, dtype, _spread(targets, source, dtype, min(chunk_bytes, CHUNK_BYTES)))


def _spread(
    targets: Sequence[torch.Tensor], source: torch.Tensor, dtype: torch.dtype, chunk_bytes: int
) -> Iterator[torch.Tensor]:
    cast = torch.empty(0, dtype=dtype)
    for chunk, *places in _chunks((source, *targets), max(1, chunk_bytes // dtype.itemsize)):
        if chunk.dtype == dtype and chunk.is_contiguous():
            values = chunk
        else:
            if cast.shape != chunk.shape:
                cast = torch.empty(chunk.shape, dtype=dtype)
            values = cast.copy_(chunk)
        for place in places:
            place.copy_(values)
        yield values


def _digest(label: str, dtype: torch.dtype, chunks: Iterator[torch.Tensor]) -> bytes:
    hasher = xxhash.xxh3_128(f"{label} {dtype}".encode())
    for chunk in chunks:
        hasher.update(chunk.contiguous().view(-1).cpu().view(torch.uint8).numpy().data)
    return hasher.digest()


def _hashed(values: torch.Tensor) -> Iterator[torch.Tensor]:
    """The tensors that are hashed for `values`, in order."""
    on_host = _is_on_host(values)
    size = (CHUNK_BYTES if on_host else _DEVICE_BYTES) // values.itemsize
    if on_host and values.is_contiguous():
        yield values
        return
    for (chunk,) in _chunks((values,), size, by_rows=True):
        if on_host:
            yield chunk
        else:
            yield from _sums(chunk)


def _sums(chunk: torch.Tensor) -> Iterator[torch.Tensor]:
    """Sums of the columns and rows of words, and the bytes after the last full row."""
    flat = chunk.contiguous().view(-1).view(torch.uint8)
    num_rows = flat.numel() // (_WORD_BYTES * _ROW_WORDS)
    stop = num_rows * _WORD_BYTES * _ROW_WORDS
    if num_rows:
        words = flat[:stop].clone() if flat.storage_offset() % _WORD_BYTES else flat[:stop]
        matrix = words.view(torch.int64).view(num_rows, _ROW_WORDS)
        yield torch.cat([matrix.sum(0), matrix.sum(1)])
    yield flat[stop:]


def _chunks(tensors: Sequence[torch.Tensor], size: int, *, by_rows: bool = False) -> Iterator[tuple[torch.Tensor, ...]]:
    """Views of tensors of one shape, in parallel and in order, of at most `size` values: flat ranges if all are
    contiguous (unless `by_rows`: then the cut depends only on the shape), else rows [some rows, columns], at least one."""
    first = tensors[0]
    if first.numel() <= size:
        yield tuple(tensors)
    elif not by_rows and all(tensor.is_contiguous() for tensor in tensors):
        yield from zip(*(tensor.view(-1).split(size) for tensor in tensors), strict=True)
    elif first.dim() > 2:
        for inner in zip(*tensors, strict=True):
            yield from _chunks(inner, size, by_rows=by_rows)
    else:
        num_rows = max(1, size // (first.shape[1] if first.dim() == 2 else 1))
        yield from zip(*(tensor.split(num_rows) for tensor in tensors), strict=True)


def _is_on_host(values: torch.Tensor) -> bool:
    return values.device.type == "cpu"
