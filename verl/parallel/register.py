"""Declaration of a worker's method for calls on a group: `@register(dispatch_mode=..., execute_mode=...)`.

    class Scorer(Worker):
        @register(dispatch_mode=Dispatch.DP_COMPUTE_PROTO)
        def score(self, batch: DataProto) -> DataProto: ...

    group.score(batch)   # cut over the ranks, run, joined; scorer.score(batch) on an object is a plain call

The declaration changes nothing about the method itself. How rows travel for each mode is in verl/parallel/dispatch.py.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from typing import Any, TypeVar, cast

from verl.errors import ConfigError, NameConfigError, nearest

F = TypeVar("F", bound=Callable[..., object])

_ATTRIBUTE = "_verl_registered"


@dataclass(frozen=True)
class Mode:
    """A way of calling a group. `dispatch_fn(group, *args, **kwargs)` gives (args, kwargs) with a list of one value per
    rank in the place of each argument, and `collect_fn(group, outputs)` makes one result of the ranks' outputs. Both are the
    mode's `own`, or its entry in DISPATCH_MODE_FN_REGISTRY when the group is called. They are None for the built-in modes;
    verl/parallel/dispatch.py has their functions."""

    name: str
    own: tuple[Callable[..., Any], Callable[..., Any]] | None = None

    @property
    def dispatch_fn(self) -> Callable[..., object] | None:
        return self.own[0] if self.own else DISPATCH_MODE_FN_REGISTRY.get(self, {}).get("dispatch_fn")

    @property
    def collect_fn(self) -> Callable[..., object] | None:
        return self.own[1] if self.own else DISPATCH_MODE_FN_REGISTRY.get(self, {}).get("collect_fn")


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
    """Ways to split arguments over the ranks of a group and to join results.

    RANK_ZERO                   only the first rank gets the arguments; its result
    ONE_TO_ALL                  every rank gets the same arguments; list of results
    ALL_TO_ALL                  as they are: every argument is a list with one value per rank already; list of results
    DP_COMPUTE                  the same, checked; list of results
    DP_COMPUTE_PROTO            DataProtos are cut into equal chunks, padded when asked (`auto_padding`); concatenated
    DP_COMPUTE_PROTO_WITH_FUNC  the same, and the first argument is a function for every rank
    DP_COMPUTE_METRIC           the same split; list of results
    DIRECT_ROLLOUT_METHOD       called on the ranks themselves, never through a group

    ND_COMPUTE_PROTO   rows over the data-parallel ranks with equal cost, replicated inside a model-parallel group; results
                       of one rank of each group in the order of the rows. Uneven sizes need no padding
    ND_SCATTER_PROTO   the same with contiguous shares of equal length, some of which may be empty
    ND_ADVANCE_PROTO   two DataProtos, a pair of results: the first as in ND_SCATTER_PROTO; the second, by its column
                       `expected_tokens`, in shares of nearly equal sums, some of which may be empty, or to the ranks
                       that its column `kv_rank` names
    ND_OWNER_PROTO     rows go to the rank that their column `rollout_rank` names
    ND_MINI_BATCHES    a training call: each mini-batch of the batch is shared out with equal cost, so that the union
                       over the ranks of their k-th mini-batches is mini-batch k of a single process
    ALL_REDUCE         every rank gets the same arguments; the sum of their numbers, or their metrics merged
    """


for _name in (
    "RANK_ZERO", "ONE_TO_ALL", "ALL_TO_ALL", "DP_COMPUTE", "DP_COMPUTE_PROTO", "DP_COMPUTE_PROTO_WITH_FUNC",
    "DP_COMPUTE_METRIC", "DIRECT_ROLLOUT_METHOD", "ND_COMPUTE_PROTO", "ND_SCATTER_PROTO", "ND_ADVANCE_PROTO",
    "ND_OWNER_PROTO", "ND_MINI_BATCHES", "ALL_REDUCE",
):  # fmt: skip
    Dispatch.register(_name)


class Execute:
    """The ranks that run a call: all of the group, or only the first."""

    ALL = "ALL"
    RANK_ZERO = "RANK_ZERO"


@dataclass(frozen=True)
class Registered:
    """The declaration of one method. `objects` are the object columns that travel with a DataProto argument to an ND
    mode (None: all), `left_out` are tensor columns that do not travel."""

    dispatch_mode: Mode
    execute_mode: str = Execute.ALL
    blocking: bool = True
    materialize_futures: bool = True
    objects: tuple[str, ...] | None = None
    left_out: tuple[str, ...] = ()


def register(
    dispatch_mode: Mode | Mapping[str, Callable[..., object]] | None = None,
    execute_mode: str = Execute.ALL,
    blocking: bool = True,
    materialize_futures: bool = True,
    objects: tuple[str, ...] | None = None,
    left_out: tuple[str, ...] = (),
) -> Callable[[F], F]:
    """Declare a method of a worker; default Dispatch.ALL_TO_ALL.

    `dispatch_mode` may also be {"dispatch_fn": ..., "collect_fn": ...}. With `blocking=False` a call on a group of a
    driver returns a future. `materialize_futures` waits for arguments that are futures before they are dispatched.
    Raises ConfigError for a mode without its functions, or an unknown execute mode.
    """
    mode = _mode(dispatch_mode)
    if execute_mode not in (Execute.ALL, Execute.RANK_ZERO):
        raise ConfigError(f"execute_mode={execute_mode!r} is not Execute.ALL or Execute.RANK_ZERO.")
    declared = Registered(mode, execute_mode, blocking, materialize_futures, objects, left_out)

    def mark(method: F) -> F:
        setattr(method, _ATTRIBUTE, declared)
        return method

    return mark


def _mode(mode: Mode | Mapping[str, Callable[..., object]] | None) -> Mode:
    if mode is None:
        return Dispatch.ALL_TO_ALL
    if isinstance(mode, Mode):
        return mode
    if {"dispatch_fn", "collect_fn"} <= set(mode):
        return Mode("custom", (mode["dispatch_fn"], mode["collect_fn"]))
    raise ConfigError("A dispatch mode given as a mapping needs the functions 'dispatch_fn' and 'collect_fn'.")


def registered(worker_class: type) -> dict[str, Registered]:
    """Method name -> declaration, including the methods of base classes."""
    declarations = {name: getattr(getattr(worker_class, name, None), _ATTRIBUTE, None) for name in dir(worker_class)}
    return {name: declared for name, declared in declarations.items() if isinstance(declared, Registered)}


def register_dispatch_mode(name: str, dispatch_fn: Callable[..., object], collect_fn: Callable[..., object]) -> Mode:
    """A new mode under `Dispatch.<name>`, with functions as `Mode` describes them."""
    Dispatch.register(name)
    return update_dispatch_mode(Dispatch[name], dispatch_fn, collect_fn)


def update_dispatch_mode(mode: Mode, dispatch_fn: Callable[..., object], collect_fn: Callable[..., object]) -> Mode:
    """Give functions to a mode that exists, built-in ones too, for all calls from now on."""
    DISPATCH_MODE_FN_REGISTRY[mode] = {"dispatch_fn": dispatch_fn, "collect_fn": collect_fn}
    return mode
