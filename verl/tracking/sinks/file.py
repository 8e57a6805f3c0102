"""Metrics as JSON lines at a place of the user's choosing: {"step": 3, "data": {...}}."""

from __future__ import annotations

import os
from pathlib import Path
from typing import Any

from verl.tracking.files import append_rows
from verl.tracking.sinks.api import RunInfo


class FileSink:
    """Writes to VERL_FILE_LOGGER_PATH, or {VERL_FILE_LOGGER_ROOT or the run folder}/{project}/{experiment}.jsonl."""

    def __init__(self, info: RunInfo):
        root = Path(os.environ.get("VERL_FILE_LOGGER_ROOT") or info.root)
        given = os.environ.get("VERL_FILE_LOGGER_PATH")
        self.path = Path(given) if given else root / info.project / f"{info.experiment}.jsonl"

    @staticmethod
    def is_redirected() -> bool:
        """Whether the user asks for a file besides the run folder's metrics.jsonl."""
        return bool(os.environ.get("VERL_FILE_LOGGER_PATH") or os.environ.get("VERL_FILE_LOGGER_ROOT"))

    def start(self) -> None:
        self.path.parent.mkdir(parents=True, exist_ok=True)

    def log(self, metrics: dict[str, float], step: int) -> None:
        append_rows(self.path, [{"step": step, "data": metrics}])

    def table(self, name: str, rows: list[dict[str, Any]], step: int) -> None:
        """Samples have files of their own in the run folder."""

    def close(self) -> None:
        """Every row is on disk already."""
