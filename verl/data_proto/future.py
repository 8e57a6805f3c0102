"""Batches that are still being made: put together and cut like batches, without waiting for them.

made = DataProtoFuture.concat([group_a.generate(x), group_b.generate(y)])   # both are under way
first, second = made.chunk(2)
first.get()                                                                 # waits for both, keeps the first half
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any, Generic, Protocol, TypeVar

from verl.data_proto.proto import DataProto

T = TypeVar("T")
T_co = TypeVar("T_co", covariant=True)


class Future(Protocol[T_co]):
    """The result of a call that may still be running elsewhere."""

    def get(self) -> T_co:
        """Wait for the result, with the deadline of the call. Raises the error of the call."""
        ...

    def ready(self) -> bool:
        """Whether `get` would return at once."""
        ...


@dataclass(frozen=True)
class Finished(Generic[T]):
    """The future of a call that has run already."""

    value: T

    def get(self) -> T:
        """The result."""
        return self.value

    def ready(self) -> bool:
        """Always true."""
        return True


@dataclass(frozen=True)
class DataProtoFuture:
    """`collect_fn` makes one batch of the values of `futures`; `dispatch_fn` takes a part of it (None: all of it).

    A future is anything with `get()` and `ready()`, such as the result of a worker group's call with `blocking=False`.
    The `get` of each future has its own deadline.
    """

    collect_fn: Callable[[list[Any]], DataProto]
    futures: Sequence[Any]
    dispatch_fn: Callable[[DataProto], DataProto] | None = None

    @staticmethod
    def concat(data: Sequence[object]) -> DataProtoFuture:
        """The rows of all, in this order."""
        return DataProtoFuture(DataProto.concat, list(data))

    def chunk(self, chunks: int) -> list[DataProtoFuture]:
        """`chunks` equal parts. Their `get` raises when the rows do not divide by that number."""
        return [DataProtoFuture(DataProto.concat, [self], partial(_chunk, chunks, index)) for index in range(chunks)]

    def ready(self) -> bool:
        """Whether `get` would return at once."""
        return all(future.ready() for future in self.futures)

    def get(self) -> DataProto:
        """Wait for all futures. Raises their errors."""
        batch = self.collect_fn([future.get() for future in self.futures])
        return batch if self.dispatch_fn is None else self.dispatch_fn(batch)


def _chunk(chunks: int, index: int, batch: DataProto) -> DataProto:
    return batch.chunk(chunks)[index]
