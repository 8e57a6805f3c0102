"""TensorBoard event files, in TENSORBOARD_DIR or the run folder's `tensorboard`."""

from __future__ import annotations

import os
from pathlib import Path
from typing import Any

from verl.tracking.sinks.api import RunInfo, require_package


class TensorBoardSink:
    def __init__(self, info: RunInfo):
        require_package("tensorboard", "tensorboard", "tracking")
        self.folder = Path(os.environ.get("TENSORBOARD_DIR") or info.root / "tensorboard")
        self._writer: Any = None

    def start(self) -> None:
        """Events are opened by the first row, which says where the run goes on."""

    def log(self, metrics: dict[str, float], step: int) -> None:
        for name, value in metrics.items():
            self._at(step).add_scalar(name, value, step)

    def table(self, name: str, rows: list[dict[str, Any]], step: int) -> None:
        columns = list(rows[0]) if rows else []
        lines = ["|" + "|".join(columns) + "|", "|" + "---|" * len(columns)]
        lines += ["|" + "|".join(_cell(row[c]) for c in columns) + "|" for row in rows]
        self._at(step).add_text(name, "\n".join(lines), step)

    def close(self) -> None:
        if self._writer is not None:
            self._writer.close()

    def _at(self, step: int) -> Any:
        if self._writer is None:
            from torch.utils.tensorboard import SummaryWriter

            # a resumed run takes steps again that an earlier file may have: those are not shown twice
            self._writer = SummaryWriter(str(self.folder), purge_step=step, flush_secs=10)
        return self._writer


def _cell(value: Any) -> str:
    return str(value).replace("|", "\\|").replace("\n", "<br>")
