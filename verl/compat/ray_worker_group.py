"""Groups of users' own workers on Ray, under the names of existing scripts.

    pool = RayResourcePool([2], use_gpu=False)                      # two processes on one node
    group = RayWorkerGroup(pool, RayClassWithInitArgs(MyWorker, 3)) # MyWorker(3) in each
    group.compute(batch)                                            # as the method's @register says

Several groups on one pool share its places. Arguments and results are carried by Ray's own serialisation, because the classes
are the user's.
"""

import sys
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, cast

from verl.compat.run_workers import RoleCalls, RunWorkers, stand_for_roles
from verl.compat.sections import names_of_caller
from verl.compat.user_process import UserProcess
from verl.errors import ConfigError, MissingExtraError, NameConfigError
from verl.parallel.dispatch import CallPlan, MethodCall
from verl.parallel.mesh import Mesh
from verl.runtime.worker_group import WorkerGroup

try:
    from verl.runtime.ray_cluster import Pending, RayCluster, Request, remote_function
    from verl.runtime.ray_process import Process
except ModuleNotFoundError as error:
    if error.name != "ray":
        raise
    raise MissingExtraError("A group of workers on Ray", "ray", "ray") from None

__all__ = [
    "ColocatedClasses",
    "RayClassWithInitArgs",
    "RayResourcePool",
    "RayWorkerGroup",
    "ResourcePool",
    "ResourcePoolManager",
    "create_colocated_worker_cls",
    "remote_function",
]

_CALL_TIMEOUT_S = 3600.0
_START_TIMEOUT_S = 300.0
_PLACE = ("RANK", "WORLD_SIZE", "MASTER_ADDR", "MASTER_PORT", "LOCAL_RANK", "RAY_LOCAL_WORLD_SIZE")  # set by the group
_WATCHING = "watching"  # the thread that reports the stack of a call that hangs


class ResourcePool:
    """`process_on_nodes[i]` processes on node i, each with its own device; `max_colocate_count` groups may share them."""

    def __init__(self, process_on_nodes: Sequence[int] | None = None, max_colocate_count: int = 10, **_: object):
        self.process_on_nodes = list(process_on_nodes or [1])
        self.max_colocate_count = max_colocate_count

    @property
    def world_size(self) -> int:
        return sum(self.process_on_nodes)

    @property
    def store(self) -> list[int]:
        return list(self.process_on_nodes)


class RayResourcePool(ResourcePool):
    """A pool with places in a Ray cluster, taken when the first group needs them."""

    def __init__(
        self,
        process_on_nodes: Sequence[int] | None = None,
        use_gpu: bool = True,
        name_prefix: str | None = None,
        max_colocate_count: int = 10,
    ):
        super().__init__(process_on_nodes, max_colocate_count)
        self.use_gpu = use_gpu
        self.name_prefix = name_prefix or ""
        self._cluster: RayCluster | None = None

    @property
    def cluster(self) -> RayCluster:
        if self._cluster is None:
            self._cluster = RayCluster({}, Request(self.process_on_nodes, self.use_gpu, _START_TIMEOUT_S))
            self._cluster.reserve()
        return self._cluster

    def close(self) -> None:
        """End the processes of all groups on this pool and release its places."""
        if self._cluster is not None:
            self._cluster.close()
            self._cluster = None


@dataclass
class RayClassWithInitArgs:
    """A worker class (plain, or made by `ray.remote`) and what its constructor gets."""

    cls: Any
    args: tuple[Any, ...] = ()
    kwargs: dict[str, Any] = field(default_factory=dict)

    def __init__(self, cls: object, *args: object, **kwargs: object):
        metadata = getattr(cls, "__ray_metadata__", None)  # of the actor class that ray.remote(cls) made
        self.cls = getattr(metadata, "modified_class", cls)
        self.args, self.kwargs = args, kwargs


@dataclass
class ColocatedClasses:
    """Several worker classes for the same processes, by role; `RayWorkerGroup(...).spawn(...)` gives a group for each."""

    classes: dict[str, RayClassWithInitArgs]


def create_colocated_worker_cls(class_dict: Mapping[str, RayClassWithInitArgs]) -> ColocatedClasses:
    """One process per place that holds a worker of each class."""
    return ColocatedClasses(dict(class_dict))


class ResourcePoolManager:
    """Pools by name, and the pool of each role. Raises ConfigError for a role without a pool."""

    def __init__(
        self, resource_pool_spec: Mapping[str, Sequence[int]], mapping: Mapping[Any, str], use_gpu: bool = True
    ):
        self.resource_pool_spec = {name: list(nodes) for name, nodes in resource_pool_spec.items()}
        self.mapping = dict(mapping)
        self.use_gpu = use_gpu
        self.resource_pool_dict: dict[str, RayResourcePool] = {}

    def create_resource_pool(self) -> None:
        for name, nodes in self.resource_pool_spec.items():
            self.resource_pool_dict[name] = RayResourcePool(nodes, self.use_gpu, name)

    def get_resource_pool(self, role: object) -> RayResourcePool:
        name = self.mapping.get(role)
        if name not in self.resource_pool_dict:
            raise ConfigError(
                f"The role {role} is mapped to the pool {name!r}; there are {sorted(self.resource_pool_dict)}."
            )
        return self.resource_pool_dict[name]

    def get_n_gpus(self) -> int:
        return sum(sum(nodes) for nodes in self.resource_pool_spec.values())


class _GroupsOfRuns(type):
    """Objects that stand for a group of roles of a run are instances too: projects ask for the class."""

    def __instancecheck__(cls, instance: object) -> bool:
        return super().__instancecheck__(instance) or isinstance(instance, RunWorkers | RoleCalls)


class RayWorkerGroup(WorkerGroup, metaclass=_GroupsOfRuns):
    """One process per place of `resource_pool`, with the workers of `ray_cls_with_init` in it. Classes of roles give
    the run (RunWorkers)."""

    def __new__(
        cls, resource_pool: RayResourcePool, ray_cls_with_init: RayClassWithInitArgs | ColocatedClasses, **_: object
    ) -> Any:
        several = (
            ray_cls_with_init.classes if isinstance(ray_cls_with_init, ColocatedClasses) else {"": ray_cls_with_init}
        )
        if not stand_for_roles(worker.cls for worker in several.values()):
            return super().__new__(cls)
        sections = [worker.kwargs["config"] for worker in several.values() if "config" in worker.kwargs]
        return RunWorkers(next(iter(sections), None), names_of_caller(sys._getframe(1).f_globals))

    def __init__(
        self,
        resource_pool: RayResourcePool,
        ray_cls_with_init: RayClassWithInitArgs | ColocatedClasses,
        *,
        name_prefix: str = "",
        timeout_s: float = _CALL_TIMEOUT_S,
        worker_env: Mapping[str, str] | None = None,
        **_: object,
    ):
        """`worker_env`: environment variables of the workers. Raises NameConfigError for a variable that the group sets."""
        if taken := sorted(set(worker_env or ()) & set(_PLACE)):
            raise NameConfigError(
                f"worker_env sets {', '.join(taken)}, which the group sets for each worker. Remove it."
            )
        self.worker_env = dict(worker_env or {})
        colocated = isinstance(ray_cls_with_init, ColocatedClasses)
        self.classes: dict[str, RayClassWithInitArgs] = (
            ray_cls_with_init.classes if isinstance(ray_cls_with_init, ColocatedClasses) else {"": ray_cls_with_init}
        )
        self.timeout_s = timeout_s
        self.pool = resource_pool
        self.processes = self._start()
        worker_class = object if colocated else self.classes[""].cls
        super().__init__(name_prefix or worker_class.__name__, worker_class, self._mesh(), self._runner_of(""))

    def spawn(self, prefix_set: Sequence[str] | set[str]) -> dict[str, WorkerGroup]:
        """A group for each role of colocated classes; all share these processes."""
        unknown = sorted(set(prefix_set) - set(self.classes))
        if unknown:
            raise ConfigError(f"These processes hold no worker {unknown[0]!r}; they hold {', '.join(self.classes)}.")
        return {
            name: WorkerGroup(name, self.classes[name].cls, self._mesh(), self._runner_of(name))
            for name in self.classes
            if name in prefix_set
        }

    def execute_all_sync(self, method_name: str, *args: object, **kwargs: object) -> list[Any]:
        """A method on all ranks with the same arguments; its results in rank order."""
        return cast("list[Any]", self.execute_all_async(method_name, *args, **kwargs).get())

    def execute_all_async(self, method_name: str, *args: object, **kwargs: object) -> Pending:
        plan = CallPlan([MethodCall(args, kwargs)] * self.world_size, list(range(self.world_size)), list)
        return cast("Pending", self._send("", method_name, plan, False))

    def execute_rank_zero_sync(self, method_name: str, *args: object, **kwargs: object) -> Any:
        """A method on the first rank."""
        return self.execute_rank_zero_async(method_name, *args, **kwargs).get()

    def execute_rank_zero_async(self, method_name: str, *args: object, **kwargs: object) -> Pending:
        calls = [MethodCall(args, kwargs), *[None] * (self.world_size - 1)]
        plan = CallPlan(calls, [0], lambda results: results[0])
        return cast("Pending", self._send("", method_name, plan, False))

    def close(self) -> None:
        """End these processes; the pool keeps its places."""
        processes, self.processes = self.processes, []
        if processes:
            self.pool.cluster.end(processes)

    def _mesh(self) -> Mesh:
        return Mesh.flat(range(self.pool.world_size))

    def _start(self) -> list[Process]:
        classes = {name: (c.cls, c.args, c.kwargs) for name, c in self.classes.items()}
        size, share = self.pool.world_size, 1.0 / self.pool.max_colocate_count
        local_sizes = [count for count in self.pool.process_on_nodes for _ in range(count)]  # of each rank's node
        processes = self.pool.cluster.spawn(
            UserProcess,
            {},
            lambda rank: (rank, size, classes, {**self.worker_env, "RAY_LOCAL_WORLD_SIZE": str(local_sizes[rank])}),
            share=share,
            beside=(_WATCHING,),
        )
        for process in processes:
            process.watched_by = _WATCHING
            process.roles = ", ".join(c.cls.__name__ for c in self.classes.values())
        address, port = Pending(
            "place", [(processes[0], processes[0].handle.place.remote())], _START_TIMEOUT_S, list
        ).get()[0]
        refs = [(p, p.handle.join.remote(address, port)) for p in processes]
        for process, place in zip(processes, Pending("the constructor", refs, self.timeout_s, list).get(), strict=True):
            process.node, process.pid = place
        return processes

    def _runner_of(self, role: str) -> Callable[[WorkerGroup, str, CallPlan, bool], object]:
        return lambda group, method, plan, blocking: self._send(role, method, plan, blocking)

    def _send(self, role: str, method: str, plan: CallPlan, blocking: bool) -> Any:
        def send(index: int) -> tuple[Process, Any]:
            process, call = self.processes[index], plan.calls[index]
            assert call is not None
            return process, process.handle.call.remote(role, method, *call)

        pending = Pending.of_plan(f"{role or 'group'}.{method}", plan, send, self.timeout_s)
        return pending.get() if blocking else pending
