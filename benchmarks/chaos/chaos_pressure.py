"""Runs whose disk becomes full, or whose process gets no more memory, at random moments; afterwards space is free again.

    python benchmarks/chaos/chaos.py --kills 0 --pressure 24

The run folders are on a small file system in memory, mounted in a namespace that `unshare` makes; no root is needed. A full
disk must end the run with a sentence, wherever it hits: in the ledger, the metrics, a save. Lack of memory is a limit on the
training process's address space (prlimit). A process that survives within the limit is killed some steps later, as the system
would do.
"""

from __future__ import annotations

import contextlib
import os
import random
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import psutil
from chaos_run import LIMIT_S, Kill, Lost, Victim, _Hit
from chaos_task import PHASES, Moment, Task

RUNTIME = "local"
_INSIDE = "VERL_CHAOS_MOUNTS"  # set in the namespace with separate mounts
_SIZE = "400m"  # of the file system; a save wants 64 MiB free
_LEFT = (0, 0, 4096, 65536, 1 << 20)  # bytes free after filling
_STEPS_WITHOUT_MEMORY = 3


def enter_own_mounts() -> None:
    """Start this command again where it may mount; returns there."""
    if _INSIDE not in os.environ:
        user = [] if os.geteuid() == 0 else ["--map-root-user"]
        os.execvpe(
            "unshare", ["unshare", "--mount", *user, sys.executable, *sys.argv], {**os.environ, _INSIDE: "1"}
        )  # fmt: skip


def mount_small_disk(task: Task) -> None:
    """Put the run folders of the task on a separate small file system."""
    disk = task.folder / RUNTIME
    disk.mkdir(parents=True, exist_ok=True)
    subprocess.run(["mount", "-t", "tmpfs", "-o", f"size={_SIZE}", "verl-chaos", str(disk)], check=True)


def unmount_small_disk(task: Task) -> None:
    subprocess.run(["umount", "--lazy", str(task.folder / RUNTIME)], check=False)


def plan_pressure(rng: random.Random, count: int) -> list[tuple[str, Moment]]:
    """(disk or memory, moment) of each."""
    return [
        (rng.choice(("disk", "disk", "memory")), Moment(3 * number + 2, rng.choice(PHASES), "driver", rng.random()))
        for number in range(count)
    ]


class PressedVictim(Victim):
    """Its output goes to another disk than its run folder."""

    def keys(self) -> list[str]:
        return [*super().keys(), "trainer.min_free_disk_gb=0", "trainer.max_actor_ckpt_to_keep=2"]

    def launch(self, log: Path) -> Any:
        self._log = self.task.folder / log.name
        return super().launch(self._log)

    def press(self, kind: str, moment: Moment, rng: random.Random) -> Kill | None:
        """Wait for the moment, take disk or memory away until the run has ended, and wait until it is where it was; None when
        it has ended well before that. Raises Lost when the end is no sentence, or the run does not come back."""
        until = time.monotonic() + LIMIT_S
        if not self._wait_for_step(max(moment.step, self._struck_step + 1), until) or not self._wait_for_phase(moment):
            return None
        time.sleep(moment.delay_s(self.usual_s))
        beat, now = self.beat(), time.time()
        if beat is None:
            return None
        self._struck_step = beat.step
        phase, place, self._said_before = self._phase(beat, now), kind, self._log.stat().st_size
        if kind == "disk":
            with full_disk(self.folder.parent, rng.choice(_LEFT)):
                self._wait_for_end(until)
            place = f"disk: {self._place()}"
        else:
            self._starve(beat.pid, beat.step, until)
        if self.process.poll() == 0:
            return None
        self._first_was_killed = True  # by us: the same command is run again
        began, by_hand = time.monotonic(), self._num_by_hand
        hit = _Hit(place, beat.pid, beat, phase, kind == "disk")
        comeback = self._come_back(hit)
        by = "hand" if self._num_by_hand > by_hand else "supervisor"
        again = 0 if comeback.resumed is None else max(comeback.reached - comeback.resumed + 1, 0)
        return Kill(RUNTIME, self.folder.name, place, beat.pid, beat.step, phase, by, comeback.at - began, again)

    def _wait_for_end(self, until: float) -> None:
        while self.process.poll() is None:
            self._check(until, "it did not end on a full disk")
            time.sleep(0.01)
        said = self._words()
        if self.process.poll() != 0 and ("Traceback" in said or "bug in verl" in said):
            raise Lost(f"a full disk was not reported in a sentence: {said[-1500:]}")

    def _words(self) -> str:
        return self._log.read_bytes()[self._said_before :].decode(errors="replace")

    def _place(self) -> str:
        """Place where the disk was full, from the sentence with which the run ended."""
        last = next((line for line in reversed(self._words().splitlines()) if line.startswith("verl ")), "")
        places = {"ledger": "ledger", "Checkpoint ": "save", ".jsonl": "metrics", "samples/": "samples"}
        return next((place for mark, place in places.items() if mark in last), "elsewhere")

    def _starve(self, pid: int, step: int, until: float) -> None:
        """Until the process has ended."""
        with contextlib.suppress(psutil.NoSuchProcess):
            process = psutil.Process(pid)
            process.rlimit(psutil.RLIMIT_AS, (process.memory_info().vms, psutil.RLIM_INFINITY))
            while process.is_running() and process.status() != psutil.STATUS_ZOMBIE:
                beat = self.beat()
                if self.process.poll() is not None:
                    return
                if beat is not None and beat.step > step + _STEPS_WITHOUT_MEMORY:
                    process.kill()
                self._check(until, "it did not end without memory")
                time.sleep(0.01)


@contextlib.contextmanager
def full_disk(folder: Path, left: int) -> Iterator[None]:
    """Inside, the file system of `folder` has at most `left` bytes free."""
    filler = folder / "filler"
    try:
        with filler.open("wb", buffering=0) as file:
            for size in (1 << 20, 4096):
                with contextlib.suppress(OSError):
                    while True:
                        file.write(bytes(size))
            file.truncate(max(file.tell() - left, 0))
        yield
    finally:
        filler.unlink(missing_ok=True)
