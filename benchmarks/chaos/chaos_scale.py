"""Runs on Ray whose roles grow and shrink while they run, and whose processes are killed meanwhile.

    python benchmarks/chaos/chaos.py --runtimes ray-scaled --kills 12 --kills-per-run 12

The seed determines the sizes of rollout and reward, which are requested as `verl scale` does. Then an added process is killed,
while it starts or at work, or the driver.
"""

from __future__ import annotations

import json
import random
import re
import time
from collections.abc import Callable, Iterator
from pathlib import Path

import psutil
from chaos_run import LIMIT_S, Kill, Victim
from chaos_task import RUNTIMES, SLOW

from verl.tracking.role_sizes import NAME, ask_role_sizes

RUNTIME = "ray-scaled"
_PLACED = 3  # processes of the placement
_START_S = 4.0  # within which a process that has begun to start is killed


class ScaledVictim(Victim):
    """The roles have the sizes of the placement until `strikes`."""

    def strikes(self, rng: random.Random, count: int) -> Iterator[list[Kill]]:
        """So many kills, unless the run ends before."""
        slow = self.task.folder / SLOW
        slow.touch()
        try:
            for _ in range(count):
                if (kill := self._strike(rng)) is None:
                    return
                yield [kill]
        finally:
            slow.unlink()

    def _strike(self, rng: random.Random) -> Kill | None:
        """Ask for sizes, wait for the moment, kill, and wait until the run is where it was; None when it has ended before."""
        target, sizes = (
            rng.choice(RUNTIMES[RUNTIME].targets),
            {"rollout": rng.randint(1, 3), "reward": rng.randint(1, 2)},
        )
        if sum(sizes.values()) == 2:
            sizes["rollout"] = 2
        if not self._until(self._is_under_way, "no step began"):
            return None
        before = self._added()
        ask_role_sizes(self.folder, sizes)
        if target == "starting" and sum(sizes.values()) - 2 > len(before):
            if not self._until(lambda: self._added() - before, f"nothing was added for {sizes}"):
                return None
            time.sleep(rng.uniform(0.0, _START_S))
            victims = self._added() - before
        elif self._until(lambda: self._is_at_work(sizes), f"the run did not come to {sizes}"):
            time.sleep(rng.uniform(0.0, 1.0))
            target = "driver" if target == "driver" else "at work"
            family = self.family()
            victims = self._added() if target == "at work" or family is None else set(family.kinds["driver"])
        else:
            return None
        hit = self._hit(target, rng.choice(sorted(victims, key=lambda process: process.pid)))
        if hit is None:
            return None
        struck, comeback = time.monotonic(), self._come_back(hit)
        by = "itself" if comeback.resumed is None else "supervisor"
        again = 0 if comeback.resumed is None else max(comeback.reached - comeback.resumed + 1, 0)
        return self._kill(hit, by, comeback.at - struck, again)

    def _is_under_way(self) -> bool:
        beat = self.beat()
        return beat is not None and beat.step >= 1 and (self.folder / NAME).exists()

    def _is_at_work(self, sizes: dict[str, int]) -> bool:
        """Whether the last step generated with so many processes, and all that were asked for live."""
        file = self.folder / "metrics.jsonl"
        lines = file.read_text().splitlines() if file.exists() else []
        last = json.loads(lines[-1]) if lines and lines[-1].endswith("}") else {}
        expected = sum(sizes.values()) - 2
        return last.get("rollout/num_replicas") == sizes["rollout"] and len(self._added()) == expected

    def _added(self) -> set[psutil.Process]:
        """The living processes that were added."""
        family, added = self.family(), set()
        for process in [] if family is None else family.kinds["rank"]:
            try:
                names = [re.fullmatch(r"rank_(\d+)\.log", Path(file.path).name) for file in process.open_files()]
            except psutil.Error:
                continue
            if any(name and int(name[1]) >= _PLACED for name in names):
                added.add(process)
        return added

    def _until(self, condition: Callable[[], object], what: str) -> bool:
        """Wait for it; False when the run has ended well before."""
        limit = time.monotonic() + LIMIT_S
        while self.process.poll() != 0:
            self._go_on()
            if condition():
                return True
            self._check(limit, what)
            time.sleep(0.02)
        return False
