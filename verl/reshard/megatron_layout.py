"""The layout of weights Megatron trains: interleaved stages, and experts over separate rank groups. Pure, without torch."""

from __future__ import annotations

from dataclasses import dataclass

from verl.parallel.mesh import Mesh
from verl.parallel.slices import Part, Span, chunk_span, even_span
from verl.reshard.layout import Tensor, TrainingLayout, part_of, stages_of_layers


def replicas(mesh: Mesh) -> Mesh:
    """`mesh` with the axes pp, replicate, tp: ranks that share the tokens of a micro-batch have the same weights."""
    sizes = dict(mesh.axes)
    num_copies = mesh.size // (sizes["pp"] * sizes["tp"])
    return Mesh.grid(mesh.ranks, pp=sizes["pp"], replicate=num_copies, tp=sizes["tp"])


@dataclass(frozen=True)
class MegatronLayout(TrainingLayout):
    """`mesh` has the axes pp, replicate, tp, as Megatron numbers ranks. `layers_per_stage` has an entry for each virtual stage;
    stage i is on the ranks of pp coordinate i % pp. Each expert is divided over `expert_tensor_parallel` neighbours of a stage,
    and the experts over `expert_parallel` such groups. The vocabulary is divided as if padded to equal parts."""

    expert_tensor_parallel: int = 1

    def __post_init__(self) -> None:
        assert len(self.layers_per_stage) % self.num_stages == 0, self  # sizes come from a section `megatron`

    def stages_of(self, tensor: Tensor) -> tuple[int, ...]:
        return tuple(sorted({i % self.num_stages for i in stages_of_layers(tensor.layers, self.layers_per_stage)}))

    def part(self, tensor: Tensor, rank: int) -> Part | None:
        if rank not in self.ranks:
            return None
        at, num_tensor = self.coordinates(rank), dict(self.mesh.axes)["tp"]
        if at.stage not in self.stages_of(tensor):
            return None
        spans: list[tuple[Span, ...]] = [((0, size),) for size in tensor.shape]
        if tensor.is_expert:
            group, index = divmod(at.replicate * num_tensor + at.tensor, self.expert_tensor_parallel)
            spans[0] = (even_span(tensor.shape[0], self.expert_parallel, group % self.expert_parallel),)
            if tensor.tensor_dim is not None:
                spans[tensor.tensor_dim] = tensor.tensor_spans(self.expert_tensor_parallel, index)
        elif tensor.tensor_dim is not None and tensor.blocks:
            spans[tensor.tensor_dim] = tensor.tensor_spans(num_tensor, at.tensor)
        elif tensor.tensor_dim is not None:
            spans[tensor.tensor_dim] = (chunk_span(tensor.shape[tensor.tensor_dim], num_tensor, at.tensor),)
        return part_of(spans)
