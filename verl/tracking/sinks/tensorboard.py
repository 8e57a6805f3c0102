"""TensorBoard event files, in TENSORBOARD_DIR or the run folder's `tensorboard`; the main curves also under short tags."""

from __future__ import annotations

import os
from pathlib import Path
from typing import TYPE_CHECKING

from verl.tracking.sinks.api import RunInfo, Sink

if TYPE_CHECKING:
    from torch.utils.tensorboard import SummaryWriter

# metrics that are also written under a second tag
SHORT_TAGS = {"critic/score/mean": "reward/mean", "actor/pg_loss": "loss/actor", "critic/vf_loss": "loss/critic"}


class TensorBoardSink(Sink):
    package = extra = "tensorboard"

    def __init__(self, info: RunInfo):
        super().__init__(info)
        self.folder = Path(os.environ.get("TENSORBOARD_DIR") or info.root / "tensorboard")
        self._writer: SummaryWriter | None = None

    def log(self, metrics: dict[str, float], step: int) -> None:
        for name, value in metrics.items():
            self._at(step).add_scalar(name, value, step)
            if name in SHORT_TAGS:
                self._at(step).add_scalar(SHORT_TAGS[name], value, step)

    def table(self, name: str, rows: list[dict[str, object]], step: int) -> None:
        columns = list(rows[0]) if rows else []
        lines = ["|" + "|".join(columns) + "|", "|" + "---|" * len(columns)]
        lines += [
            "|" + "|".join(str(row[c]).replace("|", "\\|").replace("\n", "<br>") for c in columns) + "|" for row in rows
        ]
        self._at(step).add_text(name, "\n".join(lines), step)

    def close(self) -> None:
        if self._writer is not None:
            self._writer.close()

    def _at(self, step: int) -> SummaryWriter:
        if self._writer is None:
            from torch.utils.tensorboard import SummaryWriter

            # a resumed run repeats steps that an earlier file may have: purge_step hides those
            self._writer = SummaryWriter(str(self.folder), purge_step=step, flush_secs=10)
        return self._writer
