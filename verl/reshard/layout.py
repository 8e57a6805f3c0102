"""Layouts of the weights: the part of each tensor that a rank holds in training and in generation. Pure, without torch.

    training = TrainingLayout(Mesh.of(4, tensor_parallel=2))               # FSDP 2 x TP 2
    rollout = RolloutLayout(interval_engines(training, tensor_parallel=2))      # TP' 2 x DP' 2
    training.part(tensor, rank), rollout.part(tensor, rank)                # None if a rank holds nothing of it

Training (p-t-d of HybridFlow, arXiv:2409.19256, and more): pipeline stages hold layers; tensor parallel ranks shard one
dimension; expert parallel ranks divide the experts; FSDP ranks shard the result along dimension 0; replicas repeat it.
Generation (t_g-d_g): each engine is a tensor parallel group; experts are divided by the tensor parallel ranks, or lie
undivided on the ranks of separate groups.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import NamedTuple, Protocol

from verl.errors import ConfigError
from verl.parallel.mesh import Mesh
from verl.parallel.slices import Part, Span, chunk_span, even_span, take


@dataclass(frozen=True)
class Block:
    """A range of a sharded dimension that is divided evenly by itself. With `num_heads` it consists of undivided heads;
    with more ranks than heads, several ranks hold the same head."""

    size: int
    num_heads: int | None = None

    def span(self, num_ranks: int, index: int) -> Span:
        """The span of rank `index` of `num_ranks`. Raises ConfigError when the heads do not divide."""
        heads = self.num_heads
        if heads is None:
            return even_span(self.size, num_ranks, index)
        if num_ranks > heads and num_ranks % heads == 0:
            num_ranks, index = heads, index * heads // num_ranks
        if heads % num_ranks:
            raise ConfigError(
                f"{num_ranks} tensor parallel ranks do not divide {heads} attention or key-value heads. Choose a divisor of "
                "the number of heads, or a multiple."
            )
        first, stop = even_span(heads, num_ranks, index)
        return first * (self.size // heads), stop * (self.size // heads)


@dataclass(frozen=True)
class Tensor:
    """One parameter of the model, under its Hugging Face name.

    `itemsize` is the size in bytes of an element of the rollout's dtype: senders cast. `layers` are the decoder layers it
    belongs to, counted from 0; -1 is before the first one (embedding), the number of layers after the last (final norm, output
    projection), and a tied embedding is at both ends. Tensor parallel ranks shard `tensor_dim`, each of its `blocks` by itself
    if it is several matrices in one (gate|up, q|k|v). Experts are along dimension 0.

    >>> Tensor("model.layers.3.mlp.up_proj.weight", (1536, 576), layers=(3,), tensor_dim=0).itemsize
    2
    """

    name: str
    shape: tuple[int, ...]
    itemsize: int = 2
    layers: tuple[int, ...] = (0,)
    tensor_dim: int | None = None
    blocks: tuple[Block, ...] = ()
    is_expert: bool = False

    def __post_init__(self) -> None:
        assert not self.blocks or self.tensor_dim is not None, self
        assert not self.blocks or sum(b.size for b in self.blocks) == self.shape[self.tensor_dim or 0], self
        assert not (self.is_expert and self.tensor_dim == 0), self

    def tensor_spans(self, num_ranks: int, index: int) -> tuple[Span, ...]:
        """The spans of dimension `tensor_dim` on tensor parallel rank `index`."""
        assert self.tensor_dim is not None
        spans, start = [], 0
        for block in self.blocks or (Block(self.shape[self.tensor_dim]),):
            first, stop = block.span(num_ranks, index)
            spans.append((start + first, start + stop))
            start += block.size
        return tuple(span for span in spans if span[0] < span[1])


class Layout(Protocol):
    """Maps ranks to the parts of tensors that they hold."""

    @property
    def ranks(self) -> tuple[int, ...]:
        """World ranks, each once."""

    def stages_of(self, tensor: Tensor) -> tuple[int, ...]:
        """The pipeline stages that hold `tensor`."""

    def part(self, tensor: Tensor, rank: int) -> Part | None:
        """The part of `tensor` on `rank`; None for nothing."""


@dataclass(frozen=True)
class OnRanks:
    """`layout` restricted to some ranks: those with weights in their own memory."""

    layout: Layout
    ranks: tuple[int, ...]

    def stages_of(self, tensor: Tensor) -> tuple[int, ...]:
        return self.layout.stages_of(tensor)

    def part(self, tensor: Tensor, rank: int) -> Part | None:
        return self.layout.part(tensor, rank) if rank in self.ranks else None


class Coordinates(NamedTuple):
    """Position of a training rank. `fsdp` counts shard and sequence parallel ranks together: all of them hold shards."""

    stage: int
    replicate: int
    fsdp: int
    tensor: int
    expert: int
    expert_fsdp: int


@dataclass(frozen=True)
class TrainingLayout:
    """`mesh` has axes among replicate, shard, sp, pp, tp, in any order. Experts are divided over `expert_parallel`
    neighbours of the FSDP ranks, or of the replicas if there is no FSDP. Raises ConfigError when sizes do not divide."""

    mesh: Mesh
    expert_parallel: int = 1
    layers_per_stage: tuple[int, ...] = ()  # needed with a pipeline only

    def __post_init__(self) -> None:
        if max(self.num_stages, len(self.layers_per_stage)) > 1 and self.num_stages != len(self.layers_per_stage):
            raise ConfigError(
                f"layers_per_stage={list(self.layers_per_stage)} must give the number of layers of each of the "
                f"{self.num_stages} pipeline stages."
            )
        over = self.num_fsdp if self.num_fsdp > 1 else self._size("replicate")
        if self.expert_parallel < 1 or over % self.expert_parallel:
            raise ConfigError(
                f"expert_parallel_size={self.expert_parallel} does not divide the {over} ranks that the experts would be "
                "divided over; choose a divisor."
            )

    @property
    def ranks(self) -> tuple[int, ...]:
        return self.mesh.ranks

    @property
    def num_stages(self) -> int:
        return self._size("pp")

    @property
    def num_fsdp(self) -> int:
        """Number of ranks that share one replica."""
        return self._size("shard") * self._size("sp")

    def stages_of(self, tensor: Tensor) -> tuple[int, ...]:
        return stages_of_layers(tensor.layers, self.layers_per_stage)

    def coordinates(self, rank: int) -> Coordinates:
        """Position of `rank`, one of `ranks`."""
        return self._coordinates[rank]

    def part(self, tensor: Tensor, rank: int) -> Part | None:
        at = self._coordinates.get(rank)
        if at is None or at.stage not in self.stages_of(tensor):
            return None
        spans: list[tuple[Span, ...]] = [((0, size),) for size in tensor.shape]
        self._divide(spans, tensor, at)
        return part_of(spans)

    def _divide(self, spans: list[tuple[Span, ...]], tensor: Tensor, at: Coordinates) -> None:
        by_expert = tensor.is_expert and self.expert_parallel > 1
        if by_expert:
            spans[0] = (even_span(tensor.shape[0], self.expert_parallel, at.expert),)
        if tensor.tensor_dim is not None and not tensor.is_expert:
            spans[tensor.tensor_dim] = tensor.tensor_spans(self._size("tp"), at.tensor)
        # 0 for experts that replicas divide: they have no shards
        num_shards = self.num_fsdp // self.expert_parallel if by_expert else self.num_fsdp
        if num_shards > 1:
            rows = sum(stop - first for first, stop in spans[0])
            shard = chunk_span(rows, num_shards, at.expert_fsdp if by_expert else at.fsdp)
            spans[0] = take(spans[0], *shard)

    @cached_property
    def _coordinates(self) -> dict[int, Coordinates]:
        return {rank: self._coordinates_of(index) for index, rank in enumerate(self.mesh.ranks)}

    def _coordinates_of(self, index: int) -> Coordinates:
        at = self.mesh.coordinate(index)
        replicate, fsdp = at.get("replicate", 0), at.get("shard", 0) * self._size("sp") + at.get("sp", 0)
        expert_fsdp, expert = divmod(fsdp, self.expert_parallel)
        if self.num_fsdp == 1:
            expert_fsdp, expert = 0, replicate % self.expert_parallel
        return Coordinates(at.get("pp", 0), replicate, fsdp, at.get("tp", 0), expert, expert_fsdp)

    def _size(self, axis: str) -> int:
        return dict(self.mesh.axes).get(axis, 1)


@dataclass(frozen=True)
class RolloutLayout:
    """`engines[engine][index]` is the world rank that generates there: DP' engines of TP' ranks. Every engine has a copy
    of the complete model.

    Experts are divided like other tensors, or, with `expert_groups`, undivided and spread over the ranks of each
    group. Raises ConfigError when a rank appears twice, or engines differ in size.
    """

    engines: tuple[tuple[int, ...], ...]
    expert_groups: tuple[tuple[int, ...], ...] = ()

    def __post_init__(self) -> None:
        if len(set(map(len, self.engines))) != 1:
            raise ConfigError(f"The rollout engines {self.engines} differ in size; give each as many ranks.")
        for places in (self.ranks, tuple(rank for group in self.expert_groups for rank in group)):
            if len(set(places)) != len(places):
                raise ConfigError(
                    f"The rollout places {sorted(places)} contain a rank twice; give each rank one place."
                )

    @cached_property
    def ranks(self) -> tuple[int, ...]:
        return tuple(sorted(rank for engine in self.engines for rank in engine))

    def stages_of(self, tensor: Tensor) -> tuple[int, ...]:
        return (0,)

    def part(self, tensor: Tensor, rank: int) -> Part | None:
        if rank not in self._places:
            return None
        spans: list[tuple[Span, ...]] = [((0, size),) for size in tensor.shape]
        if tensor.is_expert and rank in self._expert_places:
            spans[0] = (even_span(tensor.shape[0], *self._expert_places[rank]),)
        elif tensor.tensor_dim is not None:
            spans[tensor.tensor_dim] = tensor.tensor_spans(*self._places[rank])
        return part_of(spans)

    @cached_property
    def _places(self) -> dict[int, tuple[int, int]]:
        return _places(self.engines)

    @cached_property
    def _expert_places(self) -> dict[int, tuple[int, int]]:
        return _places(self.expert_groups)


@dataclass(frozen=True)
class MegatronLayout(TrainingLayout):
    """Weights that Megatron trains. `mesh` has the axes pp, replicate, tp, as Megatron numbers ranks. `layers_per_stage` has an
    entry for each virtual stage; stage i is on the ranks of pp coordinate i % pp. Each expert is divided over
    `expert_tensor_parallel` neighbours of a stage, and the experts over `expert_parallel` such groups. The vocabulary is
    divided as if padded to equal parts."""

    expert_tensor_parallel: int = 1

    def __post_init__(self) -> None:
        assert len(self.layers_per_stage) % self.num_stages == 0, self  # sizes come from a section `megatron`

    def stages_of(self, tensor: Tensor) -> tuple[int, ...]:
        return tuple(sorted({i % self.num_stages for i in stages_of_layers(tensor.layers, self.layers_per_stage)}))

    def _divide(self, spans: list[tuple[Span, ...]], tensor: Tensor, at: Coordinates) -> None:
        num_tensor = self._size("tp")
        if tensor.is_expert:
            group, index = divmod(at.replicate * num_tensor + at.tensor, self.expert_tensor_parallel)
            spans[0] = (even_span(tensor.shape[0], self.expert_parallel, group % self.expert_parallel),)
            if tensor.tensor_dim is not None:
                spans[tensor.tensor_dim] = tensor.tensor_spans(self.expert_tensor_parallel, index)
        elif tensor.tensor_dim is not None and tensor.blocks:
            spans[tensor.tensor_dim] = tensor.tensor_spans(num_tensor, at.tensor)
        elif tensor.tensor_dim is not None:
            spans[tensor.tensor_dim] = (chunk_span(tensor.shape[tensor.tensor_dim], num_tensor, at.tensor),)


def replicas(mesh: Mesh) -> Mesh:
    """`mesh` with the axes pp, replicate, tp: ranks that share the tokens of a micro-batch have the same weights."""
    sizes = dict(mesh.axes)
    num_copies = mesh.size // (sizes["pp"] * sizes["tp"])
    return Mesh.grid(mesh.ranks, pp=sizes["pp"], replicate=num_copies, tp=sizes["tp"])


def _places(groups: tuple[tuple[int, ...], ...]) -> dict[int, tuple[int, int]]:
    """Rank -> (size of its group, place in it)."""
    return {rank: (len(group), index) for group in groups for index, rank in enumerate(group)}


def part_of(spans: Sequence[tuple[Span, ...]]) -> Part | None:
    """The product of `spans`; None if it is empty."""
    part = Part(tuple(tuple(span for span in dim if span[0] < span[1]) for dim in spans))
    return part if part.numel else None


def stages_of_layers(layers: tuple[int, ...], layers_per_stage: tuple[int, ...]) -> tuple[int, ...]:
    """The stages that hold `layers`; tensors before the first and after the last layer are on the first and last stage."""
    stages = set()
    for layer in layers:
        stage, stop = 0, 0
        for number, count in enumerate(layers_per_stage):
            stop += count
            stage = number
            if layer < stop:
                break
        stages.add(stage)
    return tuple(sorted(stages))
