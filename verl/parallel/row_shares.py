"""Which rows of a batch each data-parallel rank gets. Pure; the same batch gives the same shares on every process."""

from __future__ import annotations

from collections.abc import Sequence, Set
from dataclasses import dataclass

import numpy as np

from verl.data_proto.proto import DataProto
from verl.parallel.balance import partition_by_cost, sequence_cost

Rows = list[int]


@dataclass(frozen=True)
class TokenCost:
    """What a row costs in a transformer of `hidden_size`: its FLOPs per layer up to a constant, see `sequence_cost`.

    Rows that share a prompt compute it once on one rank, and once more on every further rank that gets some of them.
    """

    hidden_size: int = 1024

    def __call__(self, num_tokens: int) -> float:
        return sequence_cost(num_tokens, linear=6.0 * self.hidden_size, quadratic=1.0)


def contiguous_shares(num_rows: int, num_parts: int) -> list[Rows]:
    """Neighbouring rows; sizes differ by at most one and the last parts may be empty."""
    return [rows.tolist() for rows in np.array_split(np.arange(num_rows), num_parts)]


def balanced_shares(
    batch: DataProto,
    num_parts: int,
    cost: TokenCost,
    rows: Sequence[int] | None = None,
    computed: Set[int] | None = None,
) -> list[Rows]:
    """`rows` of the batch (default all) over `num_parts` ranks with nearly equal cost; ascending within a part. With fewer
    rows than parts the last parts are empty. Rows that are not `computed` (default: all are) cost nothing.

    The samples of a prompt stay together unless parting them makes the costliest share cheaper, the prompts that are then
    computed twice counted.
    """
    chosen = list(range(len(batch))) if rows is None else [int(r) for r in rows]
    if len(chosen) <= num_parts:
        return [[r] for r in chosen] + [[] for _ in range(num_parts - len(chosen))]
    prompts, responses = _lengths(batch)
    names = _prompt_names(batch)
    groups: dict[object, Rows] = {}
    for row in chosen:
        groups.setdefault(names[row], []).append(row)

    def share_cost(part: Rows) -> float:
        part = part if computed is None else [r for r in part if r in computed]
        shared = {names[r]: prompts[r] for r in part}
        return sum(cost(p) for p in shared.values()) + sum(
            cost(prompts[r] + responses[r]) - cost(prompts[r]) for r in part
        )

    candidates = [_partition([[r] for r in chosen], num_parts, share_cost)]
    if len(groups) >= num_parts:
        candidates.insert(0, _partition(list(groups.values()), num_parts, share_cost))
    return min(candidates, key=lambda parts: max(map(share_cost, parts)))  # the first of equals: whole groups


def _partition(units: list[Rows], num_parts: int, share_cost: object) -> list[Rows]:
    costs = [share_cost(unit) for unit in units]  # type: ignore[operator]
    parts = partition_by_cost(costs, num_parts, equal_size=False)
    return sorted(sorted(row for unit in part for row in units[unit]) for part in parts)


def _lengths(batch: DataProto) -> tuple[list[int], list[int]]:
    """Prompt and response tokens of each row; a batch without masks has rows of equal length."""
    columns = {} if batch.batch is None else batch.batch
    names = set(columns.keys())
    if "attention_mask" not in names:
        return [0] * len(batch), [1] * len(batch)
    total = columns["attention_mask"].sum(dim=1)
    prompts = columns["prompt_mask"].sum(dim=1) if "prompt_mask" in names else total.new_zeros(total.shape)
    return prompts.tolist(), (total - prompts).tolist()


def _prompt_names(batch: DataProto) -> list[object]:
    """What is equal for rows of one prompt: the ordinal or the uid; else every row is its own."""
    if batch.batch is not None and "ordinal" in batch.batch.keys():
        return list(batch.batch["ordinal"].tolist())
    if "uid" in batch.non_tensor_batch:
        return list(batch.non_tensor_batch["uid"])
    return list(range(len(batch)))
