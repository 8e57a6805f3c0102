"""The order of prompts: a pure function of (seed, epoch), so that a run can be resumed at any prompt without state;
or the order of a sampler of the user's (`data.sampler`), with its state."""

from __future__ import annotations

import logging
from collections.abc import Callable, Iterator, Mapping, Sized
from dataclasses import dataclass
from functools import lru_cache, partial
from typing import TYPE_CHECKING, Any

import numpy as np

from verl.errors import ConfigError, DataError, FewRowsError
from verl.registry import load_object
from verl.user_objects import require_call

if TYPE_CHECKING:
    from verl.config import DataConfig, PPOConfig
    from verl.data_proto.proto import DataProto


def prompts_per_generation(config: PPOConfig) -> int:
    """Prompts per generation: data.gen_batch_size if set and a group filter may drop some, else data.train_batch_size."""
    return int((config.algorithm.filter_groups.enable and config.data.gen_batch_size) or config.data.train_batch_size)


# A permutation of up to so many rows is a table, as in all versions. Larger ones, of 64 MiB and more for each epoch, are
# computed place by place.
NUM_LISTED = 1 << 23
_ROUNDS = 8
_WORD = (1 << 64) - 1


@lru_cache(maxsize=4)
def _permutation(num_rows: int, seed: int, epoch: int) -> np.ndarray:
    # raw 64-bit samples and a stable sort: unlike Generator.permutation, both stay the same across versions of numpy
    keys = np.random.Philox(key=np.array([seed % 2**64, epoch], dtype=np.uint64)).random_raw(num_rows)
    return np.argsort(keys, kind="stable")


def _keyed_place(num_rows: int, seed: int, epoch: int, place: int) -> int:
    """The row at a place of the epoch, by a Feistel network over 2 * `half` bits; numbers that are no rows are mapped again."""
    half = ((num_rows - 1).bit_length() + 1) // 2
    mask, keys = (1 << half) - 1, _round_keys(seed, epoch)
    while True:
        high, low = place >> half, place & mask
        for key in keys:
            mixed = ((low ^ key) * 0xBF58476D1CE4E5B9) & _WORD  # the finalizer of SplitMix64
            mixed = ((mixed ^ (mixed >> 27)) * 0x94D049BB133111EB) & _WORD
            high, low = low, high ^ ((mixed ^ (mixed >> 31)) & mask)
        place = high << half | low
        if place < num_rows:
            return place


@lru_cache(maxsize=4)
def _round_keys(seed: int, epoch: int) -> list[int]:
    keys: list[int] = (
        np.random.Philox(key=np.array([seed % 2**64, epoch], dtype=np.uint64)).random_raw(_ROUNDS).tolist()
    )
    return keys


@dataclass(frozen=True)
class PromptOrder:
    """Maps a prompt index to its row. With `shuffle` each epoch has a different order, keyed by (seed, epoch). Every epoch
    leaves out its incomplete last batch of `batch_size` prompts."""

    num_rows: int
    seed: int
    shuffle: bool
    batch_size: int = 1

    def __post_init__(self) -> None:
        if not 1 <= self.batch_size <= self.num_rows:
            raise ValueError(f"Batches of {self.batch_size} prompts cannot be made of {self.num_rows} rows.")

    @property
    def rows_per_epoch(self) -> int:
        return self.num_rows - self.num_rows % self.batch_size

    def row(self, ordinal: int) -> tuple[int, int]:
        """(epoch, row) of prompt index `ordinal`; all three count from 0."""
        epoch, place = divmod(ordinal, self.rows_per_epoch)
        if not self.shuffle:
            return epoch, place
        if self.num_rows > NUM_LISTED:
            return epoch, _keyed_place(self.num_rows, self.seed, epoch, place)
        return epoch, int(_permutation(self.num_rows, self.seed, epoch)[place])


log = logging.getLogger(__name__)


class SamplerOrder:
    """Maps a prompt index to its row, as PromptOrder does, in the order of a torch sampler's iterator. Rows are read when they
    are asked for, so a curriculum sampler with `update(batch)`, called after each step, chooses the next step's rows."""

    def __init__(self, make_sampler: Callable[[], Any], num_rows: int, batch_size: int):
        self._make_sampler, self.num_rows = make_sampler, num_rows
        sampler = self.sampler = make_sampler()
        self.rows_per_epoch = len(sampler) - len(sampler) % batch_size
        if self.rows_per_epoch == 0:
            raise FewRowsError(len(sampler), batch_size, f" (the rows of {type(sampler).__name__}, data.sampler)")
        self._rows: list[int] = []  # rows of the prompts from `_first` on
        self._first = 0
        self._epoch_rows: Iterator[int] | None = None

    def row(self, ordinal: int) -> tuple[int, int]:
        """(epoch, row) of prompt index `ordinal`, from 0. Raises DataError when the sampler ends early or gives no row."""
        if ordinal < self._first:
            raise DataError(f"data.sampler: prompt {ordinal} was read before the checkpoint; it cannot be read again.")
        while ordinal >= self._first + len(self._rows):
            self._rows.append(self._next())
        return ordinal // self.rows_per_epoch, self._rows[ordinal - self._first]

    def update(self, batch: DataProto) -> None:
        if hasattr(self.sampler, "update"):
            self.sampler.update(batch)

    def state_dict(self, cursor: int) -> dict[str, object]:
        """JSON: the rows from prompt `cursor` on that were read already, and the sampler's own `state_dict()` if it has one."""
        sampler_state = self.sampler.state_dict() if hasattr(self.sampler, "state_dict") else None
        return {"first": cursor, "rows": self._rows[cursor - self._first :], "sampler": sampler_state}

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Continue behind the rows that were read. A sampler without `load_state_dict` is read from its start to that place:
        the same rows, unless training has changed it."""
        num_read = state["first"] + len(state["rows"])
        self.sampler, self._first, self._rows, self._epoch_rows = self._make_sampler(), 0, [], None
        if state["sampler"] is not None and hasattr(self.sampler, "load_state_dict"):
            self.sampler.load_state_dict(state["sampler"])
        else:
            if hasattr(self.sampler, "update"):
                log.warning(
                    "data.sampler: %s has update() but no state_dict(): what it has learnt from %d prompts is lost.",
                    type(self.sampler).__name__,
                    num_read,
                )
            while len(self._rows) < num_read:
                self._rows.append(self._next())
        self._first, self._rows = state["first"], list(state["rows"])

    def _next(self) -> int:
        number = self._first + len(self._rows)
        if number % self.rows_per_epoch == 0 or self._epoch_rows is None:
            self._epoch_rows = iter(self.sampler)
        try:
            row = int(next(self._epoch_rows))
        except StopIteration:
            raise DataError(
                f"data.sampler: {type(self.sampler).__name__} ended after {number % self.rows_per_epoch} of the "
                f"{len(self.sampler)} rows that its length promises."
            ) from None
        if not 0 <= row < self.num_rows:
            raise DataError(
                f"data.sampler: {type(self.sampler).__name__} gave row {row}; there are {self.num_rows} rows."
            )
        return row


def sampler_class(path: str, name: str | None) -> Any:
    """The class `name` at `path`. Raises ConfigError when it is not a sampler."""
    sampler = load_object(f"{path}:{name}")
    if not (isinstance(sampler, type) and hasattr(sampler, "__iter__") and hasattr(sampler, "__len__")):
        raise ConfigError(
            f"data.sampler: {path}:{name} must be a class with __iter__ (rows of the data by number) and __len__, such as a "
            "subclass of verl.experimental.dataset.sampler.AbstractSampler."
        )
    require_call(f"data.sampler: {path}:{name}", sampler, keywords=("data_source", "data_config"))
    return sampler


def load_sampler(path: str, name: str | None, rows: Sized, config: DataConfig) -> Any:
    """A sampler for `rows`, of the class `name` at `path`. Raises ConfigError."""
    sampler = sampler_class(path, name)
    try:
        return sampler(data_source=rows, data_config=config)
    except Exception as error:  # a user's class may raise anything
        raise ConfigError(f"data.sampler: {path}:{name} cannot be made: {type(error).__name__}: {error}") from error


def order_of(rows: Sized, config: DataConfig) -> PromptOrder | SamplerOrder:
    """The order of the rows that `config` asks for. Raises ConfigError for a sampler that cannot be made, FewRowsError if it
    has too few rows, DataError if its first row does not exist."""
    sampler = config.sampler
    if not sampler.class_path:
        return PromptOrder(len(rows), config.seed if config.seed is not None else 42, config.shuffle)
    make = partial(load_sampler, sampler.class_path, sampler.class_name, rows, config)
    order = SamplerOrder(make, len(rows), config.train_batch_size)
    order.row(0)
    return order
