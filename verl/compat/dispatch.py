"""Ways to call methods of users' workers, as scripts of other releases declare them: `@register(dispatch_mode=Dispatch.X)`."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from typing import Any, cast

from verl.data_proto.padding import pad_dataproto_to_divisor
from verl.data_proto.proto import DataProto
from verl.errors import ConfigError, NameConfigError, nearest
from verl.parallel import register as core
from verl.parallel.dispatch import CallPlan, GroupShape, MethodCall, plan_call
from verl.parallel.register import Execute, Registered


@dataclass(frozen=True)
class Mode:
    """A way of calling a group. `dispatch_fn(group, *args, **kwargs)` gives (args, kwargs) with a list of one value per
    rank in the place of each argument, and `collect_fn(group, outputs)` makes one result of the ranks' outputs. Both are the
    mode's `functions`, or its entry in DISPATCH_MODE_FN_REGISTRY when the group is called. They are None for the modes below
    and those of verl/parallel/register.py."""

    name: str
    functions: tuple[Callable[..., Any], Callable[..., Any]] | None = None

    @property
    def dispatch_fn(self) -> Callable[..., Any] | None:
        return self.functions[0] if self.functions else DISPATCH_MODE_FN_REGISTRY.get(self, {}).get("dispatch_fn")

    @property
    def collect_fn(self) -> Callable[..., Any] | None:
        return self.functions[1] if self.functions else DISPATCH_MODE_FN_REGISTRY.get(self, {}).get("collect_fn")

    def __call__(self, declared: Registered, group: GroupShape, call: MethodCall) -> CallPlan:
        """The plan of a call. Raises ValueError when arguments do not fit the mode."""
        dispatch_fn, collect_fn = self.dispatch_fn, self.collect_fn
        if dispatch_fn is not None and collect_fn is not None:
            plan = _all_to_all(group, MethodCall(*dispatch_fn(group, *call.args, **call.kwargs)))
            return CallPlan(plan.calls, plan.answering, lambda results: collect_fn(group, results))
        if self.name in _PLANS:
            return _PLANS[self.name](group, call)
        if self.name in core.Dispatch.__members__:
            return plan_call(Registered(core.Dispatch[self.name]), group, *call)
        raise ValueError(f"A method declared Dispatch.{self.name} cannot be called on a group; call it on its ranks.")


# mode of a script -> {"dispatch_fn": ..., "collect_fn": ...}
DISPATCH_MODE_FN_REGISTRY: dict[Mode, dict[str, Callable[..., object]]] = {}


class _Modes(type):
    """Members by attribute, by name and by iteration, as an enumeration that can grow."""

    _members: dict[str, Mode] = {}

    def __getattr__(cls, name: str) -> Mode:
        if name.startswith("_") or name not in cls._members:
            raise AttributeError(f"There is no dispatch mode {name!r}{nearest(name, cls._members)}")
        return cls._members[name]

    def __getitem__(cls, name: str) -> Mode:
        return cast("Mode", getattr(cls, name))

    def __iter__(cls) -> Iterator[Mode]:
        return iter(cls._members.values())

    def register(cls, name: str) -> Mode:
        """Add a mode without functions yet (see `register_dispatch_mode`)."""
        if name in cls._members:
            raise NameConfigError(f"The dispatch mode {name!r} exists already; choose another name.")
        cls._members[name] = Mode(name)
        return cls._members[name]

    def remove(cls, name: str) -> None:
        """Forget a mode and its functions."""
        DISPATCH_MODE_FN_REGISTRY.pop(cls._members.pop(name), None)


class Dispatch(metaclass=_Modes):
    """Ways to split arguments over the ranks of a group and to join results: those of verl/parallel/register.py, and

    RANK_ZERO                   only the first rank gets the arguments; its result
    ALL_TO_ALL                  as they are: every argument is a list with one value per rank already; list of results
    DP_COMPUTE                  the same, checked; list of results
    DP_COMPUTE_PROTO            DataProtos are cut into equal chunks, padded when asked (`auto_padding`); concatenated
    DP_COMPUTE_PROTO_WITH_FUNC  the same, and the first argument is a function for every rank
    DP_COMPUTE_METRIC           the same split; list of results
    DIRECT_ROLLOUT_METHOD       called on the ranks themselves, never through a group
    """


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
for _name in (*core.Dispatch.__members__, *_PLANS, "DIRECT_ROLLOUT_METHOD"):
    Dispatch.register(_name)


def register(
    dispatch_mode: Mode | Mapping[str, Callable[..., object]] | None = None,
    execute_mode: str = Execute.ALL,
    blocking: bool = True,
    materialize_futures: bool = True,
) -> Registered:
    """Declare a method of a worker; default Dispatch.ALL_TO_ALL.

    `dispatch_mode` may also be {"dispatch_fn": ..., "collect_fn": ...}. `Registered` describes the other arguments. Raises
    ConfigError for a mode without its functions, or an unknown execute mode.
    """
    if execute_mode not in (Execute.ALL, Execute.RANK_ZERO):
        raise ConfigError(f"execute_mode={execute_mode!r} is not Execute.ALL or Execute.RANK_ZERO.")
    return Registered(_mode(dispatch_mode), execute_mode, blocking, materialize_futures)


def _mode(mode: Mode | Mapping[str, Callable[..., object]] | None) -> Mode:
    if mode is None:
        return Dispatch.ALL_TO_ALL
    if isinstance(mode, Mode):
        return mode
    if {"dispatch_fn", "collect_fn"} <= set(mode):
        return Mode("custom", (mode["dispatch_fn"], mode["collect_fn"]))
    raise ConfigError("A dispatch mode given as a mapping needs the functions 'dispatch_fn' and 'collect_fn'.")


def register_dispatch_mode(name: str, dispatch_fn: Callable[..., object], collect_fn: Callable[..., object]) -> Mode:
    """A new mode under `Dispatch.<name>`, with functions as `Mode` describes them."""
    Dispatch.register(name)
    return update_dispatch_mode(Dispatch[name], dispatch_fn, collect_fn)


def update_dispatch_mode(mode: Mode, dispatch_fn: Callable[..., object], collect_fn: Callable[..., object]) -> Mode:
    """Give functions to a mode that exists, built-in ones too, for all calls from now on."""
    DISPATCH_MODE_FN_REGISTRY[mode] = {"dispatch_fn": dispatch_fn, "collect_fn": collect_fn}
    return mode


def make_nd_compute_dataproto_dispatch_fn(mesh_name: str) -> Mode:
    """A dispatch mode: DataProtos are cut into one chunk per data-parallel rank of the mesh `mesh_name`, padded if they do
    not divide, and the results of the ranks that answer are joined without the padding. Other arguments go to all ranks."""

    def cut(value: object, info: list[tuple[int, bool]]) -> list[Any]:
        if not isinstance(value, DataProto):
            return [value] * len(info)
        padded, _ = pad_dataproto_to_divisor(value, 1 + max(share for share, _ in info))
        chunks = padded.chunk(1 + max(share for share, _ in info))
        return [chunks[share] for share, _ in info]

    def dispatch(group: Any, *args: object, **kwargs: object) -> tuple[tuple[Any, ...], dict[str, Any]]:
        info = group.mesh_info(mesh_name)
        batches = [value for value in (*args, *kwargs.values()) if isinstance(value, DataProto)]
        group.num_rows_sent = len(batches[0]) if batches else 0
        return tuple(cut(a, info) for a in args), {k: cut(v, info) for k, v in kwargs.items()}

    def collect(group: Any, outputs: list[Any]) -> Any:
        info = group.mesh_info(mesh_name)
        answering = sorted((share, output) for (share, answers), output in zip(info, outputs, strict=True) if answers)
        rank_outputs = [output for _, output in answering]
        if not rank_outputs or not all(isinstance(output, DataProto) for output in rank_outputs):
            return rank_outputs
        joined = DataProto.concat(rank_outputs)
        return joined.slice(0, group.num_rows_sent) if group.num_rows_sent <= len(joined) else joined

    return Mode(f"nd_compute({mesh_name})", (dispatch, collect))
