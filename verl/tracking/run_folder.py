"""The folder of one run: where everything lies, and that nothing in it is lost, torn or twice.

config.yaml  metrics.jsonl  samples/{train,val}/step_000012.jsonl  spans.jsonl  timeline.jsonl  logs/  summary.json
learning_curve.png  global_step_N/ (see verl.checkpoint)  superseded_*/ (of earlier runs that were started over)
ledger.sqlite (every sample, see verl/tracking/ledger/reader.py)  guards.jsonl (numbers that went wrong)
heartbeat.json  events.jsonl (crashes, written by the supervisor)
"""

from __future__ import annotations

import logging
import re
import shutil
import tempfile
import time
from pathlib import Path
from types import TracebackType

from verl.errors import CheckpointError, ConfigError
from verl.tracking.files import json_text, read_rows, write_atomically
from verl.tracking.heartbeat import Heartbeat
from verl.tracking.ledger.file import NAME as LEDGER
from verl.tracking.lock import FolderLock
from verl.tracking.logs import add_log_file, remove_handler

log = logging.getLogger(__name__)

_SAMPLE_FILE = re.compile(r"step_(\d+)\.jsonl")


class RunFolder:
    """While entered the folder belongs to this process, and its log goes to logs/rank_0.log."""

    def __init__(self, root: str | Path):
        self.root = Path(root).expanduser()
        self.metrics = self.root / "metrics.jsonl"
        self.samples = self.root / "samples"
        self.spans = self.root / "spans.jsonl"
        self.timeline = self.root / "timeline.jsonl"
        self.guards = self.root / "guards.jsonl"
        self.logs = self.root / "logs"
        self.summary = self.root / "summary.json"
        self.learning_curve = self.root / "learning_curve.png"
        self.heartbeat = Heartbeat(self.root)
        self._lock = FolderLock(self.root)
        self._log_handler: logging.Handler | None = None

    def __enter__(self) -> RunFolder:
        """Raises ConfigError when the folder cannot be written or another run is in it."""
        try:
            self.samples.mkdir(parents=True, exist_ok=True)
            self.logs.mkdir(exist_ok=True)
            self._lock.acquire()
            self.heartbeat.start()
        except OSError as error:
            raise ConfigError(
                f"The run folder {self.root} cannot be written ({error.strerror or error}). "
                "Set trainer.default_local_dir to a folder that can."
            ) from error
        self._log_handler = add_log_file(self.logs, rank=0)
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        if self._log_handler is not None:
            remove_handler(self._log_handler)
            self._log_handler = None
        self.heartbeat.end(failed=kind is not None)
        self._lock.release()

    def sample_file(self, split: str, step: int) -> Path:
        """samples/{split}/step_000012.jsonl."""
        return self.samples / split / f"step_{step:06d}.jsonl"

    def require_free_gb(self, wanted_gb: float) -> None:
        """Raises CheckpointError when the disk of the folder has less than `wanted_gb` (10^9 bytes) free."""
        free_gb = shutil.disk_usage(self.root).free / 1e9
        if free_gb < wanted_gb:
            raise CheckpointError(
                f"The disk of {self.root} has {free_gb:.1f} GB free, less than trainer.min_free_disk_gb={wanted_gb:g}. "
                "Free some space, or set trainer.default_local_dir to another disk."
            )

    def truncate_after(self, step: int) -> int:
        """Forget what was written after `step`, because those steps are taken again; returns the number of metrics rows
        removed. For a run that starts from nothing (0) all that is there is of an earlier one, and is set aside."""
        if step <= 0:
            return self._set_aside()
        removed = self._truncate_rows(self.metrics, step)
        self._truncate_rows(self.spans, step)
        self._truncate_rows(self.timeline, step)
        files = [f for f in self.samples.glob("*/step_*.jsonl") if _step_of(f) > step]
        for file in files:
            file.unlink()
        if removed or files:
            log.info("Removed %d metrics rows and %d sample files written after step %d.", removed, len(files), step)
        return removed

    def _set_aside(self) -> int:
        """Move the records of an earlier run into a folder of their own; returns its number of metrics rows."""
        num_rows = sum(1 for _ in read_rows(self.metrics))
        records = (
            self.metrics,
            self.spans,
            self.timeline,
            self.guards,
            self.summary,
            self.learning_curve,
            self.root / "config.yaml",
            *(self.root / f"{LEDGER}{part}" for part in ("-wal", "-shm", "")),
        )
        old = [path for path in records if path.exists()]
        old += [self.samples] if any(self.samples.glob("*/*")) else []
        if num_rows or self.samples in old:
            aside = Path(tempfile.mkdtemp(prefix=f"superseded_{time.strftime('%Y%m%d-%H%M%S')}_", dir=self.root))
            for path in old:
                path.rename(aside / path.name)
            self.samples.mkdir(exist_ok=True)
            log.info("This run starts anew: the records of an earlier one in this folder are now in %s.", aside)
        return num_rows

    def _truncate_rows(self, path: Path, keep: int) -> int:
        if not path.exists():
            return 0
        # a line that a kill cut short is dropped by read_rows, so the file is always rewritten
        rows = list(read_rows(path))
        kept = [row for row in rows if row.get("step", -1) <= keep]
        write_atomically(path, "".join(json_text(row) + "\n" for row in kept))
        return len(rows) - len(kept)


def _step_of(file: Path) -> int:
    match = _SAMPLE_FILE.fullmatch(file.name)
    return int(match.group(1)) if match else -1
