"""What the actor and the critic have in common: an engine whose weights a run changes, saves and hands on."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np

from verl.checkpoint.background import RoleSave, write_and_report
from verl.checkpoint.files import FileRecord
from verl.checkpoint.role import RoleCheckpoint, read_role
from verl.config import CheckpointConfig
from verl.data_proto.metrics import Metric
from verl.data_proto.proto import DataProto
from verl.engines.api import TrainEngine
from verl.errors import CheckpointError
from verl.parallel.register import Dispatch, Execute, register
from verl.parallel.serialize import record

record(FileRecord)


@dataclass(frozen=True)
class Keeping:
    """How a role is saved: its name in a checkpoint, which parts, and what `from_pretrained` needs beside the weights.
    `writes` is true on one rank of the role."""

    name: str
    config: CheckpointConfig
    hf_files: Callable[[Path], None]
    writes: bool = True


class TrainedWorker:
    def __init__(self, engine: TrainEngine, keeping: Keeping, measures: Callable[[int], bool] = lambda step: False):
        self.engine = engine
        self.keeping = keeping
        self.measures = measures  # whether visible_update_ratio is measured at the end of a step
        self._saving: RoleSave | None = None

    @register(dispatch_mode=Dispatch.ONE_TO_ALL)
    def save(self, folder: str) -> dict[str, FileRecord] | None:
        """Write the role into the new folder `folder`; returns the records of its files on the rank that writes, None on the
        others, which help to put its tensors together."""
        checkpoint = self._checkpoint()
        if self.keeping.writes:
            return checkpoint.write(Path(folder))
        checkpoint.take_part()
        return None

    @register(dispatch_mode=Dispatch.ONE_TO_ALL)
    def begin_save(self, folder: str) -> None:
        """As `save`, but the rank that writes does so on a thread, from a copy; `folder` tells how it went. Without
        checkpoint.async_save of this role everything is written when this returns."""
        checkpoint = self._checkpoint()
        if not self.keeping.writes:
            checkpoint.take_part()
        elif self.keeping.config.async_save:
            self._saving = RoleSave(checkpoint.copied(), Path(folder))
        else:
            write_and_report(checkpoint, Path(folder))

    @register(dispatch_mode=Dispatch.ONE_TO_ALL)
    def end_save(self, timeout_s: float) -> None:
        """Return when the files of `begin_save` are written. Raises DeadlineError."""
        if self._saving is not None:
            self._saving.end(timeout_s)
            self._saving = None

    @register(dispatch_mode=Dispatch.ONE_TO_ALL, execute_mode=Execute.RANK_ZERO)
    def num_bytes_saved(self) -> int:
        """Of the tensors that `save` writes."""
        return self._checkpoint().num_bytes()

    @register(dispatch_mode=Dispatch.ONE_TO_ALL)
    def load(self, checkpoint: str) -> None:
        """Go on from the role's part of the folder `checkpoint`, bit for bit. Raises CheckpointError when it has none, or it
        does not fit the model."""
        folder = Path(checkpoint) / self.keeping.name
        if not folder.is_dir():
            raise CheckpointError(
                f"{checkpoint} has no {self.keeping.name}; it was saved by a run without one. Set "
                "trainer.resume_mode=disable."
            )
        self.engine.load_state(read_role(folder, self.keeping.config.load_contents))

    @register(dispatch_mode=Dispatch.ONE_TO_ALL)
    def reconfigure(self, changes: dict[str, Any]) -> None:
        """See TrainEngine."""
        self.engine.reconfigure(changes)

    def measure(self, step: int, found: list[dict[str, Metric]]) -> None:
        """Add `visible_update_ratio` to the last of the metrics `found`, in the steps that are measured."""
        share = self.engine.visible_update_ratio() if found and self.measures(step) else None
        if share is not None:
            found[-1]["visible_update_ratio"] = Metric.last(share)

    def mini_batches(self, batch: DataProto, rows: Sequence[Sequence[int] | np.ndarray]) -> Iterator[DataProto]:
        """The rows of each optimizer step, one batch after the other."""
        for chosen in rows:
            whole = len(chosen) == len(batch) and bool(np.array_equal(chosen, np.arange(len(batch))))
            yield batch if whole else batch.select_idxs(np.asarray(chosen, dtype=np.int64))

    def _checkpoint(self) -> RoleCheckpoint:
        config = self.keeping.config
        return RoleCheckpoint(
            self.engine.state(), self.keeping.hf_files, config.save_contents, lora_only=config.save_lora_only
        )
