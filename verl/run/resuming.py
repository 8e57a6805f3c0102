"""How a run takes up a checkpoint: at its start, and when a guard sends it back."""

from __future__ import annotations

import logging
from pathlib import Path
from typing import Any

from verl.checkpoint.store import trainer_state
from verl.config import VerlConfig
from verl.errors import NumericsError
from verl.programs.guards import RollBack
from verl.programs.ppo import PPO
from verl.programs.state import TrainerState
from verl.run.samples import begin_samples
from verl.run.saving import Store
from verl.runtime.api import Runtime
from verl.runtime.roles import Roles

log = logging.getLogger(__name__)


class Resume:
    """`state` is fresh until `begin`; afterwards it, the roles, the program and the records of the run folder are as the
    checkpoint has them. In a run of several equal ranks all of them make the same calls."""

    def __init__(
        self,
        config: VerlConfig,
        *,
        folder: Any,
        roles: Roles,
        runtime: Runtime,
        program: PPO,
        state: TrainerState,
        store: Store,
    ):
        self.config = config
        self.folder = folder
        self.roles = roles
        self.runtime = runtime
        self.program = program
        self.state = state
        self.store = store
        self._began_at = 0

    def begin(self) -> None:
        """Go on from the checkpoint that `trainer.resume_mode` says, if there is one."""
        trainer = self.config.trainer
        self._take_up(self._find(trainer.resume_mode, trainer.resume_from_path))
        self._began_at = self.state.step

    def go_back(self, back: RollBack, saved_step: int) -> None:
        """Go on from the newest checkpoint of this run, whose last save was that of `saved_step`, with the prompts that follow
        those of the step that failed. Raises NumericsError when there is no checkpoint."""
        self.store.finish()  # a save that is under way counts
        trainer = self.config.trainer
        # before the first save of this process, what lies in the folder may be of an earlier run
        mode = "auto" if saved_step > self._began_at else trainer.resume_mode
        saved = self._find(mode, trainer.resume_from_path) if saved_step > 0 else None
        if saved is None:
            raise NumericsError(
                f"{back}. The run has no checkpoint yet to go back to. Set trainer.save_freq lower, or choose skip or stop."
            )
        self._take_up(saved, back.next_ordinal)
        next_ordinal = self.program.samples.cursor
        log.warning("%s. Back to the weights of step %d; prompt %d is next.", back, self.state.step, next_ordinal)

    def _find(self, mode: str, path: str | None) -> tuple[str, dict[str, Any]] | None:
        """The leading process's checkpoint, in all of them: its folder, and the trainer's state in it."""
        found = self.store.find(mode, path)
        return self.runtime.from_leader((str(found), trainer_state(found)) if found is not None else None)

    def _take_up(self, saved: tuple[str, dict[str, Any]] | None, next_ordinal: int = 0) -> None:
        """With a `next_ordinal`, prompts before it that are left by the checkpoint shall not train."""
        state, samples = self.state, self.program.samples
        path: Path | None = None
        values: dict[str, Any] = {}
        if saved is not None:
            path, values = Path(saved[0]), saved[1]
            for role in self.roles.trained().values():
                role.load(str(path))
            state.load_json(values)
            log.info("Resumed from %s: step %d is next.", path, state.step + 1)
        self.roles.rollout.publish(state.weight_version)
        self.folder.truncate_after(state.step)
        waiting = begin_samples(samples, self.runtime, self.folder.root, path, values.get("samples"))
        if next_ordinal:
            samples.skip_prompts(state.step + 1, next_ordinal)
        self.program.restore(waiting)
