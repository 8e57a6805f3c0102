"""Metrics as JSON lines in a file that the user chooses: {"step": 3, "data": {...}}."""

import os
from pathlib import Path

from verl.tracking.files import append_rows
from verl.tracking.sinks.api import RunInfo, Sink


class FileSink(Sink):
    """Writes to VERL_FILE_LOGGER_PATH, or {VERL_FILE_LOGGER_ROOT or the run folder}/{project}/{experiment}.jsonl."""

    def __init__(self, info: RunInfo):
        super().__init__(info)
        root = Path(os.environ.get("VERL_FILE_LOGGER_ROOT") or info.root)
        path = os.environ.get("VERL_FILE_LOGGER_PATH")
        self.path = Path(path) if path else root / info.project / f"{info.experiment}.jsonl"

    @staticmethod
    def is_redirected() -> bool:
        """Whether the user asks for a file in addition to the run folder's metrics.jsonl."""
        return bool(os.environ.get("VERL_FILE_LOGGER_PATH") or os.environ.get("VERL_FILE_LOGGER_ROOT"))

    def start(self) -> None:
        self.path.parent.mkdir(parents=True, exist_ok=True)

    def log(self, metrics: dict[str, float], step: int) -> None:
        append_rows(self.path, [{"step": step, "data": metrics}])
