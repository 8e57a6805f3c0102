"""Layouts written a second time, on whole arrays of element numbers, and models to plan for."""

import math

import numpy as np

from verl.parallel.mesh import Mesh
from verl.parallel.slices import intersect, numel
from verl.reshard.grouping import interval_engines
from verl.reshard.hf_sharding import decoder_tensors
from verl.reshard.layout import Block, TrainingLayout


def elements(tensor):
    """The tensor whose elements are their own numbers."""
    return np.arange(math.prod(tensor.shape)).reshape(tensor.shape)


def divided(tensor, array, num_ranks, index):
    """The part of `array` that a tensor parallel rank holds; `array` is whole along the divided dimension."""
    dim = tensor.tensor_dim
    pieces, start = [], 0
    for block in tensor.blocks or (Block(tensor.shape[dim]),):
        piece = array.take(range(start, start + block.size), dim)
        start += block.size
        if block.num_heads:
            heads = np.split(piece, block.num_heads, dim)
            repeated = [h for h in heads for _ in range(max(1, num_ranks // block.num_heads))]
            ids = np.array_split(np.arange(len(repeated)), num_ranks)[index]
            # ranks that share a head have it once
            piece = np.concatenate([repeated[ids[0]]] if len(repeated) > len(heads) else [heads[i] for i in ids], dim)
        else:
            piece = np.array_split(piece, num_ranks, dim)[index]
        pieces.append(piece)
    return np.concatenate(pieces, dim)


def chunk(array, num_ranks, index):
    """The part of torch.chunk(num_ranks) along dimension 0 for `index`; empty where it gives fewer chunks."""
    size = math.ceil(len(array) / num_ranks)
    return array[index * size : (index + 1) * size]


def trained(tensor, layout, rank, num_stages=1):
    """The local array of a training rank, by what Shard.own_part and FSDP do, or None for another pipeline stage."""
    sizes = dict(layout.mesh.axes)
    where = np.argwhere(np.array(layout.mesh.ranks).reshape(tuple(sizes.values())) == rank)[0]
    at = dict(zip(sizes, map(int, where), strict=True))
    per_stage = layout.layers_per_stage or (10**6,)
    bounds = np.cumsum(per_stage)
    stages = {int(np.clip(np.searchsorted(bounds, layer, "right"), 0, len(bounds) - 1)) for layer in tensor.layers}
    if at.get("pp", 0) not in stages:
        return None
    array, experts = elements(tensor), layout.expert_parallel
    fsdp = at.get("shard", 0) * sizes.get("sp", 1) + at.get("sp", 0)
    num_fsdp = sizes.get("shard", 1) * sizes.get("sp", 1)
    if tensor.is_expert and experts > 1:
        part = fsdp % experts if num_fsdp > 1 else at.get("replicate", 0) % experts
        array = np.array_split(array, experts)[part]
        fsdp, num_fsdp = (fsdp // experts, num_fsdp // experts) if num_fsdp > 1 else (0, 1)
    if tensor.tensor_dim is not None and not tensor.is_expert:
        array = divided(tensor, array, sizes.get("tp", 1), at.get("tp", 0))
    return chunk(array, num_fsdp, fsdp)


def interval_experts(training, num_ranks):
    """Groups of ranks over which generation divides whole experts."""
    return interval_engines(training, num_ranks, by_experts=True)


def generating(tensor, layout, rank):
    """The local array of a rollout rank."""
    array = elements(tensor)
    for group in layout.expert_groups:
        if tensor.is_expert and rank in group:
            return np.array_split(array, len(group))[group.index(rank)]
    if tensor.tensor_dim is None:
        return array
    group = next(engine for engine in layout.engines if rank in engine)
    return divided(tensor, array, len(group), group.index(rank))


def local(tensor, part):
    """A rank's local array as a Part describes it."""
    indices = [np.concatenate([np.arange(a, b) for a, b in dim]) for dim in part.spans]
    return elements(tensor)[np.ix_(*indices)]


def llama(hidden, intermediate, layers, heads, kv_heads, vocabulary=32000, **more):
    """The tensors of a Llama."""
    kv = hidden // heads * kv_heads
    shapes = {"model.embed_tokens.weight": (vocabulary, hidden)}
    for number in range(layers):
        parts = {
            "input_layernorm.weight": (hidden,),
            "self_attn.q_proj.weight": (hidden, hidden),
            "self_attn.k_proj.weight": (kv, hidden),
            "self_attn.v_proj.weight": (kv, hidden),
            "self_attn.o_proj.weight": (hidden, hidden),
            "post_attention_layernorm.weight": (hidden,),
            "mlp.gate_proj.weight": (intermediate, hidden),
            "mlp.up_proj.weight": (intermediate, hidden),
            "mlp.down_proj.weight": (hidden, intermediate),
        }
        shapes |= {f"model.layers.{number}.{name}": shape for name, shape in parts.items()}
    shapes |= {"model.norm.weight": (hidden,), "lm_head.weight": (vocabulary, hidden)}
    return decoder_tensors(shapes, num_layers=layers, num_heads=heads, num_kv_heads=kv_heads, **more)


def mixture(hidden, intermediate, layers, heads, experts):
    """The tensors of a mixture of experts without an embedding."""
    shapes = {}
    for number in range(layers):
        parts = {
            "self_attn.q_proj.weight": (hidden, hidden),
            "self_attn.k_proj.weight": (hidden, hidden),
            "self_attn.v_proj.weight": (hidden, hidden),
            "self_attn.o_proj.weight": (hidden, hidden),
            "mlp.gate.weight": (experts, hidden),
            "mlp.experts.gate_up_proj": (experts, 2 * intermediate, hidden),
            "mlp.experts.down_proj": (experts, hidden, intermediate),
        }
        shapes |= {f"model.layers.{number}.{name}": shape for name, shape in parts.items()}
    return decoder_tensors(shapes, num_layers=layers, num_heads=heads, num_kv_heads=heads)


def bytes_of(tensors):
    return sum(math.prod(t.shape) * t.itemsize for t in tensors)


def ptd(pipeline, tensor, data, layers):
    """The paper's training p-t-d: tensor parallel neighbours, then replicas, then pipeline stages."""
    return TrainingLayout(
        Mesh.grid(range(pipeline * tensor * data), pp=pipeline, replicate=data, tp=tensor),
        layers_per_stage=(layers // pipeline,) * pipeline if pipeline > 1 else (),
    )


def lower_bound(tensors, source, target):
    """Rank of `target` -> bytes that it is missing: no plan moves less."""
    missing = dict.fromkeys(target.ranks, 0)
    for tensor in tensors:
        for rank in target.ranks:
            needed, held = target.part(tensor, rank), source.part(tensor, rank)
            if needed is None:
                continue
            here = () if held is None else tuple(held.slices())
            shared = [intersect(a, b) for a in needed.slices() for b in here]
            missing[rank] += (needed.numel - sum(numel(s) for s in shared if s is not None)) * tensor.itemsize
    return missing


def full_gather(tensors, source, ranks, held_itemsize=None):
    """The baseline of plans: rank -> bytes that it receives when each of `ranks` gathers every parameter whole over the
    training ranks and takes its part. Parameters travel as they are held, `held_itemsize` bytes an element (float32 masters:
    4; default: the rollout's dtype, as in a plan)."""
    received = dict.fromkeys(ranks, 0)
    for tensor in tensors:
        for rank in received:
            held = source.part(tensor, rank)
            lacking = math.prod(tensor.shape) - (held.numel if held is not None else 0)
            received[rank] += lacking * (held_itemsize or tensor.itemsize)
    return received
