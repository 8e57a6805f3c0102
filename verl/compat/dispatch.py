"""Ways to call methods of users' workers, as scripts of other releases declare them: `@register(dispatch_mode=Dispatch.X)`."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, cast

from verl.errors import ConfigError, NameConfigError, nearest
from verl.parallel import register as core
from verl.parallel.register import Execute, Registered

if TYPE_CHECKING:
    from verl.parallel.dispatch import CallPlan, GroupShape, MethodCall


@dataclass(frozen=True)
class Mode:
    """A way of calling a group. `dispatch_fn(group, *args, **kwargs)` gives (args, kwargs) with a list of one value per
    rank in the place of each argument, and `collect_fn(group, outputs)` makes one result of the ranks' outputs. Both are the
    mode's `functions`, or its entry in DISPATCH_MODE_FN_REGISTRY when the group is called. They are None for the modes below
    and the modes of verl/parallel/register.py."""

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
        from verl.compat.call_plans import plan_of  # it imports torch

        return plan_of(self, declared, group, call)


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
    """Ways to split arguments over the ranks of a group and to join results: the ways of verl/parallel/register.py, and

    RANK_ZERO                   only the first rank gets the arguments; its result
    ALL_TO_ALL                  as they are: every argument is a list with one value per rank already; list of results
    DP_COMPUTE                  the same, checked; list of results
    DP_COMPUTE_PROTO            DataProtos are cut into equal chunks, padded when asked (`auto_padding`); concatenated
    DP_COMPUTE_PROTO_WITH_FUNC  the same, and the first argument is a function for every rank
    DP_COMPUTE_METRIC           the same split; list of results
    DIRECT_ROLLOUT_METHOD       called on the ranks themselves, never through a group
    """


for _name in (
    *core.Dispatch.__members__,
    "RANK_ZERO",
    "ALL_TO_ALL",
    "DP_COMPUTE",
    "DP_COMPUTE_PROTO",
    "DP_COMPUTE_PROTO_WITH_FUNC",
    "DP_COMPUTE_METRIC",
    "DIRECT_ROLLOUT_METHOD",
):
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
    from verl.data_proto.padding import pad_dataproto_to_divisor
    from verl.data_proto.proto import DataProto

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
