"""The ray runtime: this process runs the program, and every device has a process with the roles that are placed on it.

The processes are ranks as in the spmd runtime: they meet in one process group, for the communication of engines and weights.
The driver divides the rows of a call over them, and gets the small results back.
"""

from __future__ import annotations

import logging
import os
import socket
from collections.abc import Callable
from contextlib import nullcontext
from dataclasses import replace
from pathlib import Path
from typing import Any, cast

from verl.parallel.process_settings import imports_stay, keep_freed_memory

with imports_stay():  # the process of an actor begins here
    import verl.models.load  # noqa: F401 - the largest import

import torch

from verl.data.prompts import set_template_time, template_time
from verl.parallel import dev_shm
from verl.parallel.child_processes import unblock_sigterm
from verl.parallel.collectives import Collectives, Peer, free_port
from verl.parallel.device import device_kind, resolve_device
from verl.parallel.dispatch import CallPlan
from verl.parallel.placement import Placement
from verl.parallel.stack_dump import all_stacks, calls, longest_call
from verl.registry import load_object
from verl.roles.api import Roles, SpecSource, Value
from verl.runtime.rank import POLICY, RankContext, check_meshes
from verl.runtime.rank_workers import RankWorkers
from verl.runtime.ray_cluster import (
    CALL_LIMIT,
    START_LIMIT,
    Pending,
    RayCluster,
    Request,
    own_address,
    own_device,
    read_buffer,
    store_call,
    store_value,
)
from verl.runtime.ray_process import Packed, PackedAnswer, Process, answer_call, open_answer, pack, unpack
from verl.runtime.ray_scaling import RoleScaling
from verl.runtime.role_groups import make_groups
from verl.runtime.worker_group import WorkerGroup
from verl.tracking.logs import setup_logging

log = logging.getLogger(__name__)

_SCORING = "scoring"  # the thread that waits for scores while the process generates or trains
_WATCHING = "watching"  # the thread that reports the stack of a call that hangs


class RayWeightSync:
    """See WeightSync: every process takes part."""

    def __init__(self, runtime: RayRuntime):
        self._runtime = runtime

    def sync(self, version: int) -> None:
        scaling = self._runtime.scaling
        if scaling is not None:
            scaling.wait_all()
        self._runtime.everywhere("weights.sync", "sync_weights", version)
        if scaling is not None:
            scaling.apply(version)


class RayRuntime:
    """See verl.runtime.api.Runtime."""

    name = "ray"
    rank = 0
    is_rank_zero = True

    def __init__(self, source: SpecSource):
        keep_freed_memory(one_arena=True)  # the threads that write use what the step has freed
        self.source = source
        specs = source.specs()
        run = self.run = specs.run
        self.placement = specs.place(None)
        check_meshes(specs, self.placement)
        gpus = {"auto": None, "cpu": False, "cuda": True}[device_kind(run.device)]
        per_node, total = self.placement.devices_per_node, self.placement.num_devices
        nodes = [min(per_node, total - first) for first in range(0, total, per_node)]
        apart = list(run.pools) if len(nodes) == 1 else []
        request = Request(nodes, gpus, run.start_timeout_s, otherwise=apart)
        dev_shm.check_size({"Ray": run.ray.ray_init.get("object_store_memory") or dev_shm.RAY_BYTES})
        self.cluster = RayCluster(run.ray.ray_init, request)
        self.device = torch.device("cuda" if self.cluster.request.gpus else "cpu")  # of the ranks
        if len(self.cluster.request.nodes) > len(nodes):
            self.placement = replace(self.placement, devices_per_node=max(apart))
        self.processes: list[Process] = []
        self.scaling: RoleScaling | None = None

    def build_roles(self, *, total_steps: int, data_sources: list[str], train: bool = True) -> Roles:
        specs = self.source.specs(train=train)
        context = RankContext(specs, self.placement, -1, self.device, total_steps, data_sources)
        self._start_processes()
        task = {
            "devices_per_node": self.placement.devices_per_node,
            "total_steps": total_steps,
            "data_sources": data_sources,
            "train": train,
            "time": template_time(),
        }
        facts = self.everywhere("building the roles", "build", pack(task))
        first = specs.models[0].name if specs.models else POLICY
        weights = RayWeightSync(self) if specs.rollout is not None else None
        roles = make_groups(context, self._run, facts[context.ranks(first)[0]], weights, self._end)
        if train and specs.rollout is not None:
            self.scaling = RoleScaling(self, roles, specs.rollout, task)
        return roles

    def any(self, flag: bool) -> bool:
        return flag

    def broadcast(self, value: Value, /) -> Value:
        return value

    def close(self) -> None:
        self._end()
        self.cluster.close()

    def _start_processes(self) -> None:
        self.cluster.reserve()
        self.processes = self.cluster.spawn(RankProcess, *self._settings(), beside=(_SCORING, _WATCHING))
        for process in self.processes:
            self._describe(process, ", ".join(self.placement.roles_of(process.rank)))
        places = self.everywhere("starting", "place", starts=True)
        for process, (node, address, _, pid) in zip(self.processes, places, strict=True):
            process.node, process.pid = f"{node} {address}", pid
        _, address, port, _ = places[0]
        # in a local cluster all processes are on this node
        address = "127.0.0.1" if self.cluster.is_ours else address
        self.everywhere("meeting the other ranks", "join", pack((address, port)), starts=True)

    def add_process(self, rank: int, roles: str) -> Process:
        """A process that meets no other rank; its calls wait for a free device."""
        environment, arguments = self._settings()
        process = self.cluster.add(RankProcess, rank, environment, arguments(rank), beside=(_SCORING, _WATCHING))
        self._describe(process, roles)
        return process

    def _settings(self) -> tuple[dict[str, str], Callable[[int], tuple[Any, ...]]]:
        """The environment of a rank's process, and the arguments of its constructor."""
        recipe = pack(list(self.source.recipe()))
        environment = {"OMP_NUM_THREADS": str(_threads(self.placement.devices_per_node))}
        return environment, lambda rank: (rank, self.placement.num_devices, recipe, str(self.run.log_folder))

    def _describe(self, process: Process, roles: str) -> None:
        process.roles, process.watched_by = roles, _WATCHING
        process.log_file = self.run.log_folder / f"rank_{process.rank}.log"

    def everywhere(self, call: str, method: str, *arguments: object, starts: bool = False) -> list[Any]:
        """A method of every process, and all results in rank order. What `starts` a run has the deadline of a start."""
        refs = [(p, getattr(p.handle, method).remote(*arguments)) for p in self.processes]
        start_s = self.cluster.request.timeout_s
        limit: tuple[float, str] = (start_s, START_LIMIT) if starts else (self.run.call_timeout_s, CALL_LIMIT)
        pending = Pending(call, refs, limit[0], lambda answers: [unpack(a) for a in answers], limit_key=limit[1])
        return cast("list[Any]", pending.get())

    def _run(self, group: WorkerGroup, method: str, plan: CallPlan, blocking: bool) -> Any:
        """A call on the ranks of a group. What several ranks get is stored once, and rows are no longer held here then."""
        packed: dict[int, Any] = {id(None): None}
        for arguments in plan.calls:
            if arguments is not None and id(arguments) not in packed:
                packed[id(arguments)] = store_call(*arguments)
        plan = replace(plan, calls=[packed[id(arguments)] for arguments in plan.calls])

        def call(process: Process, index: int) -> tuple[Process, Any]:
            run = process.handle.call
            if group.name == "reward":
                run = process.handle.score.options(concurrency_group=_SCORING)
            return process, run.remote(group.name, method, plan.calls[index], index in plan.answering)

        def send(index: int) -> tuple[Process, object]:
            return call(self._process(group.mesh.ranks[index]), index)

        first = self.processes[group.mesh.ranks[0]]

        def retry(number: int) -> tuple[Process, object]:
            """On the first rank. Metrics and counts of a process are lost with it."""
            if not plan.rows:
                return first, store_value(pack(None))
            again = call(first, plan.ranks()[number])
            if group.name == "rollout":  # its generation had ended
                first.handle.call.remote(group.name, "end_generation", store_value(pack(((), {}))), False)
            return again

        def opened(answer: Packed, process: Process, reference: object) -> object:
            """Columns of an added process are copied: the run outlives it, and perhaps its node."""
            return unpack(answer, reference=None if process.is_added else reference)

        name = f"{group.name}.{method}"
        pending = Pending.of_plan(name, plan, send, self.run.call_timeout_s, opened=opened, retry=retry)
        if self.scaling is not None and group.name == "rollout":
            self.scaling.watch(pending)
        return pending.get() if blocking else pending

    def _process(self, rank: int) -> Process:
        if rank < len(self.processes):
            return self.processes[rank]
        assert self.scaling is not None
        return self.scaling.process(rank)

    def _end(self) -> None:
        processes, self.processes = self.processes, []
        if self.scaling is not None:
            processes += self.scaling.all_processes()
            self.scaling = None
        if processes:
            file = self.run.ray.timeline_json_file
            if file:
                self.cluster.timeline(file)
            self.cluster.end(processes)


class RankProcess:
    """The actor of one device. Every method answers with a packed result, or with an error that the driver raises again."""

    def __init__(self, rank: int, size: int, recipe: Packed, log_dir: str):
        unblock_sigterm()
        setup_logging(Path(log_dir), rank)
        keep_freed_memory(one_arena=True)
        torch.set_num_threads(int(os.environ.get("OMP_NUM_THREADS", "1")))
        self.rank, self.size = rank, size
        make, *arguments = unpack(recipe)
        self.source: SpecSource = load_object(make)(*arguments)
        self.comm: Collectives | None = None
        self.workers: RankWorkers | None = None

    def place(self) -> PackedAnswer:
        """(node name, address, a free port, process id)."""
        return answer_call(lambda: (socket.gethostname(), own_address(), free_port(), os.getpid()))

    def join(self, meeting: Packed) -> PackedAnswer:
        """Meet the other ranks at the address of the first."""
        return answer_call(lambda: self._join(*unpack(meeting)))

    def _join(self, address: str, port: int) -> None:
        run = self.source.specs().run
        self.comm = Collectives.start(
            Peer(self.rank, self.size, address, port),
            device_type=resolve_device(run.device).type,
            timeout_s=run.collective_timeout_s,
            start_timeout_s=run.start_timeout_s,
            call_timeout_s=max(run.collective_timeout_s, run.call_timeout_s),
        )

    def build(self, task: Packed) -> PackedAnswer:
        """Make the workers; the facts of the model."""
        return answer_call(lambda: self._build(**unpack(task)))

    def build_added(self, task: Packed) -> PackedAnswer:
        """`build` for a process that meets no other; (node name, process id)."""

        def run() -> tuple[str, int]:
            log.info("This process joins a running run.")
            self._build(**unpack(task))
            return socket.gethostname(), os.getpid()

        return answer_call(run)

    def _build(
        self, devices_per_node: int, train: bool, time: str, devices: dict[str, Any] | None = None, **task: Any
    ) -> dict[str, object]:
        set_template_time(time)
        specs = self.source.specs(train=train)
        # the driver's devices follow from the recipe; lists of them would grow with the square of the processes
        placement = Placement(devices or self.source.specs().place(None).devices, devices_per_node)
        device = own_device(specs.run.device)
        with nullcontext() if self.comm is None else self.comm.doing("building the roles"):
            context = RankContext(specs, placement, self.rank, device, **task)
            self.workers = RankWorkers(context, self.comm)
        return self.workers.facts()

    def call(self, role: str, method: str, arguments: Packed, answers: bool) -> PackedAnswer:
        """Run a method of a worker; the result of a rank that does not answer for its group stays here."""
        assert self.workers is not None
        workers = self.workers

        def run() -> object:
            result = workers.call(role, method, *unpack(arguments, read_buffer))
            return result if answers else None

        return answer_call(run)

    def score(self, role: str, method: str, arguments: Packed, answers: bool) -> PackedAnswer:
        """`call` of a role that exchanges nothing with other ranks, in parallel with a call of another role."""
        assert self.workers is not None
        worker = self.workers.worker(role)

        def run() -> object:
            args, kwargs = unpack(arguments, read_buffer)
            with calls(f"{role}.{method}"):
                result = getattr(worker, method)(*args, **kwargs)
            return result if answers else None

        return answer_call(run)

    def sync_weights(self, version: int) -> PackedAnswer:
        """See WeightSync."""
        assert self.workers is not None
        assert self.workers.weights is not None
        weights = self.workers.weights
        return answer_call(lambda: weights.sync(version))

    def rollout_weights(self) -> PackedAnswer:
        """[(name, tensor), ...] that this process generates with, for `load`."""

        def run() -> list[tuple[str, torch.Tensor]]:
            assert self.workers is not None
            assert self.workers.rollout is not None
            assert self.workers.rollout.replica is not None
            module = self.workers.rollout.replica.module
            return [(name, p.detach().cpu()) for name, p in module.named_parameters()]

        return answer_call(run)

    def load(self, version: int, place: int, weights: Packed) -> PackedAnswer:
        """Load `weights` of `version` into an added process, and set its place among the processes that generate."""

        def run() -> None:
            assert self.workers is not None
            assert self.workers.rollout is not None
            assert self.workers.weights is not None
            self.workers.rollout.set_rank(place)
            self.workers.weights.sync(version, unpack(open_answer(weights, "the first rank of the rollout")))

        return answer_call(run)

    def stuck(self) -> str:
        """The call that has been running longest, with its innermost frames."""
        log.info("A call is late. The stacks of this process:\n%s", all_stacks())
        return longest_call()

    def end(self) -> PackedAnswer:
        """End the children of this process."""
        if self.workers is not None:
            self.workers.close()
        if self.comm is not None:
            self.comm.close()
        return pack(None)


def _threads(processes_per_node: int) -> int:
    text = os.environ.get("OMP_NUM_THREADS")
    return int(text) if text and text.isdigit() else max(1, (os.cpu_count() or 1) // processes_per_node)
