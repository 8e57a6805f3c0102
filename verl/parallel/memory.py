"""Memory of the machine, in a container its own limits."""

from pathlib import Path

CGROUP = Path("/sys/fs/cgroup")
CLEAR_REFS = Path("/proc/self/clear_refs")


def memory_limit() -> int:
    """Bytes of memory of the machine or the container."""
    total = system_memory("MemTotal")
    limit = content_of(CGROUP / "memory.max").strip()
    return min(total, int(limit)) if limit.isdigit() else total


def available_memory() -> int:
    """Bytes that a new process can allocate without swapping."""
    free = system_memory("MemAvailable")
    limit, used = content_of(CGROUP / "memory.max").strip(), content_of(CGROUP / "memory.current").strip()
    if not (limit.isdigit() and used.isdigit()):
        return free
    statistics = dict(line.split() for line in content_of(CGROUP / "memory.stat").splitlines())
    return min(free, int(limit) - int(used) + int(statistics.get("inactive_file", 0)))


def system_memory(name: str) -> int:
    """Bytes of memory of the machine, by the name that Linux gives them: MemTotal, MemAvailable or SwapTotal."""
    for line in content_of(Path("/proc/meminfo")).splitlines():
        if line.startswith(f"{name}:"):
            return int(line.split()[1]) << 10
    import psutil  # on other systems

    memory = psutil.virtual_memory()
    return int({"MemTotal": memory.total, "MemAvailable": memory.available}.get(name, psutil.swap_memory().total))


def resident_bytes() -> int:
    """Memory of this process."""
    return _status("VmRSS")


def reset_peak() -> bool:
    """Start the record of `peak_bytes` again; False if the system keeps none that can be reset (see proc(5), clear_refs)."""
    try:
        CLEAR_REFS.write_text("5")
    except OSError:
        return False
    return True


def peak_bytes() -> int:
    """The most memory of this process since `reset_peak`."""
    return _status("VmHWM")


def _status(name: str) -> int:
    lines = (line for line in content_of(Path("/proc/self/status")).splitlines() if line.startswith(f"{name}:"))
    return int(next(lines).split()[1]) << 10


def content_of(path: Path) -> str:
    """The text of a file of the system; "" without one."""
    try:
        return path.read_text(encoding="utf-8", errors="replace")
    except OSError:
        return ""
