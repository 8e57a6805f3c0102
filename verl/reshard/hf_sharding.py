"""Sharding of a decoder's parameters by name and shape.

`divided_dim` (verl/parallel/slices.py) names the divided dimension; experts lie along dimension 0. Pure, without torch.
"""

import re
from collections.abc import Mapping, Sequence

from verl.parallel.slices import divided_dim
from verl.reshard.layout import Block, Tensor

_LAYER = re.compile(r"(?:^|\.)layers\.(\d+)\.")


def decoder_tensors(
    shapes: Mapping[str, Sequence[int]],
    *,
    num_layers: int,
    num_heads: int,
    num_kv_heads: int,
    is_tied: bool = False,
    itemsize: int = 2,
) -> tuple[Tensor, ...]:
    """From parameter name -> undivided shape, as the training module has them; adapters (`lora_A`, `lora_B`) too.

    With `is_tied` the embedding is the output projection as well, and the last pipeline stage needs it. `itemsize` is the
    size in bytes of an element of the rollout's dtype.
    """
    heads = dict.fromkeys(("q_proj", "q_b_proj", "kv_b_proj", "o_proj"), num_heads) | dict.fromkeys(
        ("k_proj", "v_proj"), num_kv_heads
    )
    return tuple(
        _tensor(name, tuple(shape), _layers(name, num_layers, is_tied), heads, itemsize)
        for name, shape in shapes.items()
    )


def _layers(name: str, num_layers: int, is_tied: bool) -> tuple[int, ...]:
    inside = _LAYER.search(name)
    if inside:
        return (int(inside.group(1)),)
    if ".embed_tokens." in f".{name}":
        return (-1, num_layers) if is_tied else (-1,)
    return (num_layers,)


def _tensor(
    name: str, shape: tuple[int, ...], layers: tuple[int, ...], heads: Mapping[str, int], itemsize: int
) -> Tensor:
    module, leaf = ["", "", *name.split(".")][-2:]
    if module == "experts" and len(shape) == 3:
        half = Block(shape[1] // 2)
        if leaf == "gate_up_proj":
            return Tensor(name, shape, itemsize, layers, 1, (half, half), is_expert=True)
        return Tensor(name, shape, itemsize, layers, 2, is_expert=True)
    dim = divided_dim(module, leaf)
    if dim is None:
        return Tensor(name, shape, itemsize, layers)
    blocks = (Block(shape[dim], heads[module]),) if module in heads else ()
    return Tensor(name, shape, itemsize, layers, dim, blocks)
