"""Checkpoints of a run whose roles may live in other processes: the store decides when, the roles write their own files."""

from __future__ import annotations

import logging
import tempfile
from collections.abc import Mapping, Sequence
from pathlib import Path

from verl.checkpoint.background import BackgroundStore
from verl.checkpoint.files import FileRecord
from verl.checkpoint.filesystem import examine_folder
from verl.checkpoint.store import CheckpointStore
from verl.roles.api import Broadcast, ModelHandle, RoleSpec

log = logging.getLogger(__name__)


class RoleWriter:
    """A role as the store sees it. In a run of several equal ranks all of them make the same calls in the same order."""

    def __init__(self, role: ModelHandle, broadcast: Broadcast):
        self.role = role
        self.broadcast = broadcast

    def num_bytes(self) -> int:
        """Bytes of the tensors that will be written."""
        return int(self.role.num_bytes_saved())

    def write(self, folder: Path | None) -> dict[str, FileRecord]:
        """All files of the role, in rank 0's new folder; returns their records by path."""
        records = self.role.save(self.broadcast(str(folder)))
        return next(part for part in records if part is not None)


class BackgroundRoleWriter(RoleWriter):
    """Writer of a role that copies its state, and writes the copy while it trains."""

    def begin(self, folder: Path | None) -> None:
        """Copy, and start to write into rank 0's new folder."""
        self.role.start_save(self.broadcast(str(folder)))

    def end(self, timeout_s: float) -> None:
        """Return when no rank of the role is writing any more. Raises DeadlineError."""
        self.role.finish_save(timeout_s)


class OtherRankStore:
    """The store on a rank that does not write: takes part in the calls that rank 0's store makes."""

    def __init__(self, root: Path, timeout_s: float):
        self.root = root
        self.timeout_s = timeout_s
        self._writers: list[BackgroundRoleWriter] = []

    def find(self, resume_mode: str = "auto", resume_from_path: str | None = None, *, max_bytes: float = 0) -> None:
        """Rank 0 chooses the checkpoint."""

    def save(self, step: int, roles: Mapping[str, RoleWriter], trainer_state: Mapping[str, object]) -> None:
        self.finish()
        for role in roles.values():
            role.num_bytes()
        for role in roles.values():
            if isinstance(role, BackgroundRoleWriter):
                self._writers.append(role)
                role.begin(None)
            else:
                role.write(None)

    def check(self) -> None:
        """Rank 0 reports failures."""

    def finish(self) -> None:
        """Wait for what this rank writes."""
        writers, self._writers = self._writers, []
        for writer in writers:
            writer.end(self.timeout_s)

    def close(self) -> None:
        """Nothing to end."""


Store = CheckpointStore | BackgroundStore | OtherRankStore


def saves_in_background(specs: Sequence[RoleSpec]) -> bool:
    """Whether a role of the run is to be written while training continues."""
    return any(spec.trains and spec.checkpoint is not None and spec.checkpoint.async_save for spec in specs)


def rescue_folder(lost: Path) -> Path:
    """Create a folder for the state of a run whose folder `lost` is gone: next to `lost`, or in the temporary folder. Raises
    OSError."""
    prefix = f"{lost.name}_rescued_"
    try:
        return Path(tempfile.mkdtemp(prefix=prefix, dir=lost.absolute().parent))
    except OSError:
        return Path(tempfile.mkdtemp(prefix=prefix))


def open_store(root: Path, specs: Sequence[RoleSpec], *, timeout_s: float, is_rank_zero: bool) -> Store:
    """The checkpoints of the run folder `root`. Raises CheckpointError when the folder's file system cannot hold any."""
    if not is_rank_zero:
        return OtherRankStore(root, timeout_s)
    report = examine_folder(root)
    report.require()
    for notice in report.notices:
        log.warning("The run folder %s: %s.", root, notice)
    # checkpoints are kept whole: the role that wants more of them decides
    store = CheckpointStore(root, keep=max((spec.checkpoints_to_keep or 0 for spec in specs), default=0))
    return BackgroundStore(store, timeout_s) if saves_in_background(specs) else store
