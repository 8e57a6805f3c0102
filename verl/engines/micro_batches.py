"""Cutting a mini-batch into micro-batches by what the packed forward computes, and its totals."""

from __future__ import annotations

from collections.abc import Iterator, Sequence

from verl.data_proto.proto import DataProto
from verl.engines.api import BatchTotals, MicroBatching
from verl.models.packing import Row, group_rows, num_computed
from verl.parallel.balance import pack_by_tokens


def sizes_of(batch: DataProto, rows: Sequence[int] | None) -> list[int]:
    """Response tokens and rows of this rank's part of a mini-batch: of all rows, then of `rows` alone (None: all)."""
    tokens = batch.batch["response_mask"].sum(dim=1)
    chosen = list(range(len(batch))) if rows is None else list(rows)
    return [int(tokens.sum()), len(batch), int(tokens[chosen].sum()), len(chosen)]


def batch_totals(sizes: Sequence[int]) -> BatchTotals:
    """The totals of `sizes_of` summed over all ranks."""
    num_tokens, num_sequences, computed_tokens, computed_sequences = sizes
    if computed_sequences == num_sequences:
        return BatchTotals(num_tokens, num_sequences)
    return BatchTotals(num_tokens, num_sequences, computed=BatchTotals(computed_tokens, computed_sequences))


def plan_micro_batches(rows: Sequence[Row], micro: MicroBatching, share_prompts: bool) -> list[list[int]]:
    """Row numbers of each micro-batch, ascending; every row is in exactly one, and there is at least one micro-batch.

    By tokens, rows that share a prompt stay together as far as they fit, since then the prompt is computed once; a
    row longer than the limit is alone. Rows in which nothing trains cost nothing and ride along with the first
    micro-batch.
    """
    if micro.max_tokens is None:
        size = micro.max_rows or max(1, len(rows))
        return [[row.index for row in rows[start : start + size]] for start in range(0, len(rows), size)] or [[]]
    units = [unit for group in group_rows(rows, share_prompts) for unit in _fitting(group, micro.max_tokens)]
    bins = pack_by_tokens([num_computed(unit) for unit in units], micro.max_tokens) or [[]]
    planned = [[row.index for number in members for row in units[number]] for members in bins]
    planned[0].extend(row.index for row in rows if not row.trains)
    return [sorted(members) for members in planned]


def _fitting(group: Sequence[Row], max_tokens: int) -> Iterator[list[Row]]:
    """The group in pieces of at most `max_tokens` computed tokens, each with the prompt once more."""
    piece: list[Row] = []
    for row in group:
        if piece and num_computed([*piece, row]) > max_tokens:
            yield piece
            piece = []
        piece.append(row)
    yield piece
