"""Per-rank status in the rendezvous store, used in other ranks' timeout errors.

status = RankStatus(store, rank=0, world_size=4)
status.post("call", {"call": "actor.update"})     # does not wait
rows = status.rows("call")                        # of the other ranks, as far as the store answers within a few seconds

The store itself waits without a limit when the node that serves it has gone silent, so a separate thread talks to it.
"""

import contextlib
import json
import queue
import threading
from collections.abc import Callable, Mapping
from datetime import timedelta
from typing import Any

import torch.distributed as dist

LIMIT_S = 5.0


class RankStatus:
    """The rows of all ranks, by topic. Nothing here raises: a run without its store is about to end."""

    def __init__(self, store: dist.Store, rank: int, world_size: int):
        self._store, self._rank, self._others = store, rank, [r for r in range(world_size) if r != rank]
        self._jobs: queue.SimpleQueue[tuple[Callable[[], None], threading.Event] | None] = queue.SimpleQueue()
        # a daemon: a process must be able to end while the store is silent
        threading.Thread(target=self._work, name="rank-status", daemon=True).start()

    def post(self, topic: str, row: Mapping[str, object], *, wait: bool = False) -> None:
        """Write this rank's row; with `wait` it is in the store on return, if that answers within LIMIT_S."""
        text = json.dumps(row)
        done = self._ask(lambda: self._store.set(f"{topic}/{self._rank}", text))
        if wait:
            done.wait(LIMIT_S)

    def rows(self, topic: str) -> dict[int, dict[str, Any]]:
        """The last rows of the other ranks; ranks that wrote nothing are left out, and all when the store is gone or silent."""
        rows: dict[int, dict[str, object]] = {}
        done = self._ask(lambda: self._read(topic, rows))
        return dict(rows) if done.wait(LIMIT_S) else {}

    def close(self) -> None:
        """Write and read no more; does not wait."""
        self._jobs.put(None)

    def _read(self, topic: str, rows: dict[int, dict[str, object]]) -> None:
        self._store.set_timeout(timedelta(seconds=LIMIT_S))
        for rank in self._others:
            if self._store.check([f"{topic}/{rank}"]):
                rows[rank] = json.loads(self._store.get(f"{topic}/{rank}"))

    def _ask(self, what: Callable[[], None]) -> threading.Event:
        done = threading.Event()
        self._jobs.put((what, done))
        return done

    def _work(self) -> None:
        while (job := self._jobs.get()) is not None:
            what, done = job
            with contextlib.suppress(RuntimeError):
                what()
            done.set()
