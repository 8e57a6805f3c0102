"""Starting and watching processes: ranks of a run, with a deadline on everything."""

import os
import subprocess
import sys
import time
from contextlib import contextmanager
from pathlib import Path

import psutil
import pytest

from tests.forked import Forked
from tests.processes import wait_until
from verl.parallel.collectives import free_port
from verl.rewards.managers import build

ROOT = Path(__file__).resolve().parents[2]


def environment(**more):
    quiet = {
        "HF_HUB_OFFLINE": "1",
        "OMP_NUM_THREADS": "1",
        "OMP_WAIT_POLICY": "passive",
        "PYTHONPATH": str(ROOT),
        "VERL_TEST_WIDE_NORMS": "1",
    }
    launcher_names = ("RANK", "WORLD_SIZE", "MASTER_ADDR", "MASTER_PORT", "RAY_AUTH_MODE")
    inherited = {k: v for k, v in os.environ.items() if k not in launcher_names}
    return {**inherited, **quiet, **{k: str(v) for k, v in more.items()}}


def python(module, *arguments, env):
    """A fresh `python -m module arguments...`, both outputs in one pipe."""
    command = [sys.executable, "-m", module, *map(str, arguments)]
    return subprocess.Popen(command, cwd=ROOT, text=True, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, env=env)


class Ranks:
    """`size` processes of `python -m module arguments...`, as a launcher starts them. A launcher would take longer than
    the test. Leaving the block ends the remaining processes. Forks start at once, without the module's command line."""

    def __init__(self, size, module, *arguments, port=None, ranks=None, forked=True, **more):
        self.port = port or free_port()
        start = Forked if forked else python
        self.processes = [
            start(module, *arguments, env=environment(
                RANK=rank, LOCAL_RANK=rank, WORLD_SIZE=size, MASTER_ADDR="127.0.0.1", MASTER_PORT=self.port, **more
            ))
            for rank in (range(size) if ranks is None else ranks)
        ]  # fmt: skip

    def __enter__(self):
        return self

    def __exit__(self, *_):
        for process in self.processes:
            end_tree(process.pid)
            process.stdout.close()

    def wait(self, timeout_s=240):
        """(exit codes, outputs) of all; a rank that is still there after the deadline fails the test with its output."""
        until = time.monotonic() + timeout_s
        outcomes, late = [], []
        for rank, process in enumerate(self.processes):
            try:
                text, _ = process.communicate(timeout=max(0.1, until - time.monotonic()))
            except subprocess.TimeoutExpired:
                late.append(rank)
                end_tree(process.pid)
                text = process.communicate()[0]
            outcomes.append((process.returncode, text))
        codes, texts = [code for code, _ in outcomes], [text for _, text in outcomes]
        outputs = "\n".join(
            f"rank {rank}, exit code {code}:\n{text[-3000:]}" for rank, (code, text) in enumerate(outcomes)
        )
        assert not late, f"ranks {late} did not end within {timeout_s} s\n{outputs}"
        return codes, texts


def run(size, module, *arguments, timeout_s=240, **more):
    """All ranks to a good end; their outputs."""
    with Ranks(size, module, *arguments, **more) as ranks:
        codes, texts = ranks.wait(timeout_s)
    assert not any(codes), f"exit codes {codes}\n" + "\n".join(t[-3000:] for t in texts)
    return texts


@contextmanager
def scorers_of(job):
    """Ranks of `job` compute rewards themselves unless it `has_scorers`, whose start takes longer than a run's steps."""
    with pytest.MonkeyPatch.context() as patch:
        if not job.get("has_scorers"):
            patch.setattr(build, "RewardPool", build.DebugPool)
        yield


def wait_for_steps(metrics, count, *processes, timeout_s=240):
    """Until the file of metrics has so many rows. No process may end before."""

    def is_over():
        return any(p.poll() is not None for p in processes)

    def has_rows():
        return metrics.exists() and metrics.read_text().count("\n") >= count

    assert wait_until(lambda: has_rows() or is_over(), timeout_s), "no step was taken"
    assert not is_over(), processes[0].stdout.read()[-3000:]


def take_port(file):
    """The first rank chooses a free port the moment before it listens on it, the others learn it from `file`."""
    if "RANK" not in os.environ:
        return
    chosen = Path(file)
    if os.environ["RANK"] == "0":
        draft = chosen.with_suffix(".draft")
        draft.write_text(str(free_port()))
        draft.rename(chosen)
    assert wait_until(chosen.exists), f"rank 0 has not written {chosen}"
    os.environ["MASTER_PORT"] = chosen.read_text()


def end_tree(pid):
    """Kill a process and its children, with their process objects taken first."""
    try:
        family = [psutil.Process(pid), *psutil.Process(pid).children(recursive=True)]
    except psutil.NoSuchProcess:
        return
    for member in family:
        try:
            member.kill()
        except psutil.NoSuchProcess:
            pass


def family(*processes):
    """These processes and their descendants, each a psutil.Process (it differs from a later process with its id)."""
    members = [psutil.Process(process.pid) for process in processes]
    return [*members, *(child for member in members for child in member.children(recursive=True))]


def still_there(members, grace_s=60.0):
    """The processes of a `family` that have not ended after `grace_s` seconds."""
    wait_until(lambda: not any(map(_runs, members)), grace_s)
    return [p for p in members if _runs(p)]


def _runs(process):
    try:
        return process.is_running() and process.status() != psutil.STATUS_ZOMBIE
    except psutil.NoSuchProcess:
        return False


def survivors(mark, grace_s=60.0):
    """Command lines that hold `mark`, of processes that are still there after `grace_s` seconds."""
    until = time.monotonic() + grace_s
    while True:
        survivors = [p for p in psutil.process_iter(["pid", "cmdline", "status"]) if _holds(p, mark)]
        if not survivors or time.monotonic() > until:
            return [" ".join(p.info["cmdline"]) for p in survivors]
        time.sleep(0.2)


def _holds(process, mark):
    lines = process.info["cmdline"] or []
    return (
        process.info["status"] != psutil.STATUS_ZOMBIE and process.pid != os.getpid() and any(mark in c for c in lines)
    )
