"""An n-d mesh of ranks; its data axes carry different rows. Pure, without torch.

Mesh.of(8, tensor_parallel=2)   replicate 1 x shard 4 x sp 1 x tp 2: ranks 0 and 1 see the same rows, 2 and 3 the next
Mesh.of(8, fsdp_size=2)         replicate 4 x shard 2: every rank has its own rows, two share a copy of the model
Mesh.flat(range(8))             every rank has its own rows and model
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass

from verl.errors import ConfigError

DATA_AXES = ("replicate", "shard")  # ranks that differ in one of these train on different rows


@dataclass(frozen=True)
class Mesh:
    """`axes` are (name, size) from the slowest to the fastest; `ranks` are the world ranks in that (row-major) order.

    A rank's position in `ranks` is its index in the group. Ranks that differ only in axes that are not data axes form a
    model-parallel group: they get the same rows, and the one with coordinates 0 there answers for the group.

    >>> Mesh((("data", 2), ("tensor", 2)), ranks=(0, 1, 2, 3)).axes[1]
    ('tensor', 2)
    """

    axes: tuple[tuple[str, int], ...]
    ranks: tuple[int, ...]

    def __post_init__(self) -> None:
        assert math.prod(size for _, size in self.axes) == len(self.ranks), (self.axes, self.ranks)

    @classmethod
    def flat(cls, ranks: Sequence[int]) -> Mesh:
        """Every rank has different rows and all of the model."""
        return cls((("replicate", len(ranks)),), tuple(ranks))

    @classmethod
    def of(
        cls, ranks: int | Sequence[int], *, fsdp_size: int = -1, sequence_parallel: int = 1, tensor_parallel: int = 1
    ) -> Mesh:
        """The mesh of a training engine over the world ranks `ranks` (a number: the first so many). `fsdp_size` ranks share
        the shards of one copy (-1 or 0: all data-parallel ranks).

        Raises ConfigError when the sizes do not divide.
        """
        ranks = tuple(range(ranks)) if isinstance(ranks, int) else tuple(ranks)
        if min(sequence_parallel, tensor_parallel) < 1 or len(ranks) % (sequence_parallel * tensor_parallel):
            raise ConfigError(
                f"{len(ranks)} devices do not divide into groups of {sequence_parallel} (sequence parallel) x "
                f"{tensor_parallel} (tensor parallel). Change ulysses_sequence_parallel_size or tensor_parallel_size, or the "
                "number of devices."
            )
        num_data = len(ranks) // (sequence_parallel * tensor_parallel)
        shard = num_data if fsdp_size < 1 else fsdp_size
        if num_data % shard:
            raise ConfigError(
                f"fsdp_config.fsdp_size={fsdp_size} does not divide the {num_data} data-parallel ranks. Use -1 for one "
                f"shard group, or a divisor of {num_data}."
            )
        sizes = {"replicate": num_data // shard, "shard": shard, "sp": sequence_parallel, "tp": tensor_parallel}
        return cls.grid(ranks, **sizes)

    @classmethod
    def grid(cls, ranks: Sequence[int], **sizes: int) -> Mesh:
        """Axes by keyword, outermost first: `grid(range(8), replicate=1, shard=4, sp=1, tp=2)`."""
        return cls(tuple(sizes.items()), tuple(ranks))

    @property
    def size(self) -> int:
        """Ranks in the group."""
        return len(self.ranks)

    @property
    def dp_size(self) -> int:
        """Groups of ranks with different rows."""
        return math.prod(size for name, size in self.axes if name in DATA_AXES)

    def coordinate(self, index: int) -> dict[str, int]:
        """Axis name -> coordinate of the rank at `index`."""
        coordinates: dict[str, int] = {}
        for name, size in reversed(self.axes):
            index, coordinates[name] = divmod(index, size)
        return coordinates

    def dp_rank(self, index: int) -> int:
        """The number of the share of rows that the rank at `index` gets."""
        where, number = self.coordinate(index), 0
        for name, size in self.axes:
            if name in DATA_AXES:
                number = number * size + where[name]
        return number

    def answers(self, index: int) -> bool:
        """Whether the rank at `index` answers for its model-parallel group: its results are collected."""
        where = self.coordinate(index)
        return all(where[name] == 0 for name, _ in self.axes if name not in DATA_AXES)

    def collectors(self) -> list[int]:
        """Indices of the ranks that answer, in the order of their share of the rows."""
        return sorted((i for i in range(self.size) if self.answers(i)), key=self.dp_rank)
