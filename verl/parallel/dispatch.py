"""Splitting of a call on a group into one call per rank, and joining of the results. Pure functions of values and shapes.

plan = plan_call(declared, group, args, kwargs)
results = [run(rank, *plan.calls[rank]) for rank in plan.ranks()]     # torchrun, Ray, or a loop in a test
value = plan.collect(results of plan.answering, in that order)
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any, NamedTuple, Protocol

import numpy as np

from verl.data_proto.metrics import Metric, merge_metrics
from verl.data_proto.proto import DataProto
from verl.parallel.balance import Rows, TokenCost, balanced_shares, contiguous_shares, shares_by_cost
from verl.parallel.mesh import Mesh
from verl.parallel.register import Dispatch, Execute, Registered

Shares = Sequence[Rows | np.ndarray]


class MethodCall(NamedTuple):
    """Arguments of a method."""

    args: tuple[Any, ...]
    kwargs: dict[str, Any]

    @property
    def batch(self) -> DataProto:
        """The first argument. Raises ValueError when it is no DataProto."""
        if not self.args or not isinstance(self.args[0], DataProto):
            raise ValueError("The first argument of this call is the DataProto whose rows are shared out.")
        return self.args[0]

    def with_batch(self, batch: DataProto, **more: object) -> MethodCall:
        """The call with another first argument, and `more` keywords."""
        return MethodCall((batch, *self.args[1:]), {**self.kwargs, **more})


@dataclass(frozen=True)
class ShareCall:
    """A MethodCall that is made each time it is read, so that the rows of one share at a time are in memory twice."""

    make: Callable[[], MethodCall]

    def __iter__(self) -> Iterator[Any]:
        return iter(self.make())

    def __getitem__(self, index: int) -> Any:
        return self.make()[index]


Call = MethodCall | ShareCall


class GroupShape(Protocol):
    """The facts about a group that dispatch reads."""

    mesh: Mesh
    cost: TokenCost
    schedule: Schedule | None  # of a group that trains
    beside_rollout: bool  # whether its ranks are the ranks that generate
    reads_records: bool  # whether a rank's first update takes the activations of its samples

    @property
    def world_size(self) -> int: ...


class Schedule(Protocol):
    """The rows of a batch that each optimizer step of a training call takes, the rows that are computed, and the `unit`: the
    column with equal values in rows that stay together on a rank ("row": none)."""

    @property
    def unit(self) -> str: ...

    def rows(self, batch: DataProto, step: int) -> list[np.ndarray]: ...

    def computed(self, batch: DataProto) -> Sequence[int]: ...


@dataclass(frozen=True)
class CallPlan:
    """`calls[i]` is the call of the rank at index i (None: no call). Ranks of one model-parallel group share the object, so
    that a driver sends it once. `collect` takes the results of the ranks `answering`, in that order."""

    calls: Sequence[Call | None]
    answering: list[int]
    collect: Callable[[list[Any]], Any]
    rows: Shares = ()  # of the ND modes: the rows of each share

    def ranks(self) -> list[int]:
        """Indices of the ranks that run."""
        return [i for i, call in enumerate(self.calls) if call is not None]


def plan_call(declared: Registered, group: GroupShape, args: tuple[object, ...], kwargs: dict[str, object]) -> CallPlan:
    """The calls of one method call on a group. Raises ValueError when arguments do not fit the mode."""
    mode, call = declared.dispatch_mode, MethodCall(args, kwargs)
    plan: CallPlan = (_PLANS[mode] if isinstance(mode, Dispatch) else mode)(declared, group, call)
    if declared.execute_mode != Execute.RANK_ZERO or plan.rows:
        return plan
    return CallPlan([plan.calls[0], *[None] * (group.world_size - 1)], [0], lambda results: results[0])


# -- modes that do not know about rows ---------------------------------------------------------------------------------


def _one_to_all(declared: Registered, group: GroupShape, call: MethodCall) -> CallPlan:
    return CallPlan([call] * group.world_size, list(range(group.world_size)), list)


def _all_reduce(declared: Registered, group: GroupShape, call: MethodCall) -> CallPlan:
    return CallPlan([call] * group.world_size, group.mesh.collectors(), _reduced)


def _reduced(results: list[Any]) -> Any:
    """Numbers are added, dicts of Metrics merged by their reductions; a rank that was lost has None."""
    results = [result for result in results if result is not None]
    return merge_metrics(results) if isinstance(results[0], dict) else sum(results)


# -- modes that share rows out over the data axes of a mesh --------------------------------------------------------------


def _nd_compute(declared: Registered, group: GroupShape, call: MethodCall) -> CallPlan:
    shares = balanced_shares(call.batch, group.mesh.dp_size, group.cost)
    # a rank without rows runs one row all the same: the ranks of a sharded model compute together. Its result is dropped
    filled = [rows if len(rows) else np.zeros(1, np.int32) for rows in shares] if len(call.batch) else shares
    return _scattered(declared, group, call, filled, row_counts=[len(rows) for rows in shares])


def _nd_scatter(declared: Registered, group: GroupShape, call: MethodCall) -> CallPlan:
    return _scattered(declared, group, call, contiguous_shares(len(call.batch), group.mesh.dp_size))


def _nd_advance(declared: Registered, group: GroupShape, call: MethodCall) -> CallPlan:
    (first, second), size = call.args, group.mesh.dp_size
    columns = dict(second.batch.items()) if len(second) else {}
    if "kv_rank" in columns and bool((columns["kv_rank"] >= 0).any()):
        divided: Shares = _by_owner(columns["kv_rank"].numpy(), size)
    else:
        divided = shares_by_cost(columns["expected_tokens"].tolist() if columns else [], size)
    shares = contiguous_shares(len(first), size), divided
    calls = [
        MethodCall((_select(first, rows), _select(second, more)), call.kwargs)
        for rows, more in zip(*shares, strict=True)
    ]

    def collect(results: list[Any]) -> tuple[Any, ...]:
        return tuple(join_rows(part, rows) for part, rows in zip(zip(*results, strict=True), shares, strict=True))

    return _replicated(group, calls, shares[0], collect)


def _nd_owner(declared: Registered, group: GroupShape, call: MethodCall) -> CallPlan:
    if not group.beside_rollout:
        return _nd_scatter(declared, group, call)
    # rows of a rank that the group has no longer are scored by another
    shares = _by_owner(call.batch.batch["rollout_rank"].numpy(), group.mesh.dp_size)
    return _scattered(declared, group, call, shares)


def _by_owner(ranks: np.ndarray, size: int) -> list[np.ndarray]:
    return [np.flatnonzero(ranks % size == part).astype(np.int32) for part in range(size)]


def _nd_mini_batches(declared: Registered, group: GroupShape, call: MethodCall) -> CallPlan:
    """`method(batch, step)` becomes `method(share, step, mini_batches=[rows of the share, ...])`."""
    assert group.schedule is not None, "a group with training calls has a schedule"
    batch, step = call.batch, call.args[1]
    cost, parts, unit = group.cost, group.mesh.dp_size, group.schedule.unit
    numbers = np.array(group.schedule.computed(batch), np.int32)
    computed = None if len(numbers) == len(batch) else numbers
    home = (
        batch.batch["rollout_rank"].numpy() % parts if group.reads_records and "rollout_rank" in batch.batch else None
    )
    cut = [
        balanced_shares(batch, parts, cost, rows, computed, unit, None if number else home)
        for number, rows in enumerate(group.schedule.rows(batch, step))
    ]
    none = np.empty(0, np.int32)
    shares = [np.unique(np.concatenate([none, *(mini[part] for mini in cut)])) for part in range(parts)]
    sent = _lean(batch, declared)

    def share(part: int) -> MethodCall:
        minis = [np.searchsorted(shares[part], mini[part]).astype(np.int32) for mini in cut]
        return call.with_batch(_select(sent, shares[part]), mini_batches=minis)

    calls = [ShareCall(partial(share, part)) for part in range(parts)]
    return _replicated(group, calls, shares, lambda results: results[0].merge(results[1:]))


def _scattered(
    declared: Registered, group: GroupShape, call: MethodCall, shares: Shares, row_counts: list[int] | None = None
) -> CallPlan:
    sent = _lean(call.batch, declared)
    calls = [ShareCall(partial(lambda rows: call.with_batch(_select(sent, rows)), rows)) for rows in shares]
    counts = row_counts if row_counts is not None else [len(rows) for rows in shares]

    def collect(results: list[Any]) -> object:
        return join_rows(results, [rows[:count] for rows, count in zip(shares, counts, strict=True)])

    return _replicated(group, calls, shares, collect)


def _replicated(
    group: GroupShape, calls: Sequence[Call], shares: Shares, collect: Callable[[list[Any]], Any]
) -> CallPlan:
    """The call of a share for every rank of its model-parallel group."""
    mesh = group.mesh
    return CallPlan([calls[mesh.dp_rank(i)] for i in range(mesh.size)], mesh.collectors(), collect, shares)


def _lean(batch: DataProto, declared: Registered) -> DataProto:
    if declared.objects is None and not declared.left_out:
        return batch
    columns = None if batch.batch is None else [name for name in batch.batch.keys() if name not in declared.left_out]
    return batch.select(columns, declared.objects)


def _select(batch: DataProto, rows: Rows | np.ndarray) -> DataProto:
    numbers = np.asarray(rows, np.int32)
    if len(numbers) and numbers[-1] - numbers[0] == len(numbers) - 1 and (np.diff(numbers) == 1).all():
        return batch if len(numbers) == len(batch) else batch.slice(int(numbers[0]), int(numbers[-1]) + 1)
    return batch.select_idxs(numbers.astype(np.int64)) if len(batch) else batch


def join_rows(results: Sequence[Any], shares: Shares) -> object:
    """One result out of the shares' results. DataProtos give rows in the order of the batch: result rows
    `k * i ... k * i + k - 1` of a share belong to its i-th row, and surplus result rows are dropped. Dicts of Metrics are
    merged. Anything else is a list."""
    if results and all(isinstance(r, DataProto) for r in results):
        return _join_batches(list(results), shares)
    if results and all(isinstance(r, dict) and all(isinstance(m, Metric) for m in r.values()) for r in results):
        return merge_metrics(results)
    return list(results)


def _join_batches(results: list[DataProto], shares: Shares) -> DataProto:
    factor = next((len(r) // len(rows) for r, rows in zip(results, shares, strict=True) if len(rows) and len(r)), 1)
    trimmed = [r.slice(0, factor * len(rows)) for r, rows in zip(results, shares, strict=True)]
    used = [(r, rows) for r, rows in zip(trimmed, shares, strict=True) if len(rows)]
    if not used:
        return results[0]
    joined = DataProto.concat([r for r, _ in used]) if len(used) > 1 else used[0][0]
    order = np.concatenate([np.asarray(rows) for _, rows in used])
    back = np.argsort(order, kind="stable")
    if np.array_equal(back, np.arange(len(back))):
        return joined
    return joined.select_idxs((back[:, None] * factor + np.arange(factor)).reshape(-1))


_PLANS: dict[Dispatch, Callable[[Registered, GroupShape, MethodCall], CallPlan]] = {
    Dispatch.ONE_TO_ALL: _one_to_all,
    Dispatch.ALL_REDUCE: _all_reduce,
    Dispatch.ND_COMPUTE_PROTO: _nd_compute,
    Dispatch.ND_SCATTER_PROTO: _nd_scatter,
    Dispatch.ND_ADVANCE_PROTO: _nd_advance,
    Dispatch.ND_OWNER_PROTO: _nd_owner,
    Dispatch.ND_MINI_BATCHES: _nd_mini_batches,
}
