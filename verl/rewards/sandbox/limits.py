"""Limits of a scorer and of all that it starts: resources, most of them set with setrlimit, and its results."""

import resource
from dataclasses import dataclass

KIB, MIB = 1 << 10, 1 << 20


@dataclass(frozen=True)
class Limits:
    """Limits on the resources of one scorer (None: no limit), and on its prints and results.

    memory_mb: MiB of address space of each process, beyond the use of the loaded function. cpu_s: processor seconds of one
    call, over all threads and processes. max_file_mb: MiB of each file that it writes. max_open_files: per process.
    max_processes: not counting the scorer itself. network: whether sockets work. For each sample: max_output_kb, KiB of
    prints that the log keeps; max_result_kb, KiB of the result as JSON; max_parts, entries of a returned dict not counting
    the score; max_abs_score, the largest number in it. Group and batch statistics add squares of scores, and gradients grow
    with them: 1e14 squares of 1e12 stay below the largest float32, 3.4e38.
    """

    memory_mb: int | None = None
    cpu_s: float | None = None
    max_file_mb: int | None = 1024
    max_open_files: int | None = 1024
    max_processes: int | None = 64
    network: bool = False
    max_output_kb: int = 64
    max_result_kb: int = 256
    max_parts: int = 256
    max_abs_score: float = 1e12

    def apply(self, max_tasks: int | None) -> None:
        """Set every limit that the kernel enforces, but for memory. `max_tasks`: threads and processes of this user."""
        set_limit(resource.RLIMIT_CORE, 0)
        set_limit(resource.RLIMIT_FSIZE, None if self.max_file_mb is None else self.max_file_mb * MIB)
        set_limit(resource.RLIMIT_NOFILE, self.max_open_files)
        set_limit(resource.RLIMIT_NPROC, max_tasks)

    def apply_memory(self) -> None:
        """Limit memory; called when the function is loaded, so that large imports are not charged to a sample."""
        if self.memory_mb:
            set_limit(resource.RLIMIT_AS, _address_space_bytes() + self.memory_mb * MIB)


def set_limit(kind: int, value: int | None) -> None:
    """Set RLIMIT_... `kind` of this process and all that it starts to at most `value`; None changes nothing."""
    if value is not None:
        _, hard_limit = resource.getrlimit(kind)
        value = value if hard_limit == resource.RLIM_INFINITY else min(value, hard_limit)
        resource.setrlimit(kind, (value, value))


def _address_space_bytes() -> int:
    try:
        with open("/proc/self/statm") as file:
            return int(file.read().split()[0]) * resource.getpagesize()
    except OSError:  # no /proc on this system
        return 0
