"""Runs on Ray whose roles grow and shrink while they run, and whose processes are killed meanwhile.

The seed determines the sizes of rollout and reward, which are requested as `verl scale` does. Then an added process is killed,
while it starts or at work, or the driver.
"""

import json
import random
import re
import time
from collections.abc import Iterator

import psutil
from chaos_run import Kill, Victim, open_files
from chaos_task import RUNTIMES, SLOW

from verl.runtime.ray_sizes import NAME, ask_role_sizes

RUNTIME = "ray-scaled"
_PLACED = 3  # processes of the placement
_START_S = 4.0  # within which a process that has begun to start is killed


class ScaledVictim(Victim):
    """The roles have the sizes of the placement until `strikes`."""

    def strikes(self, rng: random.Random, count: int, options: object) -> Iterator[list[Kill]]:
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
        target = rng.choice(RUNTIMES[RUNTIME].targets)
        sizes = {"rollout": rng.randint(1, 3), "reward": rng.randint(1, 2)}
        if sum(sizes.values()) == 2:
            sizes["rollout"] = 2
        if not self.until(lambda: self.has_begun(1) and (self.folder / NAME).exists(), "no step began", look_s=0.02):
            return None
        before = self._added()
        ask_role_sizes(self.folder, sizes)
        if target == "starting" and sum(sizes.values()) - 2 > len(before):
            if not self.until(lambda: self._added() - before, f"nothing was added for {sizes}", look_s=0.02):
                return None
            time.sleep(rng.uniform(0.0, _START_S))
            victims = self._added() - before
        elif self.until(lambda: self._is_at_work(sizes), f"the run did not come to {sizes}", look_s=0.02):
            time.sleep(rng.uniform(0.0, 1.0))
            target = "driver" if target == "driver" else "at work"
            family = self.family()
            victims = self._added() if target == "at work" or family is None else set(family.kinds["driver"])
        else:
            return None
        hit = self._hit(target, rng.choice(sorted(victims, key=lambda process: process.pid)))
        return None if hit is None else self._come_back(hit, time.monotonic(), self._num_by_hand)

    def _is_at_work(self, sizes: dict[str, int]) -> bool:
        """Whether the last step generated with so many processes, and all that were asked for live."""
        file = self.folder / "metrics.jsonl"
        lines = file.read_text().splitlines() if file.exists() else []
        last = json.loads(lines[-1]) if lines and lines[-1].endswith("}") else {}
        return last.get("rollout/num_replicas") == sizes["rollout"] and len(self._added()) == sum(sizes.values()) - 2

    def _added(self) -> set[psutil.Process]:
        """The living processes that were added."""
        family = self.family()
        ranks = [] if family is None else family.kinds["rank"]
        return {
            process
            for process in ranks
            for name in open_files(process)
            if (log := re.fullmatch(r"rank_(\d+)\.log", name)) and int(log[1]) >= _PLACED
        }
