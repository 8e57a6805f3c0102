"""The part of each tensor of a checkpoint on this rank, and its place: from Hugging Face names to Megatron's parameters.

Megatron joins queries, keys and values, and gate and up, in one parameter each; here such a parameter is blocks of rows, and
each block is this rank's part of one tensor. The embedding is padded to equal parts of the vocabulary; padding is left out.
"""

import itertools
import math
import re
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import nn

from verl.models.rounding import Region
from verl.parallel.slices import Span, chunk_span, divided_dim, take

Spans = tuple[tuple[Span, ...], ...]  # of each dimension, concatenated in the local tensor

_LATENT = (
    "q_proj",
    "q_a_proj",
    "q_a_layernorm",
    "q_b_proj",
    "kv_a_proj_with_mqa",
    "kv_a_layernorm",
    "kv_b_proj",
    "o_proj",
)
_LAYER = {  # Megatron's name below a layer -> names in transformers, in the order of rows
    "input_layernorm.weight": ("input_layernorm.weight",),
    "self_attention.linear_qkv.weight": tuple(f"self_attn.{x}_proj.weight" for x in "qkv"),
    "self_attention.linear_qkv.bias": tuple(f"self_attn.{x}_proj.bias" for x in "qkv"),
    "self_attention.linear_proj.weight": ("self_attn.o_proj.weight",),
    **{f"self_attention.{name}.weight": (f"self_attn.{name}.weight",) for name in _LATENT},
    "self_attention.q_layernorm.weight": ("self_attn.q_norm.weight",),
    "self_attention.k_layernorm.weight": ("self_attn.k_norm.weight",),
    "pre_mlp_layernorm.weight": ("post_attention_layernorm.weight",),
    "mlp.linear_fc1.weight": ("mlp.gate_proj.weight", "mlp.up_proj.weight"),
    "mlp.linear_fc2.weight": ("mlp.down_proj.weight",),
    "mlp.router.weight": ("mlp.gate.weight",),
    "mlp.shared_experts.linear_fc1.weight": (
        "mlp.shared_experts.gate_proj.weight",
        "mlp.shared_experts.up_proj.weight",
    ),
    "mlp.shared_experts.linear_fc2.weight": ("mlp.shared_experts.down_proj.weight",),
    "mlp.experts.gate_up_proj": ("mlp.experts.gate_up_proj",),
    "mlp.experts.down_proj": ("mlp.experts.down_proj",),
}
_OUTSIDE = {
    "embedding.word_embeddings.weight": "{prefix}embed_tokens.weight",
    "decoder.final_layernorm.weight": "{prefix}norm.weight",
    "output_layer.weight": "lm_head.weight",
    "score.weight": "score.weight",
    "score.bias": "score.bias",
}


@dataclass(frozen=True)
class Grid:
    """Sizes and coordinates of this rank that cut tensors."""

    tensor: int
    tensor_rank: int
    expert: int
    expert_rank: int
    expert_tensor: int
    expert_tensor_rank: int


@dataclass(frozen=True)
class Placed:
    """This rank's part of the tensor `name` of `shape`: `rows` rows of `parameter` from `first` on hold its `spans`.
    `is_copy`: another rank's part counts instead (for a tied embedding at the end of a pipeline)."""

    name: str
    shape: tuple[int, ...]
    spans: Spans
    parameter: nn.Parameter
    first: int
    is_expert: bool = False
    is_divided: bool = False  # over tensor parallel ranks
    is_copy: bool = False

    @property
    def local_shape(self) -> tuple[int, ...]:
        return tuple(sum(stop - first for first, stop in dim) for dim in self.spans)

    def view(self, tensor: torch.Tensor | None = None) -> torch.Tensor:
        """The part in `tensor`, if it lies as the parameter does (default: the parameter)."""
        held = self.parameter.detach() if tensor is None else tensor
        return held.narrow(0, self.first, self.local_shape[0])

    @property
    def offset(self) -> int:
        """The first element of the part in the flattened parameter."""
        return self.first * math.prod(self.local_shape[1:])

    def take(self, full: torch.Tensor) -> torch.Tensor:
        """This rank's part of `full`."""
        for dim, spans in enumerate(self.spans):
            if spans != ((0, self.shape[dim]),):
                full = torch.cat([full.narrow(dim, a, b - a) for a, b in spans], dim)
        return full

    def put(self, full: torch.Tensor, flat: torch.Tensor, start: int) -> None:
        """Write `flat`, elements of the local tensor from `start` on, to their places in `full`."""
        done = 0
        for region, shape in self.blocks(start, start + flat.numel()):
            place = tuple(slice(f, f + n) for f, n in zip(region.first, shape, strict=True))
            full[place] = flat[done : done + math.prod(shape)].view(shape)
            done += math.prod(shape)

    def blocks(self, start: int, stop: int) -> Iterator[tuple[Region, tuple[int, ...]]]:
        """Elements `start` to `stop` of the flattened local tensor as blocks of the full one, in order: (place, shape)."""
        for local in _boxes(self.local_shape, start, stop):
            pieces = [list(take(s, a, b)) for s, (a, b) in zip(self.spans, local, strict=True)]
            cut = max((dim for dim, spans in enumerate(pieces) if len(spans) > 1), default=0)
            for dim in range(cut):  # one row after the other, as they lie
                pieces[dim] = [(i, i + 1) for a, b in pieces[dim] for i in range(a, b)]
            for block in itertools.product(*pieces):
                yield Region(self.shape, tuple(a for a, _ in block)), tuple(b - a for a, b in block)


def _boxes(shape: Sequence[int], start: int, stop: int) -> Iterator[list[Span]]:
    """Blocks of consecutive elements of a tensor of `shape` that make up elements `start` to `stop`, in order."""
    if start >= stop:
        return
    if len(shape) <= 1:
        yield [(start, stop)] if shape else []
        return
    row = math.prod(shape[1:])
    head, tail = -(-start // row), stop // row
    if head > tail:  # within one row
        yield from ([(tail, tail + 1), *box] for box in _boxes(shape[1:], start - tail * row, stop - tail * row))
        return
    if start < head * row:
        yield from ([(head - 1, head), *box] for box in _boxes(shape[1:], start - (head - 1) * row, row))
    if head < tail:
        yield [(head, tail), *((0, size) for size in shape[1:])]
    if tail * row < stop:
        yield from ([(tail, tail + 1), *box] for box in _boxes(shape[1:], 0, stop - tail * row))


def place(
    stages: Sequence[Any], shapes: Mapping[str, tuple[int, ...]], grid: Grid, *, prefix: str, tied: bool
) -> list[Placed]:
    """The parts on this rank of tensors of `shapes` by Hugging Face name, in the order of the stages' parameters. `prefix` is
    the decoder's."""
    parts = []
    for stage in stages:
        for name, parameter in stage.named_parameters():
            first = 0
            for hf in _names(stage, name, prefix):
                is_copy = tied and hf == "lm_head.weight"
                hf = f"{prefix}embed_tokens.weight" if is_copy else hf
                part = _placed(hf, shapes[hf], parameter, first, grid, is_copy)
                first += part.local_shape[0]
                parts.append(part)
            assert first == len(parameter) or "embed" in name or "output_layer" in name, name
    return parts


def router_biases(stages: Sequence[Any], prefix: str) -> dict[str, torch.Tensor]:
    """The untrained biases that routers of this rank choose experts with, by Hugging Face name."""
    return {
        f"{prefix}layers.{layer.layer_number - 1}.mlp.gate.e_score_correction_bias": layer.mlp.router.expert_bias
        for stage in stages
        for layer in stage.decoder.layers
        if getattr(getattr(layer.mlp, "router", None), "expert_bias", None) is not None
    }


def linears(stages: Sequence[Any], module: nn.Module, prefix: str) -> Iterator[tuple[nn.Module, list[nn.Module]]]:
    """Each module of the stages' layers that has a weight, with the modules of `module`, the checkpoint's model, in it."""
    for layer in itertools.chain.from_iterable(stage.decoder.layers for stage in stages):
        for name, part in list(layer.named_modules()):
            leaves = [leaf.removesuffix(".weight") for leaf in _LAYER.get(f"{name}.weight", ())]
            if leaves:
                yield part, [module.get_submodule(f"{prefix}layers.{layer.layer_number - 1}.{leaf}") for leaf in leaves]


def _names(stage: Any, name: str, prefix: str) -> list[str]:
    inside = re.match(r"decoder\.layers\.(\d+)\.(.*)", name)
    if not inside:
        return [_OUTSIDE[name].format(prefix=prefix)]
    number = stage.decoder.layers[int(inside[1])].layer_number - 1
    linear, _, adapter = inside[2].partition(".adapters.")
    if not adapter:
        return [f"{prefix}layers.{number}.{leaf}" for leaf in _LAYER[linear]]
    block, leaf = adapter.split(".")
    return [f"{prefix}layers.{number}.{_LAYER[f'{linear}.weight'][int(block)].removesuffix('weight')}{leaf}"]


def _placed(
    name: str, shape: tuple[int, ...], parameter: nn.Parameter, first: int, grid: Grid, is_copy: bool
) -> Placed:
    spans: list[tuple[Span, ...]] = [((0, size),) for size in shape]
    is_expert, (module, leaf) = ".experts." in name, name.split(".")[-2:]
    divided = None
    if is_expert:
        spans[0] = (chunk_span(shape[0], grid.expert, grid.expert_rank),)
        divided = 1 if name.endswith("gate_up_proj") else 2
        halves = 2 if divided == 1 else 1
        half = shape[divided] // halves
        a, b = chunk_span(half, grid.expert_tensor, grid.expert_tensor_rank)
        full = (a, b) == (0, half)
        spans[divided] = ((0, shape[divided]),) if full else tuple((i * half + a, i * half + b) for i in range(halves))
    elif (divided := divided_dim(module, leaf)) is not None:
        spans[divided] = (chunk_span(shape[divided], grid.tensor, grid.tensor_rank),)
    return Placed(name, shape, tuple(spans), parameter, first, is_expert, divided is not None, is_copy)
