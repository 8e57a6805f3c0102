"""The Ray calls of verl: a cluster, processes placed in it, results with deadlines. No other file imports ray."""

from __future__ import annotations

import logging
import os
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

os.environ.setdefault("RAY_ACCEL_ENV_VAR_OVERRIDE_ON_ZERO", "0")  # a process without a GPU keeps CUDA_VISIBLE_DEVICES

import numpy as np
import ray
import torch
from ray._private import services, worker
from ray.exceptions import ActorUnavailableError, GetTimeoutError, RayActorError, RayError, RayTaskError
from ray.util.placement_group import PlacementGroup, placement_group, remove_placement_group
from ray.util.scheduling_strategies import PlacementGroupSchedulingStrategy

from verl.data_proto.extras import row_media_of
from verl.data_proto.media import StoredTensors, images_in
from verl.data_proto.proto import DataProto
from verl.errors import ConfigError, DeadlineError, VerlError, WorkerLostError, first_line
from verl.parallel.device import resolve_device, visible_devices
from verl.parallel.dispatch import CallPlan
from verl.runtime import ray_node
from verl.runtime.ray_process import Packed, Process, last_lines, open_answer, pack, unpack
from verl.runtime.ray_request import Request, ask_for_token, is_short, passed_environment

log = logging.getLogger(__name__)

_ROOT_CAUSE_S = 3.0  # grace for naming the rank that died, once another rank has lost it
_END_S = 5.0
_STACK_S = 5.0  # for the stack of a process that is late
_INLINE_BYTES = 64 * 1024  # Ray itself stores an argument of 100 KB or more
_FEW = 32  # answers that are looked at one by one, so that an error is raised at once
_FIRST_LOOK_S, _LOOK_S = 0.01, 0.5  # from one look at the answers of a call to the next
# the keys with the deadline of a call, and of starting the processes
CALL_LIMIT, START_LIMIT = "trainer.call_timeout_s", "trainer.ray_wait_register_center_timeout"


class RayCluster:
    """An existing cluster (`address` in `ray_init`, or RAY_ADDRESS), or a cluster on this node that ends with this process."""

    def __init__(self, ray_init: Mapping[str, Any], request: Request):
        self.request = request
        self._groups: list[PlacementGroup] = []
        self._nodes: dict[PlacementGroup, str] = {}  # by Ray's names
        self._handles: list[Any] = []
        self._started = False
        settings = {k: v for k, v in ray_init.items() if v is not None}
        address = settings.pop("address", None) or os.environ.get("RAY_ADDRESS")
        self.is_ours = address is None and not ray.is_initialized()
        if self.is_ours:
            request.check_node(settings)
        if not ray.is_initialized():
            self._start(settings, address)
        try:
            self._check_resources()
        except BaseException:
            self.close()
            raise

    def _start(self, settings: dict[str, Any], address: str | None) -> None:
        environment = {k: v for k, v in (settings.pop("runtime_env", None) or {}).items() if v is not None}
        # by None it would join what `ray start` left on this node
        options: dict[str, Any] = {"address": address or "local"}
        if address is None:
            options["include_dashboard"] = False
            # by Ray's default of 15 a rank gets a thirtieth of the time of any other program on its core
            os.environ.setdefault("RAY_worker_niceness", "0")
            ask_for_token()
            options["num_cpus"] = settings.pop("num_cpus", None) or os.cpu_count()
        else:
            settings.pop("num_cpus", None)
        started = time.monotonic()
        try:
            with ray_node.apart_from_signals(services):
                ray.init(
                    **options,
                    runtime_env=environment or None,
                    logging_level=logging.WARNING,
                    log_to_driver=True,
                    **settings,
                )
        except Exception as error:  # Ray raises bare ones too, as for a node that starts slowly
            problem = f"Ray did not start after {time.monotonic() - started:.0f} s ({first_line(error)})."
            if address or isinstance(error, ValueError):
                key = "ray_kwargs.ray_init.address" if address else "ray_kwargs.ray_init"
                raise ConfigError(f"{problem} Check {key}.") from error
            # a process of our own cluster may have been killed: worth another attempt
            raise WorkerLostError(f"{problem} Look at /tmp/ray, and run the same command again.") from error
        self._started = True
        ray_node.watch(worker.global_worker.node)

    def _check_resources(self) -> None:
        """Refuse a run that is too large for the cluster. The run computes on GPUs if any node has them: this node may have
        none."""
        nodes = [node["Resources"] for node in ray.nodes() if node["Alive"]]
        if self.request.gpus is None:
            self.request = replace(self.request, gpus=any(node.get("GPU", 0) >= 1 for node in nodes))
        request = self.request
        have = sorted((int(node.get(request.resource, 0)) for node in nodes), reverse=True)
        need = sorted(request.nodes, reverse=True)
        if is_short(have, need) and request.otherwise:
            need = sorted(request.otherwise, reverse=True)
            self.request = replace(self.request, nodes=request.otherwise)
        if is_short(have, need):
            raise ConfigError(
                f"The run needs {len(need)} node(s) with {' and '.join(map(str, need))} {request.resource}s, but the Ray "
                f"cluster has {len(have)} with {', '.join(map(str, have)) or 'none'}. Lower trainer.nnodes or "
                "trainer.n_gpus_per_node, or add nodes to the cluster."
            )

    def reserve(self) -> None:
        """Reserve the places, node by node. Raises DeadlineError when other jobs hold them."""
        bundle = {"CPU": 1.0, **({"GPU": 1.0} if self.request.gpus else {})}
        for count in self.request.nodes:
            self._groups.append(placement_group([dict(bundle) for _ in range(count)], strategy="STRICT_PACK"))
        started = time.monotonic()
        for group in self._groups:
            seconds_left = self.request.timeout_s - (time.monotonic() - started)
            try:
                ray.get(group.ready(), timeout=max(seconds_left, 0.1))
            except GetTimeoutError as error:
                free = int(ray.available_resources().get(self.request.resource, 0))
                raise DeadlineError(
                    f"Ray has not given {self.request.num_processes} {self.request.resource}s within "
                    f"{self.request.timeout_s:.0f} s; {free} are free, the others are used by other jobs. End those, or ask "
                    "for fewer with trainer.nnodes and trainer.n_gpus_per_node."
                ) from error
        addresses = {node["NodeID"]: node["NodeManagerAddress"] for node in ray.nodes()}  # all nodes, so ask once
        for group in self._groups:
            self._nodes[group] = next(iter(ray.util.placement_group_table(group)["bundles_to_node_id"].values()), "")
        # ranks of a node do not depend on which groups became ready first
        self._groups.sort(key=lambda group: (addresses.get(self._nodes[group], ""), self._nodes[group]))

    def spawn(
        self, cls: type, environment: Mapping[str, str], arguments: Callable[[int], tuple[object, ...]], share: float = 1.0,
        beside: Sequence[str] = (),
    ) -> list[Process]:  # fmt: skip
        """An actor of `cls` for every place, in rank order; `arguments(rank)` are for its constructor. It takes `share` of the
        place, so that several fit. Calls run in the order of their requests; calls of a group named in `beside` run in
        parallel, on a separate thread."""
        processes: list[Process] = []
        actor = _actor_class(cls, environment, beside)
        for group in self._groups:
            for bundle in range(group.bundle_count):
                place = PlacementGroupSchedulingStrategy(placement_group=group, placement_group_bundle_index=bundle)
                handle = self._start_actor(actor, arguments(len(processes)), share, scheduling_strategy=place)
                processes.append(Process(len(processes), handle, node_id=self._nodes[group]))
        return processes

    def add(
        self, cls: type, rank: int, environment: Mapping[str, str], arguments: tuple[object, ...], beside: Sequence[str]
    ) -> Process:
        """One more, on any device of the cluster; its calls wait until one is free."""
        return Process(rank, self._start_actor(_actor_class(cls, environment, beside), arguments, 1.0), is_added=True)

    def _start_actor(self, actor: Any, arguments: tuple[object, ...], share: float, **place: object) -> object:
        num_gpus = share if self.request.gpus else 0
        handle = actor.options(num_cpus=share, num_gpus=num_gpus, **place).remote(*arguments)
        self._handles.append(handle)
        return handle

    def end(self, processes: Sequence[Process]) -> None:
        """Ask processes to end their children, with a deadline; then kill them."""
        refs = [process.handle.end.remote() for process in processes]
        ray.wait(refs, num_returns=len(refs), timeout=_END_S)
        for process in processes:
            self.kill(process)

    def kill(self, process: Process) -> None:
        """End a process at once; its device is free again."""
        ray.kill(process.handle, no_restart=True)
        if process.handle in self._handles:
            self._handles.remove(process.handle)

    def timeline(self, file: str) -> None:
        """Ray's timeline of the run, for chrome://tracing."""
        path = Path(file).expanduser()
        path.parent.mkdir(parents=True, exist_ok=True)
        ray.timeline(filename=str(path))

    def close(self) -> None:
        """End every process, release the places, and end the cluster if this process started it. May be called again."""
        handles, self._handles = self._handles, []
        groups, self._groups = self._groups, []
        if ray.is_initialized():
            for handle in handles if not ray_node.lost() else ():
                ray.kill(handle, no_restart=True)
            for group in groups if not ray_node.lost() else ():
                remove_placement_group(group)
            if self._started:
                ray_node.forget()
                ray.shutdown()
        self._started = False


@dataclass
class Pending:
    """The future of a call on several processes: refs by process, in the order of the results."""

    call: str
    refs: list[tuple[Process, Any]]
    timeout_s: float
    collect: Callable[[list[Any]], object]
    limit_key: str = CALL_LIMIT  # the key with the value of timeout_s
    # makes call i of `refs` on another process, when an added one has died
    retry: Callable[[int], tuple[Process, object]] | None = None
    opened: Callable[..., object] = lambda answer, process, ref: answer  # what `collect` gets
    _started: float = field(default_factory=time.monotonic)
    _value: Any = None
    _done: bool = False

    @classmethod
    def of_plan(
        cls, call: str, plan: CallPlan, send: Callable[[int], tuple[Process, object]], timeout_s: float,
        **more: Any,
    ) -> Pending:  # fmt: skip
        """The call of a plan; `send(index)` makes it on the process of a rank of the group. For `more` see Pending."""
        ranks = plan.ranks()
        order = [ranks.index(index) for index in plan.answering]
        refs = [send(index) for index in ranks]
        return cls(call, refs, timeout_s, lambda answers: plan.collect([answers[i] for i in order]), **more)

    def ready(self) -> bool:
        """Whether every process has answered."""
        refs = [ref for _, ref in self.refs]
        return self._done or len(ray.wait(refs, num_returns=len(refs), timeout=0)[0]) == len(refs)

    def get(self) -> Any:
        """Wait for all. Raises a process's own error, WorkerLostError when a process died, DeadlineError when it hangs."""
        if not self._done:
            self._value, self._done = self.collect(self._wait()), True
        return self._value

    def _wait(self) -> list[object]:
        results: dict[int, object] = {}
        patience_s = _FIRST_LOOK_S
        waiting = {ref: index for index, (_, ref) in enumerate(self.refs)}
        while waiting:
            seconds_left = self._started + self.timeout_s - time.monotonic()
            if seconds_left <= 0:
                raise DeadlineError(self._late([self.refs[index][0] for index in waiting.values()]))
            # of many until all are there: a look costs as much as it has references, so one for each answer would be quadratic
            count = 1 if len(waiting) <= _FEW else len(waiting)
            arrived, _ = ray.wait(list(waiting), num_returns=count, timeout=min(seconds_left, patience_s))
            patience_s = min(2 * patience_s, _LOOK_S)
            if not arrived:
                ray_node.require(self.call)
            for ref in arrived:
                index = waiting.pop(ref)
                process = self.refs[index][0]
                try:
                    results[index] = self.opened(self._fetch(process, ref), process, ref)
                except (WorkerLostError, DeadlineError) as error:
                    ray_node.require(self.call)  # its end takes the ranks with it
                    if self.retry is None or not process.is_added or not isinstance(error.__cause__, RayError):
                        unfinished = {ref: self.refs[i][0] for ref, i in waiting.items()}
                        raise self._root_cause(unfinished, error) from error
                    process.is_lost = True
                    log.warning("%s died in %s; another rank does its work.", str(process).capitalize(), self.call)
                    self.refs[index] = self.retry(index)
                    waiting[self.refs[index][1]] = index
        return [results[index] for index in range(len(self.refs))]

    def _fetch(self, process: Process, ref: Any) -> Any:
        elapsed_s = time.monotonic() - self._started
        try:
            return open_answer(ray.get(ref), f"{process}, {self.call}")
        except (RayActorError, ActorUnavailableError) as error:
            raise WorkerLostError(
                f"{str(process).capitalize()} died in {self.call} after {elapsed_s:.1f} s ({first_line(error)}). "
                f"{last_lines(process)}Run the same command again to resume from the last checkpoint; if it was killed for "
                "its memory, lower ppo_max_token_len_per_gpu or use more devices."
            ) from error
        except RayTaskError as error:
            raise RuntimeError(f"{process} failed in {self.call}:\n{error}") from error

    def _root_cause(self, waiting: dict[object, Process], noticed: VerlError) -> VerlError:
        """The error to raise: a rank that lost its peer answers before Ray notices the dead peer. The error names the dead
        peer."""
        until = time.monotonic() + _ROOT_CAUSE_S
        while waiting and time.monotonic() < until:
            done, _ = ray.wait(list(waiting), num_returns=1, timeout=max(0.0, until - time.monotonic()))
            for ref in done:
                process = waiting.pop(ref)
                try:
                    self._fetch(process, ref)
                except WorkerLostError as error:
                    if isinstance(error.__cause__, RayError):
                        return error
                except VerlError as error:
                    return error
        return noticed

    def _late(self, processes: list[Process]) -> str:
        names = "; ".join(f"{process}{_stuck(process)}" for process in processes)
        return (
            f"{names} did not finish {self.call} within {self.timeout_s:.0f} s. It hangs or is slow: look at its log"
            f"{''.join(f' {p.log_file}' for p in processes[:1] if p.log_file)}; raise {self.limit_key} if it is slow."
        )


def _stuck(process: Process) -> str:
    """The stack of a late process, requested on a separate thread."""
    if not process.watched_by:
        return ""
    try:
        stack = ray.get(process.handle.stuck.options(concurrency_group=process.watched_by).remote(), timeout=_STACK_S)
    except RayError:  # a process that holds the interpreter lock, or is stopped, cannot answer
        return " [its stack could not be had]"
    return f" [its stack: {stack}]" if stack else ""


def own_address() -> str:
    """The address of this node for the other nodes of the cluster."""
    return str(ray.util.get_node_ip_address())


def own_device(name: str) -> torch.device:
    """The device that Ray has given to this process, for trainer.device `name`: one of several if Ray hides none of a node's
    GPUs (RAY_EXPERIMENTAL_NOSET_CUDA_VISIBLE_DEVICES)."""
    device = resolve_device(name)
    ids = ray.get_runtime_context().get_accelerator_ids().get("GPU", [])
    if device.type != "cuda" or device.index is not None or not ids:
        return device
    visible = visible_devices()
    return torch.device("cuda", visible.index(ids[0]) if ids[0] in visible else 0)


def store_value(value: Packed) -> object:
    """The argument of a call for `value`: a large one is stored once for several processes, a small one travels in the call, to
    save a request to Ray's object store on each side."""
    small = len(value[0]) + sum(getattr(buffer, "nbytes", 0) for buffer in value[1:]) <= _INLINE_BYTES
    return value if small else ray.put(value)


def store_call(args: tuple[object, ...], kwargs: dict[str, object]) -> object:
    """The argument of a process for a call. The images of batches are separate in Ray's object store: each process reads the
    images of its rows there. They are there until no row has them."""
    for batch in (*args, *kwargs.values()):
        for row in (row_media_of(batch) or ()) if isinstance(batch, DataProto) else ():
            for media in images_in(row):
                media.store(lambda tensors: read_buffer(ray.put(pack(dict(tensors)))))
    return store_value(pack((args, kwargs)))


def read_buffer(buffer: Any) -> Any:
    """A buffer of a call: an object that is in the store by itself, such as images of `store_call`, or bytes."""
    if isinstance(buffer, ray.ObjectRef):
        return StoredTensors(buffer, ray.get, unpack)
    return np.asarray(buffer)


def remote_function(function: Callable[..., object], **options: Any) -> Any:
    """`function` as a Ray task: `.remote(...)` returns a reference for `ray.get`."""
    return ray.remote(**options)(function)


def _actor_class(cls: type, environment: Mapping[str, str], beside: Sequence[str]) -> Any:
    """The class of actors with these variables. Ray sends each such class to the cluster, so make one for all."""
    variables = {"env_vars": {**passed_environment(), **environment}}
    remote: Any = ray.remote
    return remote(max_restarts=0, runtime_env=variables, concurrency_groups=dict.fromkeys(beside, 1) or None)(cls)
