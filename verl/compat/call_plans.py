"""Calls of users' workers by the dispatch modes of scripts (verl/compat/dispatch.py)."""

from __future__ import annotations

from collections.abc import Callable
from typing import TYPE_CHECKING

from verl.data_proto.padding import pad_dataproto_to_divisor
from verl.data_proto.proto import DataProto
from verl.parallel.dispatch import CallPlan, GroupShape, MethodCall, plan_call
from verl.parallel.register import Dispatch, Registered

if TYPE_CHECKING:
    from verl.compat.dispatch import Mode


def plan_of(mode: Mode, declared: Registered, group: GroupShape, call: MethodCall) -> CallPlan:
    """The plan of a call. Raises ValueError when arguments do not fit the mode."""
    dispatch_fn, collect_fn = mode.dispatch_fn, mode.collect_fn
    if dispatch_fn is not None and collect_fn is not None:
        plan = _all_to_all(group, MethodCall(*dispatch_fn(group, *call.args, **call.kwargs)))
        return CallPlan(plan.calls, plan.answering, lambda results: collect_fn(group, results))
    if mode.name in _PLANS:
        return _PLANS[mode.name](group, call)
    if mode.name in Dispatch.__members__:
        return plan_call(Registered(Dispatch[mode.name]), group, *call)
    raise ValueError(f"A method declared Dispatch.{mode.name} cannot be called on a group; call it on its ranks.")


def _rank_zero(group: GroupShape, call: MethodCall) -> CallPlan:
    return CallPlan([call, *[None] * (group.world_size - 1)], [0], lambda results: results[0])


def _all_to_all(group: GroupShape, call: MethodCall) -> CallPlan:
    size = group.world_size
    for value in (*call.args, *call.kwargs.values()):
        if not isinstance(value, (list, tuple)) or len(value) != size:
            raise ValueError(f"Every argument of this call is a list with one value for each of the {size} ranks.")
    calls = [MethodCall(tuple(a[i] for a in call.args), {k: v[i] for k, v in call.kwargs.items()}) for i in range(size)]
    return CallPlan(calls, list(range(size)), list)


def _dp_compute_proto(group: GroupShape, call: MethodCall) -> CallPlan:
    """Equal chunks, the last ones padded when the batch asks for it, and exactly the padding removed from the results."""
    padding = 0

    def cut(value: object) -> list[DataProto]:
        nonlocal padding
        if not isinstance(value, DataProto):
            raise ValueError(f"This call takes DataProtos, not a {type(value).__name__}.")
        if value.is_padding_enabled() and len(value):
            value, padding = pad_dataproto_to_divisor(value, group.world_size)
        return value.chunk(group.world_size)

    chunks = MethodCall(tuple(cut(a) for a in call.args), {k: cut(v) for k, v in call.kwargs.items()})
    plan = _all_to_all(group, chunks)
    return CallPlan(plan.calls, plan.answering, lambda results: _without_padding(DataProto.concat(results), padding))


def _without_padding(batch: DataProto, padding: int) -> DataProto:
    return batch.slice(0, len(batch) - padding) if padding else batch


def _dp_compute_with_func(group: GroupShape, call: MethodCall) -> CallPlan:
    if not call.args or not callable(call.args[0]):
        raise ValueError("The first argument of this call is the function that every rank runs.")
    function, *batches = call.args
    plan = _dp_compute_proto(group, MethodCall(tuple(batches), call.kwargs))
    parts = (MethodCall(*part) for part in plan.calls if part is not None)
    calls = [part._replace(args=(function, *part.args)) for part in parts]
    return CallPlan(calls, plan.answering, plan.collect)


def _dp_compute_metric(group: GroupShape, call: MethodCall) -> CallPlan:
    plan = _dp_compute_proto(group, call)
    return CallPlan(plan.calls, plan.answering, list)


_PLANS: dict[str, Callable[[GroupShape, MethodCall], CallPlan]] = {
    "RANK_ZERO": _rank_zero,
    "ALL_TO_ALL": _all_to_all,
    "DP_COMPUTE": _all_to_all,
    "DP_COMPUTE_PROTO": _dp_compute_proto,
    "DP_COMPUTE_PROTO_WITH_FUNC": _dp_compute_with_func,
    "DP_COMPUTE_METRIC": _dp_compute_metric,
}
