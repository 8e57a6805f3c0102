"""The choice of a runtime, and the interface of all of them.

RANK and WORLD_SIZE in the environment, more than one rank   spmd: started by torchrun
more than one device in the config                           ray: a driver over actors
else                                                         local: this process
"""

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Protocol

from verl.distributions import load_part, require_part
from verl.errors import MissingExtraError
from verl.parallel.collectives import peer_of_environment
from verl.roles.api import Roles, RoleSpecs, SpecSource, Value

_RAY_RUN = "A run over several devices that is not started by torchrun"


class Runtime(Protocol):
    """A running set of processes. In spmd every rank has a Runtime; `is_rank_zero` is true on the rank that writes files."""

    name: str
    rank: int
    is_rank_zero: bool

    def build_roles(self, *, total_steps: int, data_sources: list[str], train: bool = True) -> Roles:
        """Load models and start reward processes, as the specs place them."""
        ...

    def any(self, flag: bool) -> bool:
        """Whether the flag is set in at least one of the processes that run the program; all get the same answer."""
        ...

    def broadcast(self, value: Value, /) -> Value:
        """See Broadcast."""
        ...

    def close(self) -> None:
        """End every process that this one started. May be called again."""
        ...


def choose(specs: RoleSpecs) -> str:
    """local, spmd or ray."""
    peer = peer_of_environment()
    if peer is not None and peer.world_size > 1:
        return "spmd"
    return "ray" if peer is None and specs.place(None).num_devices > 1 else "local"


@contextmanager
def open_runtime(source: SpecSource) -> Iterator[Runtime]:
    """The runtime of a run, closed on leaving. Raises ConfigError for a placement that this node or cluster cannot have,
    MissingExtraError without Ray, DeadlineError when other ranks do not come."""
    runtime = _make(source, choose(source.specs()))
    try:
        yield runtime
    finally:
        runtime.close()


def _make(source: SpecSource, name: str) -> Runtime:
    if name == "spmd":
        from verl.runtime.local import SpmdRuntime

        peer = peer_of_environment()
        assert peer is not None
        return SpmdRuntime(source, peer)
    if name == "ray":
        require_part("verl.runtime.ray", _RAY_RUN)
        try:
            module = load_part("verl.runtime.ray")
        except ModuleNotFoundError as error:
            if error.name != "ray":
                raise
            raise MissingExtraError(_RAY_RUN, "ray", "ray") from None
        runtime: Runtime = module.RayRuntime(source)
        return runtime
    from verl.runtime.local import LocalRuntime

    return LocalRuntime(source)
