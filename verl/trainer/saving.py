"""Checkpoints of a run whose roles may live in other processes: the store decides, the roles write their own files."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

from verl.checkpoint.files import FileRecord
from verl.checkpoint.store import CheckpointStore

# what the leading rank gives goes to every process that runs the program; each gets the leader's value
FromLeader = Callable[[Any], Any]


class RoleWriter:
    """A role as the store sees it. In a run of several equal ranks all of them make the same calls in the same order."""

    def __init__(self, role: Any, from_leader: FromLeader):
        self.role = role
        self.from_leader = from_leader

    def num_bytes(self) -> int:
        """Of the tensors that will be written."""
        return int(self.role.num_bytes_saved())

    def write(self, folder: Path | None) -> dict[str, FileRecord]:
        """All files of the role, in the leader's new folder; returns their records by path."""
        found = self.role.save(self.from_leader(str(folder)))
        parts = found if isinstance(found, list) else [found]
        return next(part for part in parts if part is not None)


class FollowingStore:
    """The store on a rank that does not write: takes its part in the calls that the leader's store makes."""

    def __init__(self, root: Path):
        self.root = root

    def find(self, resume_mode: str = "auto", resume_from_path: str | None = None) -> Path | None:
        return None

    def save(self, step: int, roles: Mapping[str, RoleWriter], trainer_state: Mapping[str, Any]) -> None:
        for role in roles.values():
            role.num_bytes()
        for role in roles.values():
            role.write(None)


Store = CheckpointStore | FollowingStore
