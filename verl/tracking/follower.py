"""What stands for run folder, tracker and console on a rank that takes every step and leaves the writing to the first."""

from __future__ import annotations

import logging
from collections.abc import Mapping
from pathlib import Path
from types import TracebackType
from typing import Any

from verl.tracking.heartbeat import Heartbeat
from verl.tracking.logs import add_log_file, remove_handler
from verl.tracking.summary import Summary


class FollowerFolder:
    """The run folder of the first rank; while entered, this rank's log goes to logs/rank_{rank}.log there."""

    def __init__(self, root: str | Path, rank: int):
        self.root = Path(root).expanduser()
        self.metrics = self.root / "metrics.jsonl"
        self.spans = None
        self.heartbeat = Heartbeat(self.root, rank, writes=False)
        self._rank = rank
        self._log_handler: logging.Handler | None = None

    def __enter__(self) -> FollowerFolder:
        (self.root / "logs").mkdir(parents=True, exist_ok=True)
        self._log_handler = add_log_file(self.root / "logs", self._rank)
        self.heartbeat.start()
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        if self._log_handler is not None:
            remove_handler(self._log_handler)
            self._log_handler = None
        self.heartbeat.end(failed=kind is not None)

    def require_free_gb(self, wanted_gb: float) -> None:
        """The first rank looks."""

    def truncate_after(self, step: int) -> int:
        """The first rank does it."""
        return 0


class Follower:
    """Takes what a Tracker and a Console take, and does nothing with it."""

    def __enter__(self) -> Follower:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        pass

    def log(self, metrics: Mapping[str, Any], step: int) -> None: ...

    def samples(self, split: str, step: int, rows: list[dict[str, Any]]) -> None: ...

    def finish(self, summary: Summary) -> None: ...

    def header(self, facts: Mapping[str, Any]) -> None: ...

    def begin(self, done: int, total: int, shown: Mapping[str, Any] | None = None) -> None: ...

    def phase(self, name: str) -> None: ...

    def step(self, step: int, metrics: Mapping[str, float]) -> None: ...

    def validation(self, step: int, metrics: Mapping[str, float]) -> None: ...

    def final(self, summary: Summary) -> None: ...

    def close(self) -> None: ...
