"""Declaration of a worker's method for calls on a group: `@register(dispatch_mode=..., execute_mode=...)`.

    class Scorer:
        @register(dispatch_mode=Dispatch.ND_COMPUTE_PROTO)
        def score(self, batch: DataProto) -> DataProto: ...

    group.score(batch)   # cut over the ranks, run, joined; scorer.score(batch) on an object is a plain call

The declaration changes nothing about the method itself. How rows travel for each mode is in verl/parallel/dispatch.py.
Modes of users' workers are in verl/compat/dispatch.py.
"""

import enum
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, TypeVar

F = TypeVar("F", bound=Callable[..., object])

_ATTRIBUTE = "_verl_registered"


class Dispatch(enum.Enum):
    """Ways to split arguments over the ranks of a group and to join results.

    ONE_TO_ALL         every rank gets the same arguments; list of results
    ALL_REDUCE         every rank gets the same arguments; the sum of their numbers, or their metrics merged

    ND_COMPUTE_PROTO   rows over the data-parallel ranks with equal cost, replicated inside a model-parallel group; results
                       of one rank of each group in the order of the rows. Uneven sizes need no padding
    ND_SCATTER_PROTO   the same with contiguous shares of equal length, some of which may be empty
    ND_ADVANCE_PROTO   two DataProtos, a pair of results: the first as in ND_SCATTER_PROTO; the second, by its column
                       `expected_tokens`, in shares of nearly equal sums, some of which may be empty, or to the ranks
                       that its column `kv_rank` names
    ND_OWNER_PROTO     rows go to the rank that their column `rollout_rank` names
    ND_MINI_BATCHES    a training call: each mini-batch of the batch is shared out with equal cost, so that the union
                       over the ranks of their k-th mini-batches is mini-batch k of a single process
    """

    ONE_TO_ALL = "ONE_TO_ALL"
    ALL_REDUCE = "ALL_REDUCE"
    ND_COMPUTE_PROTO = "ND_COMPUTE_PROTO"
    ND_SCATTER_PROTO = "ND_SCATTER_PROTO"
    ND_ADVANCE_PROTO = "ND_ADVANCE_PROTO"
    ND_OWNER_PROTO = "ND_OWNER_PROTO"
    ND_MINI_BATCHES = "ND_MINI_BATCHES"


class Execute:
    """The ranks that run a call: all of the group, or only the first."""

    ALL = "ALL"
    RANK_ZERO = "RANK_ZERO"


@dataclass(frozen=True)
class Registered:
    """The declaration of one method. `dispatch_mode` is a mode of this file, or a function that makes the plan of a call
    from the declaration, the group and the MethodCall. `objects` are the object columns that travel with a DataProto
    argument to an ND mode (None: all), `left_out` are tensor columns that do not travel. With `blocking=False` a call on a
    group of a driver returns a future. `materialize_futures` waits for arguments that are futures before they are
    dispatched."""

    dispatch_mode: Dispatch | Callable[..., Any]
    execute_mode: str = Execute.ALL
    blocking: bool = True
    materialize_futures: bool = True
    objects: tuple[str, ...] | None = None
    left_out: tuple[str, ...] = ()

    def __call__(self, method: F) -> F:
        """Declare `method`, as a decorator."""
        setattr(method, _ATTRIBUTE, self)
        return method


register = Registered


def registered(worker_class: type) -> dict[str, Registered]:
    """Method name -> declaration, including the methods of base classes."""
    declarations = {name: getattr(getattr(worker_class, name, None), _ATTRIBUTE, None) for name in dir(worker_class)}
    return {name: declared for name, declared in declarations.items() if isinstance(declared, Registered)}
