"""Loading a checkpoint into a run: at its start, and when a guard sends it back."""

from __future__ import annotations

import logging
from pathlib import Path
from typing import Any

from verl.checkpoint.retention import step_of
from verl.checkpoint.store import trainer_state
from verl.errors import CheckpointError, NumericsError
from verl.foreign_text import clean
from verl.programs.api import Program, RollBack
from verl.roles.api import Roles
from verl.run.saving import Broadcast, Store
from verl.run.state import RunState

log = logging.getLogger(__name__)


class Resume:
    """`state` is fresh until `start`; afterwards it, the roles, the program and the records of the run folder are as the
    checkpoint has them. `trainer` is the config section. Every rank that runs the program makes the same calls."""

    def __init__(
        self, trainer: Any, *, folder: Any, roles: Roles, broadcast: Broadcast, program: Program, state: RunState,
        store: Store,
    ):  # fmt: skip
        self.trainer = trainer
        self.folder = folder
        self.roles = roles
        self.broadcast = broadcast
        self.program = program
        self.state = state
        self.store = store
        self._started_at = 0

    def start(self, *, same_run: bool = False) -> None:
        """Resume from the checkpoint that `trainer.resume_mode` chooses, if there is one. `same_run`: without one the run that
        the folder has is taken again from its first step."""
        self._load(self._find(self.trainer.resume_mode, self.trainer.resume_from_path), same_run=same_run)
        self._started_at = self.state.step

    def go_back(self, back: RollBack, saved_step: int) -> None:
        """Continue from the newest checkpoint of this run, whose last save was that of `saved_step`. Raises NumericsError when
        there is no checkpoint."""
        self.store.finish()  # a save that is under way counts
        # before the first save of this process, checkpoints in the folder may be of an earlier run
        mode = "auto" if saved_step > self._started_at else self.trainer.resume_mode
        saved = self._find(mode, self.trainer.resume_from_path) if saved_step > 0 else None
        if saved is None:
            raise NumericsError(
                f"{back}. The run has no checkpoint yet to go back to. Set trainer.save_freq lower, or choose skip or stop."
            )
        self._load(saved, back)
        log.warning("%s. Back to the weights of step %d.", back, self.state.step)

    def _find(self, mode: str, path: str | None) -> tuple[str, dict[str, Any]] | None:
        """Rank 0's checkpoint, on all ranks: its folder, and the content of its trainer_state.json."""
        found = self.store.find(mode, path)
        return self.broadcast((str(found), self._state_of(found)) if found is not None else None)

    def _state_of(self, checkpoint: Path) -> dict[str, Any]:
        """The content of trainer_state.json. Raises CheckpointError when no run of this program can have written it."""
        values = trainer_state(checkpoint)
        for name, check in {**RunState.schema, **self.program.state_schema}.items():
            if not check(values.get(name)) or (name == "step" and values[name] != step_of(checkpoint.name)):
                raise CheckpointError(
                    f"{checkpoint / 'trainer_state.json'} has {name}={clean(values.get(name), limit=80)}, which this program "
                    "does not write. Resume from another checkpoint, or with the program that saved this one."
                )
        return values

    def _load(
        self, saved: tuple[str, dict[str, Any]] | None, back: RollBack | None = None, *, same_run: bool = False
    ) -> None:
        path, values = (None, None) if saved is None else (Path(saved[0]), saved[1])
        if path is not None and values is not None:
            for role in self.roles.trained().values():
                role.load(str(path))
            self.state.load_state_dict(values)
            log.info("Resumed from %s: step %d is next.", path, self.state.step + 1)
        self.folder.truncate_after(self.state.step, same_run=same_run)
        self.program.load_state_dict(values, path, back)
