"""Start a scorer in a sandbox: new namespaces by util-linux `unshare` if the kernel grants them, else below a reaper.

    namespaces   run -> unshare -> sh (process 1 of the PID namespace) -> scorer
    fallback     run -> reaper.py -> scorer

With a PID namespace the kernel ends every process in it with process 1. Process 1 ends with unshare, unshare with the run.
"""

import contextlib
import functools
import glob
import math
import os
import shutil
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Iterable, Mapping, Sequence

from verl.parallel.child_processes import END_TIMEOUT_S, python_command
from verl.rewards.sandbox.limits import Limits
from verl.rewards.sandbox.processes import (
    can_filter,
    cpu_seconds,
    descendants,
    num_tasks_of_user,
    start_ticks,
    state_of,
)

_PROBE_TIMEOUT_S = 10.0
_KILL_TIMEOUT_S = END_TIMEOUT_S + 5.0  # of a reaper: it waits itself
_NUM_LIBRARY_THREADS = 64  # the kernel counts threads as processes
_NUM_OTHER_TASKS = 1024  # that the user may start outside of the sandbox later
_SIGNALS_FROM_OUTSIDE = ("SIGKILL", "SIGTERM", "SIGINT", "SIGHUP", "SIGQUIT")
_KEPT_CAPABILITIES = "+chown,+dac_override,+dac_read_search,+fowner,+fsetid"  # what root's files need
# Process 1 keeps the capabilities that the scorer loses, so that the scorer can neither trace it nor undo its setup. It sets
# the number of process ids to its first argument (the kernel gives none up to 300 twice). It makes the kernel's settings
# read-only, since root's scorer could write them without a capability. It mounts a separate shared memory, and empty folders
# and files in the place of its other arguments up to --.
_PROCESS_1 = """
if [ "$1" != 0 ]; then
  { echo 300 > /proc/sys/kernel/ns_last_pid; echo $((301 + $1)) > /proc/sys/kernel/pid_max; } 2> /dev/null
fi
shift
{
  mount --bind /proc/sys /proc/sys
  for file in /proc/sysrq-trigger /dev/kmsg; do [ ! -e $file ] || mount --bind /dev/null $file; done
  for place in $(cut -d " " -f 2 /proc/self/mounts); do
    case "$place" in
    /sys/fs/cgroup) mount -t tmpfs -o mode=555,size=4k none "$place" ;;
    /sys/fs/cgroup/*) ;;
    /sys | /sys/* | /proc/sys) mount -o remount,bind,ro "$place" ;;
    esac
  done
} 2> /dev/null
while [ "$1" != -- ]; do
  if [ "$1" = /dev/shm ]; then mount -t tmpfs -o mode=1777,size=256m none "$1"
  elif [ -d "$1" ]; then mount -t tmpfs -o mode=555,size=4k none "$1"
  else mount --bind /dev/null "$1"; fi
  shift
done
shift
"$@"; exit $?
"""
_SOCKETS = ("/run/containerd", "/run/dbus", "/run/docker.sock", "/run/user", "/tmp/.X11-unix")
_RAY = "/tmp/ray"
_CREDENTIALS = (
    *(".aws", ".azure", ".cache/huggingface/stored_tokens", ".cache/huggingface/token", ".config/gcloud", ".config/gh"),
    *(".docker", ".git-credentials", ".gnupg", ".kube", ".netrc", ".pypirc", ".ssh"),
)


def _drop_privileges(setpriv: str) -> tuple[str, ...]:
    bounding = f"--bounding-set=-all,{_KEPT_CAPABILITIES}"
    return (setpriv, "--no-new-privs", "--inh-caps=-all", "--ambient-caps=-all", bounding)


@functools.cache
def namespace_command(network: bool, hidden: tuple[str, ...], max_tasks: int | None = None) -> tuple[str, ...]:
    """Command that runs its arguments in new PID, mount, IPC and (unless `network`) network namespaces; () if refused.
    `hidden`: paths that are empty there. `max_tasks`: threads and processes there, if the kernel keeps that number for
    each namespace."""
    num_ids = max_tasks if max_tasks and _linux_is_at_least(6, 14) else 0  # an older kernel would limit the machine
    unshare, setpriv = shutil.which("unshare"), shutil.which("setpriv")
    if not (unshare and setpriv):
        return ()
    separate = ("--pid", "--fork", "--kill-child", "--mount-proc", "--ipc", *(() if network else ("--net",)))
    in_user_namespace = ("--user", "--map-current-user", "--keep-caps")
    for user in ((), in_user_namespace) if os.geteuid() == 0 else (in_user_namespace,):
        start = (setpriv, "--pdeathsig", "KILL", unshare, *user, *separate)
        command = (*start, "sh", "-c", _PROCESS_1, "sandbox", str(num_ids), *hidden, "--", *_drop_privileges(setpriv))
        if _succeeds(command):
            return command
    return ()


def hidden_paths(needed: Iterable[str]) -> tuple[str, ...]:
    """Shared memory, sockets of other programs (Ray's among them), and credentials in this user's home; as far as they exist
    and nothing `needed` is inside them."""
    places = [os.path.abspath(path) for path in needed]

    def is_needed(path: str) -> bool:
        return any(f"{place}/".startswith(f"{path}/") for place in places)

    home = glob.escape(os.path.expanduser("~"))
    agent = glob.escape(os.environ.get("SSH_AUTH_SOCK", ""))
    ray = f"{_RAY}/session_*/sockets" if is_needed(_RAY) else _RAY  # one mount in place of one for each old session
    patterns = ("/dev/shm", agent, ray, *_SOCKETS, *(os.path.join(home, name) for name in _CREDENTIALS))
    paths = [path for pattern in patterns for path in glob.glob(pattern)]
    return tuple(path for path in paths if not is_needed(path))


@functools.cache
def _fallback_privileges() -> tuple[str, ...]:
    """Command that runs its arguments without privileges, below the reaper; () if root's cannot be dropped."""
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
    """A started scorer with everything that it starts. Create it on a thread that lives as long: on Linux it ends with that
    thread."""

    def __init__(
        self,
        command: Sequence[str],
        limits: Limits,
        *,
        fd: int,
        output: int,
        env: Mapping[str, str],
        needed: Iterable[str] = (),
        first: Sequence[str] = (),
    ):
        """Run `command`: it inherits `fd`, prints to `output` and reads the paths `needed`. In namespaces the command
        `first` runs it, with the rights of process 1. Raises OSError when it cannot be started."""
        self.limits = limits
        prefix = namespace_command(limits.network, () if limits.network else hidden_paths(needed), self._most_tasks)
        self.has_namespaces = bool(prefix)
        self._in_user_namespace = "--user" in prefix
        if prefix and first:
            end = prefix.index("--") + 1
            prefix = (*prefix[:end], *first, *prefix[end:])
        if not prefix:
            reaper = python_command("verl.rewards.sandbox.reaper", str(os.getpid()))
            prefix = (*reaper, *_fallback_privileges())
        self._process = subprocess.Popen(
            [*prefix, *command],
            stdin=subprocess.DEVNULL,
            stdout=output,
            stderr=output,
            pass_fds=(fd,),
            env=dict(env),
            start_new_session=True,
        )
        self._num_own = 2 if self.has_namespaces else 1  # processes below ours that are no excess: sh and the scorer
        self._num_own_tasks = 0
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
        """RLIMIT_NPROC of the scorer, threads included: it stops a fork bomb before it is seen. None for root, whom the
        kernel limits by process ids or not at all, and if the kernel would count processes of other sandboxes."""
        if self._in_user_namespace:
            return self._most_tasks if _linux_is_at_least(5, 14) else None
        if os.geteuid() == 0 or self.limits.max_processes is None:
            return None
        return num_tasks_of_user() + self.limits.max_processes + _NUM_OTHER_TASKS

    @property
    def _most_tasks(self) -> int | None:
        limit = self.limits.max_processes
        return None if limit is None else limit + _NUM_LIBRARY_THREADS

    def started(self) -> None:
        """Remember the first process below ours: process 1 of the namespace, or the scorer as leader of its group; and
        the number of threads of a scorer that has not been called."""
        self._first = next(iter(descendants(self.pid, 1)), self._first)
        self._num_own_tasks = len(start_ticks(self._processes()))

    def has_tasks_older_than(self, tick: int) -> bool:
        """Whether the scorer has threads or processes that were started by a call before clock tick `tick`."""
        return sum(0 < start <= tick for start in start_ticks(self._processes())) > self._num_own_tasks

    def has_too_many_since(self, tick: int) -> bool:
        """Whether more processes than the limit allows were started after clock tick `tick`, in which an earlier sample may
        have started some too."""
        limit = self.limits.max_processes
        paths = self._processes(math.inf if limit is None else 2 * (limit + self._num_own))  # half of them may be older
        return limit is not None and sum(start > tick for start in start_ticks(paths)) > limit

    def cpu_seconds(self) -> float:
        """Processor seconds of all processes so far."""
        return cpu_seconds(self._processes())

    def _processes(self, limit: float = math.inf) -> list[str]:
        """Folders in /proc of the processes below ours; a namespace lists its own, since a walk falls behind a fork bomb."""
        if self.has_namespaces and self._first:
            proc = os.path.join("/proc", str(self._first), "root", "proc")
            with contextlib.suppress(OSError):
                return [f"{proc}/{name}" for name in os.listdir(proc) if name.isdigit()]
        return [f"/proc/{pid}" for pid in descendants(self.pid, limit)]

    def excess(self, used_s: float) -> str | None:
        """The limit that the scorer exceeds since its processes had used `used_s` seconds, as a sentence, or None."""
        limit, cpu_s = self.limits.max_processes, self.limits.cpu_s
        processes = self._processes(math.inf if limit is None else limit + self._num_own)
        if limit is not None and len(processes) - self._num_own > limit:
            return f"started more processes than reward.max_processes={limit} allows"
        if cpu_s is not None and cpu_seconds(processes) - used_s > cpu_s:
            return f"used more processor time than reward.cpu_s={cpu_s:g} s allows"
        return None

    def is_stopped(self) -> bool:
        """Whether a signal or a debugger has stopped the scorer."""
        pids = descendants(self.pid, self._num_own)[: self._num_own]
        return len(pids) == self._num_own and state_of(pids[-1]) in "Tt"

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
        self._first = next(iter(descendants(self.pid, 1)), self._first)
        _kill(os.killpg, self.pid, signal.SIGCONT)  # a stopped reaper or unshare would not end
        if not self.has_namespaces:
            self._process.terminate()
        elif self._first:
            _kill(os.kill, self._first, signal.SIGKILL)  # unshare ends when the kernel has ended every other process
        else:
            self._process.kill()
        self.how_it_ended(_KILL_TIMEOUT_S)
        _kill(os.killpg, self.pid, signal.SIGKILL)
        if self._first and not self.has_namespaces:
            _kill(os.killpg, self._first, signal.SIGKILL)  # of a reaper that was killed itself
        self.how_it_ended(_KILL_TIMEOUT_S)
        deadline = time.monotonic() + _KILL_TIMEOUT_S
        while self._first and state_of(self._first) not in "ZX" and time.monotonic() < deadline:
            time.sleep(0.002)  # of an unshare or a reaper that was killed itself


def describe_exit(code: int) -> str:
    """ "ended its process with exit code 3"; for -11, and for 139 from a shell, "ended its process by SIGSEGV"."""
    number = -code if code < 0 else code - 128
    if number <= 0:
        return f"ended its process with exit code {code}"
    with contextlib.suppress(ValueError):
        return f"ended its process by {signal.Signals(number).name}"
    return f"ended its process by signal {number}" if code < 0 else f"ended its process with exit code {code}"


def perhaps_from_outside(end: str, last_line: str) -> bool:
    """Whether a person, a job scheduler or the system (for its memory) may have caused `end`, worded as by `describe_exit`.
    `last_line` is the last line of output: unshare 2.38 reports a killed process 1 as an error of unshare."""
    return end.endswith(_SIGNALS_FROM_OUTSIDE) or last_line.startswith("unshare: ")


def _kill(send: Callable[[int, int], None], pid: int, number: int) -> None:
    with contextlib.suppress(ProcessLookupError, PermissionError):
        send(pid, number)


def _linux_is_at_least(*least: int) -> bool:
    """Whether the kernel counts by namespace: RLIMIT_NPROC from Linux 5.14 on, kernel.pid_max from 6.14 on."""
    version = [int(part) for part in os.uname().release.split("-")[0].split(".")[:2] if part.isdigit()]
    return sys.platform == "linux" and version >= list(least)


def remove_folder(folder: str) -> None:
    """Remove a folder that a scorer has filled, once its processes are ended. Links are removed, never followed."""
    if os.path.islink(folder) or not os.path.isdir(folder):  # rmtree would wait for the writer of a pipe
        with contextlib.suppress(FileNotFoundError):
            os.unlink(folder)
        return
    try:
        shutil.rmtree(folder)
    except (OSError, RecursionError):  # rights taken away, or folders thousands deep
        for command in (["chmod", "-R", "u+rwx"], ["rm", "-rf"]):
            subprocess.run([*command, "--", folder], stdin=subprocess.DEVNULL, stderr=subprocess.DEVNULL)
