"""Door: `RLLogger`, the log of one rank in a rotating file of its own; the files are made by verl.tracking.logs."""

from __future__ import annotations

import logging
import os
from pathlib import Path

from verl.tracking.logs import add_log_file, remove_handler


class RLLogger(logging.LoggerAdapter):  # type: ignore[type-arg]  # generic only since Python 3.11
    """Logs as `verl`, and writes what the process logs to `log_dir`/rank_{rank}.log until `close`.

    `rank` defaults to the environment's RANK. A run of `verl train` does this by itself, under its run folder's `logs`.
    """

    def __init__(self, log_dir: str | Path = "./logs", rank: int | None = None):
        super().__init__(logging.getLogger("verl"), {})
        folder = Path(log_dir)
        folder.mkdir(parents=True, exist_ok=True)
        self._handler = add_log_file(folder, int(os.environ.get("RANK", "0")) if rank is None else rank)

    def close(self) -> None:
        """Write no more to the file."""
        remove_handler(self._handler)
