"""Start a scorer in a sandbox: new namespaces by util-linux `unshare` where the kernel grants them, else below a reaper.

    namespaces   run -> unshare -> sh (process 1 of the PID namespace) -> scorer
    fallback     run -> reaper.py -> scorer

With a PID namespace the kernel ends every process in it with process 1. Process 1 ends with unshare, unshare with the run.
"""

from __future__ import annotations

import contextlib
import functools
import math
import os
import shutil
import signal
import subprocess
import sys
from collections.abc import Callable, Mapping, Sequence
from typing import BinaryIO

from verl.rewards.sandbox.limits import Limits
from verl.rewards.sandbox.prctl import can_filter
from verl.rewards.sandbox.processes import cpu_seconds, descendants, num_tasks_of_user, state_of

_PROBE_TIMEOUT_S = 10.0
_KILL_TIMEOUT_S = 5.0
_NUM_LIBRARY_THREADS = 64  # the kernel counts threads as processes
_NUM_OTHER_TASKS = 1024  # that the user may start outside of the sandbox later
_KEPT_CAPABILITIES = "+chown,+dac_override,+dac_read_search,+fowner,+fsetid"  # what root's files need
# Process 1 keeps the capabilities that the scorer loses, so that the scorer cannot trace it.
_PROCESS_1 = ("sh", "-c", '"$@"; exit $?', "sandbox")


def _drop_privileges(setpriv: str) -> tuple[str, ...]:
    bounding = f"--bounding-set=-all,{_KEPT_CAPABILITIES}"
    return (setpriv, "--no-new-privs", "--inh-caps=-all", "--ambient-caps=-all", bounding)


@functools.cache
def namespace_command(network: bool) -> tuple[str, ...]:
    """Command that runs its arguments in new PID, mount, IPC and (unless `network`) network namespaces; () if refused."""
    unshare, setpriv = shutil.which("unshare"), shutil.which("setpriv")
    if not (unshare and setpriv):
        return ()
    separate = ("--pid", "--fork", "--kill-child", "--mount-proc", "--ipc", *(() if network else ("--net",)))
    in_user_namespace = ("--user", "--map-current-user", "--keep-caps")
    for user in ((), in_user_namespace) if os.geteuid() == 0 else (in_user_namespace,):
        start = (setpriv, "--pdeathsig", "KILL", unshare, *user, *separate)
        command = (*start, *_PROCESS_1, *_drop_privileges(setpriv))
        if _succeeds(command):
            return command
    return ()


@functools.cache
def _fallback_privileges() -> tuple[str, ...]:
    """Command that runs its arguments without privileges, below the reaper; () where root's cannot be dropped."""
    setpriv = shutil.which("setpriv")
    command = _drop_privileges(setpriv) if setpriv and os.geteuid() == 0 else ()
    return command if command and _succeeds(command) else ()


def _succeeds(command: Sequence[str]) -> bool:
    null = subprocess.DEVNULL
    try:
        probe = subprocess.run([*command, "true"], stdin=null, stdout=null, stderr=null, timeout=_PROBE_TIMEOUT_S)
    except (OSError, subprocess.TimeoutExpired):
        return False
    return probe.returncode == 0


class Sandbox:
    """A started scorer with everything that it starts.

    Create it on a thread that lives as long as the scorer: on Linux the scorer ends with that thread.
    """

    def __init__(self, command: Sequence[str], limits: Limits, fd: int, env: Mapping[str, str], log: BinaryIO):
        """Run `command`, which inherits `fd` and writes to `log`. Raises OSError when it cannot be started."""
        self.limits = limits
        prefix = namespace_command(limits.network)
        self.has_namespaces = bool(prefix)
        self._in_user_namespace = "--user" in prefix
        if not prefix:
            reaper = (sys.executable, "-m", "verl.rewards.sandbox.reaper", str(os.getpid()))
            prefix = (*reaper, *_fallback_privileges())
        self._process = subprocess.Popen(
            [*prefix, *command],
            stdin=subprocess.DEVNULL,
            stdout=log,
            stderr=log,
            pass_fds=(fd,),
            env=dict(env),
            start_new_session=True,
        )
        self._num_own = 2 if self.has_namespaces else 1  # processes below ours that are no excess: sh and the scorer
        self._first = 0
        self._ended = False

    @property
    def pid(self) -> int:
        return self._process.pid

    @property
    def alive(self) -> bool:
        return self._process.poll() is None

    @property
    def notices(self) -> list[str]:
        """Protections that this machine does not grant, a sentence each."""
        if self.has_namespaces:
            return []
        notices = [
            "The kernel grants no PID namespace: the processes that a reward function starts are looked for and "
            "ended one by one, and see those of this user."
        ]
        if not self.limits.network:
            how = (
                "a filter of system calls refuses sockets to them instead"
                if can_filter()
                else "only what they do through Python's own sockets is refused, which a hostile one can go around"
            )
            notices.append(f"The kernel grants no network namespace to reward functions; {how}.")
        return notices

    @property
    def max_tasks(self) -> int | None:
        """RLIMIT_NPROC of the scorer, threads included, which stops a fork bomb before it is seen.

        None for root, which the kernel does not limit, and where the kernel would count processes of other sandboxes.
        """
        most = self.limits.max_processes
        if most is None:
            return None
        if self._in_user_namespace:
            return most + _NUM_LIBRARY_THREADS if _counts_by_namespace() else None
        return num_tasks_of_user() + most + _NUM_OTHER_TASKS if os.geteuid() != 0 else None

    def started(self) -> None:
        """Remember the first process below ours: process 1 of the namespace, or the scorer, which leads its group."""
        self._first = next(iter(descendants(self.pid, 1)), self._first)

    def cpu_seconds(self) -> float:
        """Processor seconds of all processes so far."""
        return cpu_seconds(descendants(self.pid))

    def excess(self, used_s: float) -> str | None:
        """The limit that the scorer exceeds since its processes had used `used_s` seconds, as a sentence, or None."""
        most, cpu_s = self.limits.max_processes, self.limits.cpu_s
        processes = descendants(self.pid, math.inf if most is None else most + self._num_own)
        if most is not None and len(processes) - self._num_own > most:
            return f"started more processes than reward.max_processes={most} allows"
        if cpu_s is not None and cpu_seconds(processes) - used_s > cpu_s:
            return f"used more processor time than reward.cpu_s={cpu_s:g} s allows"
        return None

    def is_stopped(self) -> bool:
        """Whether a signal has stopped the scorer (SIGSTOP)."""
        own = descendants(self.pid, self._num_own)[: self._num_own]
        return len(own) == self._num_own and state_of(own[-1]) == "T"

    def how_it_ended(self, timeout_s: float) -> str | None:
        """Description of the scorer's end: "ended its process by SIGSEGV"; None while it runs after `timeout_s`."""
        try:
            return describe_exit(self._process.wait(timeout_s))
        except subprocess.TimeoutExpired:
            return None

    def end(self) -> None:
        """End every process of the sandbox. May be called again, and from any thread."""
        if self._ended:
            return
        self._ended = True
        self.started()
        if not self.has_namespaces:
            self._process.terminate()
        elif self._first:
            _kill(os.kill, self._first)  # unshare ends when the kernel has ended every other process
        else:
            self._process.kill()
        self.how_it_ended(_KILL_TIMEOUT_S)
        _kill(os.killpg, self.pid)
        if self._first and not self.has_namespaces:
            _kill(os.killpg, self._first)  # of a reaper that was killed itself
        self.how_it_ended(_KILL_TIMEOUT_S)


def describe_exit(code: int) -> str:
    """ "ended its process with exit code 3"; for -11, and for 139 from a shell, "ended its process by SIGSEGV"."""
    number = -code if code < 0 else code - 128
    if number <= 0:
        return f"ended its process with exit code {code}"
    with contextlib.suppress(ValueError):
        return f"ended its process by {signal.Signals(number).name}"
    return f"ended its process by signal {number}" if code < 0 else f"ended its process with exit code {code}"


def _kill(send: Callable[[int, int], None], pid: int) -> None:
    with contextlib.suppress(ProcessLookupError, PermissionError):
        send(pid, signal.SIGKILL)


def _counts_by_namespace() -> bool:
    """Whether a limit on processes counts those of its namespace alone: from Linux 5.14 on."""
    version = [int(part) for part in os.uname().release.split("-")[0].split(".")[:2] if part.isdigit()]
    return sys.platform == "linux" and version >= [5, 14]


def remove_folder(folder: str) -> None:
    """Remove a folder that a scorer has filled, also where it took rights away; links are removed, never followed."""
    if os.path.islink(folder):
        os.unlink(folder)
        return
    with contextlib.suppress(OSError):
        os.chmod(folder, 0o700)
    with contextlib.suppress(RecursionError):  # folders inside folders, thousands deep
        for place, inner, _ in os.walk(folder):
            for path in (os.path.join(place, name) for name in inner):
                with contextlib.suppress(OSError):
                    if not os.path.islink(path):
                        os.chmod(path, 0o700)
        shutil.rmtree(folder, ignore_errors=True)
