"""Checkpoints of a run whose roles may live in other processes: the store decides, the roles write their own files."""

from __future__ import annotations

import logging
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

from verl.checkpoint.background import BackgroundStore
from verl.checkpoint.files import FileRecord
from verl.checkpoint.filesystem import examine
from verl.checkpoint.store import CheckpointStore
from verl.config import VerlConfig
from verl.config.active_keys import uses_critic

log = logging.getLogger(__name__)

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


class BackgroundRoleWriter(RoleWriter):
    """A role that copies what it saves, and writes the copy while it trains."""

    def begin(self, folder: Path | None) -> None:
        """Copy, and begin to write into the leader's new folder."""
        self.role.begin_save(self.from_leader(str(folder)))

    def end(self, timeout_s: float) -> None:
        """Return when no rank of the role is writing any more. Raises DeadlineError."""
        self.role.end_save(timeout_s)


class FollowingStore:
    """The store on a rank that does not write: takes its part in the calls that the leader's store makes."""

    def __init__(self, root: Path, timeout_s: float):
        self.root = root
        self.timeout_s = timeout_s
        self._writers: list[BackgroundRoleWriter] = []

    def find(self, resume_mode: str = "auto", resume_from_path: str | None = None) -> Path | None:
        return None

    def save(self, step: int, roles: Mapping[str, RoleWriter], trainer_state: Mapping[str, Any]) -> None:
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
        """What went wrong is the leader's to say."""

    def finish(self) -> None:
        """Wait for what this rank writes."""
        writers, self._writers = self._writers, []
        for writer in writers:
            writer.end(self.timeout_s)

    def close(self) -> None:
        """Nothing is left to end."""


Store = CheckpointStore | BackgroundStore | FollowingStore


def saves_in_background(config: VerlConfig) -> bool:
    """Whether a role of the run is to be written while training goes on."""
    critic = uses_critic(config) and config.critic.checkpoint.async_save
    return config.actor_rollout_ref.actor.checkpoint.async_save or critic


def open_store(config: VerlConfig, root: Path, *, leads: bool) -> Store:
    """The checkpoints of the run folder `root`, as `config` wants them saved. Raises CheckpointError when the folder's file
    system cannot hold any."""
    trainer = config.trainer
    if not leads:
        return FollowingStore(root, trainer.call_timeout_s)
    report = examine(root)
    report.require()
    for notice in report.notices:
        log.warning("The run folder %s: %s.", root, notice)
    # checkpoints are kept whole: the role that wants more of them decides
    keep = max(trainer.max_actor_ckpt_to_keep or 0, trainer.max_critic_ckpt_to_keep or 0)
    store = CheckpointStore(root, keep=keep)
    return BackgroundStore(store, trainer.call_timeout_s) if saves_in_background(config) else store
