"""Descendants of a process, read from /proc: their number, the processor time they used, and ending them all.
Attributes of this process that Python does not set: hidden memory, and a seccomp filter.

Without /proc nothing is found.
"""

import contextlib
import ctypes
import errno
import math
import os
import platform
import signal
import struct
import sys
import time
from collections.abc import Callable, Collection, Iterable

from verl.parallel.child_processes import END_TIMEOUT_S, prctl

_TICKS_PER_S = os.sysconf("SC_CLK_TCK")


def descendants(pid: int, limit: float = math.inf) -> list[int]:
    """Ids of the processes below `pid`, parents first; one that starts or ends meanwhile may be missing. Counting stops past
    `limit`, because a fork bomb may grow faster than it is counted."""
    pids: list[int] = []
    waiting = [pid]
    while waiting and len(pids) <= limit:
        children = _children(waiting.pop())
        pids += children
        waiting += children
    return pids


def _children(pid: int) -> list[int]:
    children: list[int] = []
    with contextlib.suppress(OSError):
        for thread in os.listdir(f"/proc/{pid}/task"):
            with contextlib.suppress(OSError), open(f"/proc/{pid}/task/{thread}/children") as file:
                children += map(int, file.read().split())
    return children


def num_tasks_of_user() -> int:
    """Number of processes and threads of this user on the machine."""
    num_tasks = 0
    if not os.path.isdir("/proc"):
        return num_tasks
    for pid in filter(str.isdigit, os.listdir("/proc")):
        with contextlib.suppress(OSError):
            if os.stat(f"/proc/{pid}").st_uid == os.geteuid():
                num_tasks += len(os.listdir(f"/proc/{pid}/task"))
    return num_tasks


def cpu_seconds(folders: Iterable[str]) -> float:
    """Processor time of the processes of these folders in /proc and of those below them that have ended, in seconds."""
    return sum(sum(map(int, _stat(folder)[11:15])) for folder in folders) / _TICKS_PER_S


def now_tick() -> int:
    """Clock ticks since the machine started, the unit of starts of processes in /proc; 0 without such a clock."""
    boot_time = getattr(time, "CLOCK_BOOTTIME", None)
    return 0 if boot_time is None else int(time.clock_gettime(boot_time) * _TICKS_PER_S)


def start_ticks(folders: Iterable[str]) -> list[int]:
    """Start of every thread of the processes of these folders in /proc, in clock ticks since the machine started."""
    ticks = []
    for folder in folders:
        with contextlib.suppress(OSError):
            ticks += [int(_stat(f"{folder}/task/{thread}")[19]) for thread in os.listdir(f"{folder}/task")]
    return ticks


def state_of(pid: int) -> str:
    """Letter of a process's state in /proc (R, S, T, Z, ...); X when there is no such process."""
    return _stat(f"/proc/{pid}")[0]


def _stat(folder: str) -> list[str]:
    """Fields of a process or thread in /proc, from its state on; state X and zeros if it does not exist."""
    with contextlib.suppress(OSError), open(f"{folder}/stat", "rb") as file:
        if fields := file.read().rpartition(b")")[2].split():
            return [field.decode() for field in fields]
    return ["X", *["0"] * 50]


def kill_descendants(spared: Collection[int] = (), group: int = 0) -> None:
    """End every process below this one but `spared`, and wait for their ends. `group`: a process group below this process,
    with its members: they get the signal at once, also while they are being forked."""
    deadline = time.monotonic() + END_TIMEOUT_S
    num_empty_looks = 0
    while num_empty_looks < 2 and time.monotonic() < deadline:
        if group:
            _signal(os.killpg, [group], signal.SIGKILL)
        # orphans change their parent, so a look may miss those below one that has ended; it counts as a process
        pids = [pid for pid in _stop_below(os.getpid(), spared) if not _is_zombie_of_another(pid)]
        num_empty_looks = 0 if pids else num_empty_looks + 1
        _signal(os.kill, pids, signal.SIGKILL)
        for process in pids:
            with contextlib.suppress(ChildProcessError):
                os.waitpid(process, os.WNOHANG)
        if pids:
            time.sleep(0.002)


def _is_zombie_of_another(pid: int) -> bool:
    state, parent, *_ = _stat(f"/proc/{pid}")
    return state == "Z" and int(parent) != os.getpid()


def _stop_below(pid: int, spared: Collection[int]) -> list[int]:
    """Stop every process below `pid` but `spared`, each before its children are read: a stopped process starts no more."""
    pids: list[int] = []
    waiting = [pid]
    while waiting:
        parent = waiting.pop()
        if parent != pid and parent not in spared:
            _signal(os.kill, [parent], signal.SIGSTOP)
            pids.append(parent)
        waiting += _children(parent)
    return pids


def _signal(send: Callable[[int, int], None], pids: Iterable[int], number: int) -> None:
    for pid in pids:
        with contextlib.suppress(ProcessLookupError, PermissionError):
            send(pid, number)


_SET_DUMPABLE, _SET_SECCOMP, _SET_NO_NEW_PRIVS = 4, 22, 38
_SECCOMP_MODE_FILTER = 2
_CLONE_NEWUSER = 1 << 28
# machine -> (audit architecture, numbers of the calls socket, clone, unshare, setpgid, three before setsid, and add_key, after
# before the two further ones of the kernel's keyrings)
_MACHINES = {"x86_64": (0xC000003E, 41, 56, 272, 109, 248), "aarch64": (0xC00000B7, 198, 220, 97, 154, 217)}
_IO_URING_SETUP, _CLONE3 = 425, 435  # the same on every machine; io_uring opens sockets without the call `socket`


def hide_memory(hidden: bool = True) -> bool:
    """Set whether processes of the same user may read and write this process; False if the kernel cannot."""
    return prctl(_SET_DUMPABLE, 0 if hidden else 1)


def can_filter() -> bool:
    """Whether `filter_system_calls` supports this machine."""
    return sys.platform == "linux" and platform.machine() in _MACHINES


def filter_system_calls(*, sockets: bool, groups: bool = True) -> bool:
    """Refuse new user namespaces, the keyrings of the kernel (they hold this user's tickets and tokens), sockets unless
    `sockets`, and another process group unless `groups`, to this process and all that it starts, for good; False if there
    is no such filter.

    Sockets of every family are refused (EACCES), those to other processes of the machine included; socketpair works.
    Needs no rights.
    """
    if not can_filter():
        return False
    architecture, socket, clone, unshare, setpgid, add_key = _MACHINES[platform.machine()]
    refused = [*range(add_key, add_key + 3)]
    refused += [] if sockets else [socket, _IO_URING_SETUP]
    refused += [] if groups else [setpgid, setpgid + 3]
    program = _program(architecture, refused, (clone, unshare))
    pointer = ctypes.byref(_Filter(len(program) // 8, program))
    return prctl(_SET_NO_NEW_PRIVS, 1) and prctl(_SET_SECCOMP, _SECCOMP_MODE_FILTER, pointer)


class _Filter(ctypes.Structure):
    _fields_ = (("length", ctypes.c_ushort), ("instructions", ctypes.c_char_p))


def _program(architecture: int, refused: Iterable[int], namespace_calls: Iterable[int]) -> bytes:
    """The filter in classic BPF: (operation, jump if true, jump if false, operand)."""
    load, equal, at_least, any_bit, answer = 0x20, 0x15, 0x35, 0x45, 0x06
    number_at, architecture_at, first_argument_at = 0, 4, 16
    allow = (answer, 0, 0, 0x7FFF0000)

    def refuse(error: int) -> tuple[int, int, int, int]:
        return (answer, 0, 0, 0x00050000 | error)

    code = [
        (load, 0, 0, architecture_at),
        *((equal, 1, 0, architecture), refuse(errno.EACCES)),  # calls of another architecture have other numbers
        (load, 0, 0, number_at),
        *((at_least, 0, 1, 0x40000000), refuse(errno.EACCES)),  # the x32 calls of x86_64
        *((equal, 0, 1, _CLONE3), refuse(errno.ENOSYS)),  # its flags are in memory; the C library falls back to clone
    ]
    for call in refused:
        code += [(equal, 0, 1, call), refuse(errno.EACCES)]
    for call in namespace_calls:
        code += [(equal, 0, 4, call), (load, 0, 0, first_argument_at), (any_bit, 0, 1, _CLONE_NEWUSER)]
        code += [refuse(errno.EPERM), allow]
    return b"".join(struct.pack("=HBBI", *instruction) for instruction in [*code, allow])
