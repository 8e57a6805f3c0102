"""Division of a mini-batch into micro-batches by the tokens that a packed forward computes, and its sizes."""

import math
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import nn

from verl.data_proto.extras import BatchExtras
from verl.data_proto.media import Media
from verl.data_proto.proto import DataProto
from verl.engines.api import MicroBatching
from verl.errors import ConfigError
from verl.models.memory import ParallelLayout, kept_activations, tower_activations
from verl.models.outputs import RequestedOutputs
from verl.models.packing import PackedRow, num_computed
from verl.models.shapes import ModelShape
from verl.models.vision import is_vision_model, require_vision, vision_towers
from verl.parallel.balance import pack_by_tokens

Unit = list[PackedRow]  # rows that stay together


def sizes_of(batch: DataProto, units: Sequence[int]) -> list[int]:
    """Numbers of response tokens, rows with response tokens, units, and response tokens of chosen completions in this rank's
    share of a mini-batch. `units`: see `unit_ids`."""
    tokens = batch.batch["response_mask"].sum(dim=1)
    preferred = batch.batch.get("chosen", None)
    is_mask = preferred is not None and preferred.dtype == torch.bool  # a loop of the user's may have numbers there
    num_chosen_tokens = int(tokens[preferred].sum()) if is_mask else 0
    return [int(tokens.sum()), int((tokens > 0).sum()), len(set(units)), num_chosen_tokens]


def image_costs(module: nn.Module) -> Callable[[Media], int] | None:
    """The cost of computing images with the tower of `module`, as the number of tokens with as many activations in the language
    model. None for text models, and for frozen towers: they keep none."""
    if not is_vision_model(module) or not any(p.requires_grad for t in vision_towers(module) for p in t.parameters()):
        return None
    config: Any = module.config
    shape = ModelShape.from_config(config)
    if shape.tower is None:
        return None
    layout, patch = ParallelLayout(), config.vision_config.patch_size
    side = int(patch[0] if isinstance(patch, list | tuple) else patch)
    share = tower_activations(shape, layout, 1 / shape.tower.patches) / kept_activations(shape, layout, 1, 0)

    def cost(media: Media) -> int:
        pixels = [value for name, value in media.tensors.items() if name.startswith("pixel_values")]
        # [patches, elements], or [..., height, width]
        patches = sum(len(p) if p.dim() == 2 else p[..., 0, :, :].numel() // side**2 for p in pixels)
        return math.ceil(patches * share)

    return cost


def costs_of(extras: BatchExtras, module: nn.Module, computes_images: bool) -> Callable[[Media], int] | None:
    """`image_costs` if a row has images. Raises ModelError if `module` reads no images, ConfigError if its engine does not."""
    if not extras.has_images:
        return None
    require_vision(module)
    if not computes_images:
        raise ConfigError(
            "Rows with images train on one device, or with strategy=fsdp or fsdp2 without tensor and sequence parallelism. Set "
            "strategy=fsdp2, and tensor_parallel_size and ulysses_sequence_parallel_size to 1."
        )
    return image_costs(module)


@dataclass(frozen=True)
class BatchPlan:
    """The micro-batches of a batch: the rows `parts[i]` are computed together, for the outputs `requested`.

    BatchPlan(batch, BatchExtras(), requested, [[0, 1, 5], [2, 3, 4], []])     # as many as the rank with most has
    """

    batch: DataProto
    extras: BatchExtras
    requested: RequestedOutputs
    parts: list[list[int]]

    def select(self, rows: list[int]) -> tuple[DataProto, BatchExtras]:
        """The rows `rows` and their extras."""
        if len(rows) == len(self.batch):
            return self.batch, self.extras
        return self.batch.select_idxs(rows), self.extras.select(rows)


def plan_micro_batches(
    rows: Sequence[PackedRow],
    micro: MicroBatching,
    share_prompts: bool,
    units: Sequence[int] | None = None,
    *,
    pads: bool = False,
) -> list[list[int]]:
    """Row indices of each micro-batch, ascending; every row is in exactly one, and there is at least one micro-batch. Rows
    with equal `units[row.index]` (None: no two rows) are in the same one; a unit above the limit is by itself.

    By tokens, rows that share a prompt stay together as far as they fit, since then the prompt is computed once. Units without
    trained tokens cost nothing and join the first micro-batch. If a forward `pads`, its padding counts.
    """
    by_unit: dict[int, Unit] = {}
    for row in rows:
        by_unit.setdefault(row.index if units is None else units[row.index], []).append(row)
    if micro.max_tokens is None:
        planned = _by_rows(list(by_unit.values()), micro.max_rows or max(1, len(rows)))
    elif pads:
        planned = _by_padded_tokens(list(by_unit.values()), micro.max_tokens)
    else:
        planned = _by_tokens(list(by_unit.values()), micro.max_tokens, share_prompts)
    return [sorted(row.index for unit in part for row in unit) for part in planned]


def _by_rows(units: Sequence[Unit], max_rows: int) -> list[list[Unit]]:
    """Units in their order."""
    planned: list[list[Unit]] = [[]]
    room = max_rows
    for unit in units:
        if planned[-1] and len(unit) > room:
            planned.append([])
            room = max_rows
        planned[-1].append(unit)
        room -= len(unit)
    return planned


def _by_padded_tokens(units: Sequence[Unit], max_tokens: int) -> list[list[Unit]]:
    """Units of similar length together: a padded forward computes the length of its longest row for each of its rows."""

    def longest(unit: Unit) -> int:
        return max((len(row.prompt) + row.costs[0] + row.num_added for row in unit if row.trains), default=0)

    planned: list[list[Unit]] = [[]]
    num_rows = 0
    for unit in sorted(units, key=longest):
        if planned[-1] and (num_rows + len(unit)) * longest(unit) > max_tokens:
            planned.append([])
            num_rows = 0
        planned[-1].append(unit)
        num_rows += len(unit)
    return planned


def _by_tokens(units: Sequence[Unit], max_tokens: int, share_prompts: bool) -> list[list[Unit]]:
    families: dict[object, list[Unit]] = {}  # units with the same prompts
    for unit in units:
        prompts = tuple(row.origin for row in unit if row.trains)
        shares = share_prompts and any(row.prompt for row in unit if row.trains)
        if prompts:
            families.setdefault(prompts if shares else unit[0].index, []).append(unit)
    chunks = [chunk for family in families.values() for chunk in _fitting(family, max_tokens, share_prompts)]
    bins = pack_by_tokens([cost for cost, _ in chunks], max_tokens) or [[]]
    planned = [[unit for number in members for unit in chunks[number][1]] for members in bins]
    planned[0].extend(unit for unit in units if not any(row.trains for row in unit))
    return planned


def _fitting(family: Sequence[Unit], max_tokens: int, share_prompts: bool) -> Iterator[tuple[int, list[Unit]]]:
    """The family in chunks of at most `max_tokens` computed tokens, each with the prompts once more: (tokens, units)."""
    chunk: list[Unit] = []
    cost = 0
    for unit in family:
        added = sum(row.num_added for row in unit)
        if chunk and cost + added > max_tokens:
            yield cost, chunk
            chunk = []
        cost = cost + added if chunk else num_computed(unit, share_prompts)
        chunk.append(unit)
    yield cost, chunk
