"""The box in which a scorer runs: limits on what it may take, namespaces that hold all it starts and keep it from the
network, and the most that is possible where the kernel refuses them.

    keeper (trusted, outside)  ->  guard (process 1 of the box, trusted)  ->  scorer, and whatever it starts

When the guard ends, the kernel ends every process of its PID namespace, also those that ignore signals or have left
their session. The guard ends with the keeper, the keeper with the run.
"""

from __future__ import annotations

import contextlib
import errno
import math
import os
import resource
import select
import shutil
import signal
import socket
import sys
import traceback
from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from typing import Any

from verl.parallel.child_processes import adopt_orphans
from verl.rewards.sandbox import kernel
from verl.rewards.sandbox.processes import cpu_seconds, descendants, end_all_below, num_tasks_of_user, visible

MIB = 1 << 20
END_TIMEOUT_S = 4.0

NO_NETWORK = "Reward functions have no network in this run; set reward.network=True if this one needs it."
_NUM_LIBRARY_THREADS = 64  # the kernel counts threads as processes
_NUM_OTHER_TASKS = 1024  # that the user may start outside of the box later


@dataclass(frozen=True)
class Limits:
    """What one scorer may take from the machine; None: no limit.

    memory_mb: MiB of address space of each process, beyond what the loaded function holds. cpu_s: processor seconds of one
    call, of all its threads and processes. max_file_mb: MiB of each file that it writes. max_open_files: of each process.
    max_processes: beside the scorer itself. network: whether it may reach any.
    """

    memory_mb: int | None = None
    cpu_s: float | None = None
    max_file_mb: int | None = 1024
    max_open_files: int | None = 1024
    max_processes: int | None = 64
    network: bool = False

    def apply(self) -> None:
        """The limits that the kernel keeps by itself, but for memory, on this process and all that it starts."""
        set_limit(resource.RLIMIT_CORE, 0)
        set_limit(resource.RLIMIT_FSIZE, None if self.max_file_mb is None else self.max_file_mb * MIB)
        set_limit(resource.RLIMIT_NOFILE, self.max_open_files)

    def apply_memory(self) -> None:
        """To be called when the function is loaded, so that importing a large library is not charged to a sample."""
        if self.memory_mb:
            set_limit(resource.RLIMIT_AS, _address_space_bytes() + self.memory_mb * MIB)


def set_limit(kind: int, value: int | None) -> None:
    """RLIMIT_... `kind` of this process and all that it starts, at most `value`."""
    if value is not None:
        _, most = resource.getrlimit(kind)
        value = value if most == resource.RLIM_INFINITY else min(value, most)
        resource.setrlimit(kind, (value, value))


def _address_space_bytes() -> int:
    try:
        with open("/proc/self/statm") as file:
            return int(file.read().split()[0]) * resource.getpagesize()
    except OSError:  # no /proc on this system
        return 0


@dataclass(frozen=True)
class Walls:
    """Which namespaces the kernel grants this user. `user`: the others need a user namespace around them."""

    user: bool = False
    processes: bool = False
    network: bool = False

    @property
    def flags(self) -> int:
        flags = kernel.CLONE_NEWUSER if self.user else 0
        flags |= kernel.CLONE_NEWPID | kernel.CLONE_NEWNS | kernel.CLONE_NEWIPC if self.processes else 0
        return flags | (kernel.CLONE_NEWNET if self.network else 0)

    @property
    def needed(self) -> bool:
        return self.processes or self.network


def find_walls(network: bool) -> Walls:
    """The strongest that the kernel grants; each combination is tried in a process that ends at once."""
    for processes, cut_off in ((True, not network), (False, not network), (True, False)):
        for user in (False, True) if os.geteuid() == 0 else (True,):
            walls = Walls(user, processes, cut_off)
            if walls.needed and _succeeds(partial(_try, walls)):
                return walls
    return Walls()


def _try(walls: Walls) -> None:
    kernel.unshare(walls.flags)
    if walls.processes and not _succeeds(kernel.mount_proc):
        raise OSError(errno.EPERM, "a new /proc is refused")


def _succeeds(attempt: Callable[[], None]) -> bool:
    pid = os.fork()
    if pid == 0:
        code = 1
        with contextlib.suppress(OSError):
            attempt()
            code = 0
        os._exit(code)
    return os.waitpid(pid, 0)[1] == 0


class Box:
    """A started scorer, as its keeper sees it. `status` is a file descriptor that becomes readable when it ends."""

    def __init__(self, limits: Limits, folder: str, scorer: Callable[[Walls], None], not_inherited: list[Any]):
        """Fork the guard, and below it the process that calls `scorer` and ends when that returns. `folder` is removed at
        the end; `not_inherited` are the keeper's sockets, closed in the box."""
        self.limits = limits
        self.folder = folder
        self.walls = find_walls(limits.network)
        adopt_orphans()
        if self.walls.needed:
            kernel.unshare(self.walls.flags)
        self.status, status = os.pipe()
        self.guard = os.fork()
        if self.guard == 0:
            for given in not_inherited:
                given.close()
            os.close(self.status)
            _guard(self, status, scorer)
        os.close(status)
        if self.walls.processes:
            select.select([self.status], [], [])  # the guard has its /proc, which is the keeper's too from now on
            os.read(self.status, 1)

    @property
    def notices(self) -> list[str]:
        """What of the box the kernel of this machine does not grant, a sentence each."""
        said = []
        if not self.walls.processes:
            said.append(
                "The kernel grants no PID namespace: the processes that a reward function starts are looked for and "
                "ended one by one, and see those of this user."
            )
        if not self.limits.network and not self.walls.network:
            how = (
                "a filter of system calls refuses sockets to them instead"
                if kernel.can_refuse_sockets()
                else "only what they do through Python's own sockets is refused, which a hostile one can go around"
            )
            said.append(f"The kernel grants no network namespace to reward functions; {how}.")
        return said

    @property
    def group(self) -> int:
        """The process group of the guard, the scorer and whatever has not left it; 0 where a PID namespace holds them all."""
        return 0 if self.walls.processes else self.guard

    def processes(self, most: float = math.inf) -> list[int]:
        """The guard, the scorer and what it has started; no more are looked for than `most` and a few."""
        if self.walls.processes:
            return visible()
        return [self.guard, *descendants(self.guard, most)]

    def cpu_seconds(self) -> float:
        return cpu_seconds(self.processes())

    def excess(self, used_s: float) -> str | None:
        """What the scorer has taken beyond its limits since its processes had used `used_s` seconds, or None."""
        most, cpu_s = self.limits.max_processes, self.limits.cpu_s
        processes = self.processes(math.inf if most is None else most + 1)
        if most is not None and len(processes) - 2 > most:
            return f"started more processes than reward.max_processes={most} allows"
        if cpu_s is not None and cpu_seconds(processes) - used_s > cpu_s:
            return f"used more processor time than reward.cpu_s={cpu_s:g} s allows"
        return None

    def ending(self) -> str:
        """How the scorer ended, once `status` is readable: "ended its process by SIGSEGV"."""
        word = os.read(self.status, 16)
        if word:
            return how_it_ended(os.waitstatus_to_exitcode(int(word)))
        # nothing was told: the guard itself was ended, which with a PID namespace no scorer can do
        found = os.waitid(os.P_PID, self.guard, os.WEXITED | os.WNOWAIT) if self.guard else None
        if found is None:
            return "ended its process"
        return how_it_ended(found.si_status if found.si_code == os.CLD_EXITED else -found.si_status)

    def end(self) -> None:
        """End every process of the box and remove its folder. May be called again."""
        guard, self.guard = self.guard, 0
        if guard:
            if not self.walls.processes:
                end_all_below(os.getpid(), END_TIMEOUT_S, group=guard)  # orphans are the keeper's children
            with contextlib.suppress(ProcessLookupError):
                os.kill(guard, signal.SIGKILL)
            with contextlib.suppress(ChildProcessError):
                os.waitpid(guard, 0)  # with a PID namespace: until its last process is gone
        remove_folder(self.folder)


def how_it_ended(code: int) -> str:
    """ "ended its process with exit code 3"; for -11 "ended its process by SIGSEGV"."""
    if code >= 0:
        return f"ended its process with exit code {code}"
    try:
        return f"ended its process by {signal.Signals(-code).name}"
    except ValueError:
        return f"ended its process by signal {-code}"


def _guard(box: Box, status: int, scorer: Callable[[Walls], None]) -> None:
    """Process 1 of the box: starts the scorer, buries orphans, tells how the scorer ended, and never returns."""
    code = 1
    try:
        signal.signal(signal.SIGTERM, signal.SIG_DFL)
        with contextlib.suppress(OSError):
            kernel.end_with_parent()
            kernel.hide_memory()
        os.setsid()  # so that a signal to this group does not reach the keeper
        adopt_orphans()  # to be counted with the others, and buried
        if box.walls.processes:
            kernel.mount_proc()
            os.write(status, b"\n")
        pid = os.fork()
        if pid == 0:
            os.close(status)
            _scorer(box, scorer)
        ended = 0
        while ended != pid:
            ended, how = os.wait()
        os.write(status, str(how).encode())
        code = 0
    except BaseException:  # noqa: BLE001 - a forked process must not go on in its parent's code; the log keeps the reason
        traceback.print_exc()
    finally:
        os._exit(code)


def _scorer(box: Box, scorer: Callable[[Walls], None]) -> None:
    code = 1
    try:
        with contextlib.suppress(OSError):
            kernel.hide_memory(False)
        box.limits.apply()
        set_limit(resource.RLIMIT_NPROC, _most_tasks(box))
        with contextlib.suppress(OSError):
            kernel.drop_privileges()
        if not box.limits.network:
            if not box.walls.network:
                with contextlib.suppress(OSError):
                    kernel.refuse_sockets()
            explain_refused_sockets()
        scorer(box.walls)
        code = 0
    except BaseException:  # noqa: BLE001 - as above
        traceback.print_exc()
    finally:
        os._exit(code)


def explain_refused_sockets() -> None:
    """Attempts of this Python to reach the network fail with a sentence that names the key. No wall: the kernel's is."""
    sys.addaudithook(_refuse_network)


_NETWORK_EVENTS = {"socket.connect", "socket.sendto", "socket.sendmsg", "socket.getaddrinfo", "socket.gethostbyname"}


def _refuse_network(event: str, arguments: tuple[Any, ...]) -> None:
    if event in _NETWORK_EVENTS and getattr(arguments[0], "family", None) != socket.AF_UNIX:
        raise PermissionError(errno.EACCES, NO_NETWORK)


def _most_tasks(box: Box) -> int | None:
    """That the kernel lets this user have, threads included, so that processes which multiply are stopped before they are seen;
    None for root, whom it does not count, and where it could only count those of other boxes too."""
    most = box.limits.max_processes
    if most is None:
        return None
    if box.walls.user:
        return most + _NUM_LIBRARY_THREADS if _counts_by_namespace() else None
    return num_tasks_of_user() + most + _NUM_OTHER_TASKS if os.geteuid() != 0 else None


def _counts_by_namespace() -> bool:
    """Before Linux 5.14 a limit on processes counts those of the user everywhere."""
    version = [int(part) for part in os.uname().release.split("-")[0].split(".")[:2] if part.isdigit()]
    return sys.platform == "linux" and version >= [5, 14]


def remove_folder(folder: str) -> None:
    """Remove a folder that a scorer has filled, also where it took rights away."""
    with contextlib.suppress(OSError):
        os.chmod(folder, 0o700)
    with contextlib.suppress(RecursionError):  # folders inside folders, thousands deep
        for place, inner, _ in os.walk(folder):
            for path in (os.path.join(place, name) for name in inner):
                with contextlib.suppress(OSError):
                    if not os.path.islink(path):
                        os.chmod(path, 0o700)
        shutil.rmtree(folder, ignore_errors=True)
