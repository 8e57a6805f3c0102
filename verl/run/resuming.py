"""Loading a checkpoint into a run: at its start, and when a guard sends it back."""

from __future__ import annotations

import logging
import math
from collections.abc import Mapping
from contextlib import nullcontext
from dataclasses import KW_ONLY, dataclass, field
from pathlib import Path
from typing import Any

from verl.checkpoint.files import SMALL_BYTES, verification
from verl.checkpoint.retention import step_of
from verl.checkpoint.store import trainer_state
from verl.config import TrainerConfig
from verl.errors import CheckpointError, NumericsError
from verl.foreign_text import clean
from verl.programs.api import Program, RollBack
from verl.roles.api import Broadcast, Roles
from verl.run.inputs import changed_inputs
from verl.run.saving import OtherRankStore, Store
from verl.run.state import RunState
from verl.tracking.files import Check
from verl.tracking.run_folder import RunFolder

log = logging.getLogger(__name__)


@dataclass(eq=False)
class Resume:
    """Resumption of a run. Until `start`, `state` has the inputs of this run and is fresh otherwise. Afterwards `state`, the
    roles, the program and the records of the run folder are as the checkpoint has them. `trainer` is the config section,
    `state_schema` the schema of the program's state. Every rank that runs the program makes the same calls."""

    trainer: TrainerConfig
    _: KW_ONLY
    folder: RunFolder
    broadcast: Broadcast
    state_schema: Mapping[str, Check]
    state: RunState
    store: Store
    roles: Roles = field(init=False)
    program: Program[Any] = field(init=False)
    _saved: tuple[str, dict[str, Any]] | None = field(default=None, init=False)
    _first_step: int = field(default=0, init=False)

    def find(self) -> None:
        """Choose the checkpoint of `trainer.resume_mode`, if there is one, before any model is built. Raises CheckpointError
        when it is of another program, or of other inputs."""
        self._saved = self._find(self.trainer.resume_mode, SMALL_BYTES)
        self._compare_inputs()

    @property
    def source(self) -> Path | None:
        """The folder of the run whose checkpoint `find` has chosen."""
        return None if self._saved is None else Path(self._saved[0]).parent

    def start(self, roles: Roles, program: Program[Any], *, same_run: bool = False) -> None:
        """Load the checkpoint of `find` into the roles and the program. `same_run`: without a checkpoint, the run in the folder
        is repeated from its first step."""
        self.roles, self.program = roles, program
        self._load(self.trainer.resume_mode, same_run=same_run)
        self._first_step = self.state.step

    def go_back(self, back: RollBack, saved_step: int) -> None:
        """Continue from the newest checkpoint of this run, whose last save was at step `saved_step`. Raises NumericsError when
        there is no checkpoint."""
        self.store.finish()  # a save that is under way counts
        # before the first save of this process, checkpoints in the folder may be of an earlier run
        mode = "auto" if saved_step > self._first_step else self.trainer.resume_mode
        self._saved = self._find(mode, SMALL_BYTES) if saved_step > 0 else None
        if self._saved is None:
            raise NumericsError(
                f"{back}. The run has no checkpoint yet to go back to. Set trainer.save_freq lower, or choose skip or stop."
            )
        self._load(mode, back)
        log.warning("%s. Back to the weights of step %d.", back, self.state.step)

    def _find(self, mode: str, max_bytes: float) -> tuple[str, dict[str, Any]] | None:
        """Rank 0's checkpoint, on all ranks: its folder, and the content of its trainer_state.json. Tensors of more than
        `max_bytes` are not verified."""
        checkpoint = self.store.find(mode, self.trainer.resume_from_path, max_bytes=max_bytes)
        if checkpoint is None:
            return self.broadcast(None)
        return self.broadcast((str(checkpoint), read_state(checkpoint, self.state.command, self.state_schema)))

    def _compare_inputs(self) -> None:
        if self._saved is not None:
            path, values = self._saved
            action = self.trainer.resume_changed_inputs
            if changed := changed_inputs(Path(path), values.get("inputs"), self.state.inputs, action):
                log.warning("%s", changed)

    def _load(self, mode: str, back: RollBack | None = None, *, same_run: bool = False) -> None:
        while self._saved is not None and not self._load_roles(self._saved[0]):
            self._saved = self._find(mode, math.inf)  # names the damage; raises where no checkpoint is left
            self._compare_inputs()
        path, values = (None, None) if self._saved is None else (Path(self._saved[0]), self._saved[1])
        if values is not None:
            self.state.load_state_dict(values)
            log.info("Resumed from %s: step %d is next.", path, self.state.step + 1)
        self.folder.truncate_after(self.state.step, same_run=same_run)
        self.program.load_state_dict(values, path, back)

    def _load_roles(self, path: str) -> bool:
        """Whether the checkpoint `path` is intact, and now loaded into the roles. Rank 0 verifies it meanwhile."""
        verifies = not isinstance(self.store, OtherRankStore)
        with verification(Path(path)) if verifies else nullcontext(lambda: None) as damage:
            error = None
            try:
                for role in self.roles.trained().values():
                    role.load(path)
            except Exception as failure:  # noqa: BLE001 - raised below, unless it is a consequence of damage
                error = failure
            is_damaged = self.broadcast(damage() is not None)
        if error is not None and not is_damaged:
            raise error
        return not is_damaged


def read_state(checkpoint: Path, command: str, schema: Mapping[str, Check]) -> dict[str, Any]:
    """The content of trainer_state.json, for a run of `command` whose program has the state schema `schema`. Raises
    CheckpointError when no such run can have written it."""
    values = trainer_state(checkpoint)
    saved_by = values.get("command")
    if isinstance(saved_by, str) and saved_by != command:
        raise CheckpointError(
            f"{checkpoint} belongs to a run of {clean(saved_by, limit=80)}, and this is a run of {command}. Set "
            "trainer.default_local_dir to another folder, or trainer.resume_from_path to another checkpoint."
        )
    for name, check in {**RunState.schema, **schema}.items():
        if not check(values.get(name)) or (name == "step" and values[name] != step_of(checkpoint.name)):
            content = f"{name}={clean(values[name], limit=80)}" if name in values else f"no {name}"
            raise CheckpointError(
                f"{checkpoint / 'trainer_state.json'} has {content}, so {command} has not saved it. Resume from another "
                "checkpoint, or with the program that saved this one."
            )
    return values
