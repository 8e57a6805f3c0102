"""The state of a run in its checkpoints: the host's keys of trainer_state.json, saving by all roles, and resumption."""

import logging
import math
import tempfile
from collections.abc import Mapping, Sequence
from contextlib import nullcontext
from dataclasses import KW_ONLY, asdict, dataclass, field
from datetime import datetime
from pathlib import Path
from typing import Any, ClassVar

from verl.checkpoint.background import BackgroundStore
from verl.checkpoint.files import SMALL_BYTES
from verl.checkpoint.filesystem import examine_folder
from verl.checkpoint.retention import candidates, step_of
from verl.checkpoint.store import CheckpointStore, trainer_state
from verl.config import LoadedConfig, RunConfig, TrainerConfig
from verl.config.diff import settings_of_work
from verl.errors import CheckpointError, NumericsError
from verl.foreign_text import clean
from verl.manifest import FileRecord, verification
from verl.models.content import digest_of_text
from verl.programs.api import Program
from verl.regular_files import sync_folder
from verl.roles.api import Broadcast, ModelHandle, Roles, RoleSpec
from verl.roles.guards import RollBack
from verl.roles.model import require_saved
from verl.run.inputs import changed_inputs
from verl.tracking.files import Check, each, has, is_count, is_number, is_text, json_text, maybe, read_json
from verl.tracking.run_folder import RunFolder

START_FILE = "start.json"


@dataclass
class RunState:
    """`step` is the last step that has ended; `seconds` and `num_tokens` are of all training steps, over all restarts.
    `command`, `inputs` (see verl/run/inputs.py) and `started_at` (see time_of_start) are of this process; the first two of a
    checkpoint are compared with them."""

    step: int = 0
    seconds: float = 0.0
    num_tokens: int = 0
    first_validation: dict[str, float] = field(default_factory=dict)
    command: str = ""
    inputs: dict[str, str] = field(default_factory=dict)
    started_at: str | None = None

    schema: ClassVar[Mapping[str, Check]] = {
        "step": is_count,
        "seconds": is_number,
        "num_tokens": is_count,
        "first_validation": each(lambda value: isinstance(value, int | float)),  # NaN, if nothing was measured
        "command": maybe(is_text),  # null, as `inputs`, in older checkpoints
        "inputs": maybe(each(is_text)),
        "started_at": lambda value: value is None or _is_time(value),
    }

    def state_dict(self) -> dict[str, object]:
        """As JSON."""
        return asdict(self)

    def load_state_dict(self, saved: Mapping[str, object]) -> None:
        """Continue from a result of `state_dict`."""
        for name in ("step", "seconds", "num_tokens", "first_validation"):
            setattr(self, name, saved[name])


def time_of_start(root: Path, trainer: TrainerConfig, *, restarted: bool) -> str:
    """The local time at which the run in `root`, or the run that it resumes from, has started (ISO 8601); now for a new run.
    Chat templates that write the date get this time, so that a run resumed a day later renders the same prompts. `trainer` is
    the config section; `restarted`: after a crash of the same command."""
    if trainer.resume_mode == "resume_path" and trainer.resume_from_path:
        states = [Path(trainer.resume_from_path).expanduser() / "trainer_state.json"]
    elif trainer.resume_mode == "auto" or restarted:
        states = [root / START_FILE, *(root / f"global_step_{step}/trainer_state.json" for step in candidates(root))]
    else:
        states = []
    # a damaged checkpoint is reported when it is loaded
    times = (_value(file, "started_at", _is_time) for file in states)
    return next((time for time in times if time is not None), now())


def digest_of_start(loaded: LoadedConfig[RunConfig], inputs: Mapping[str, str]) -> str:
    """The digest of the settings and `inputs` that the results of a run depend on, for START_FILE."""
    return digest_of_text(json_text(settings_of_work(loaded)), json_text(inputs))


def is_same_start(root: Path, digest: str) -> bool:
    """Whether the last start of a run in `root` had the same settings and inputs."""
    return bool(_value(root / START_FILE, "digest", is_text) == digest)


def now() -> str:
    """The local time, ISO 8601."""
    return datetime.now().isoformat(timespec="seconds")


def _value(file: Path, name: str, check: Check) -> Any:
    """The value of `name` in a JSON file; None if it cannot be read, or is missing as in an earlier version."""
    try:
        return read_json(file, has(**{name: check}))[name]
    except (OSError, ValueError):
        return None


def _is_time(value: object) -> bool:
    try:
        return isinstance(value, str) and bool(datetime.fromisoformat(value))
    except ValueError:
        return False


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
    """Create a folder for the state of a run that has lost its folder `lost`: next to `lost`, or in the temporary folder.
    Raises OSError."""
    prefix = f"{lost.name}_rescued_"
    try:
        folder = Path(tempfile.mkdtemp(prefix=prefix, dir=lost.absolute().parent))
        sync_folder(folder.parent)
        return folder
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
    # all roles of a checkpoint are kept: the role that wants more of them decides
    store = CheckpointStore(root, keep=max((spec.checkpoints_to_keep or 0 for spec in specs), default=0))
    return BackgroundStore(store, timeout_s) if saves_in_background(specs) else store


@dataclass(eq=False)
class Resume:
    """Resumption of a run. Until `start`, `state` has the inputs of this run and is fresh otherwise. Afterwards `state`, the
    roles, the program and the records of the run folder are as the checkpoint has them. `trainer` is the config section,
    `state_schema` the schema of the program's state, `specs` its models. Every rank that runs the program makes the same
    calls."""

    trainer: TrainerConfig
    _: KW_ONLY
    folder: RunFolder
    broadcast: Broadcast
    state_schema: Mapping[str, Check]
    specs: Sequence[RoleSpec] = ()
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

    @property
    def source(self) -> Path | None:
        """The folder of the run with the checkpoint that `find` has chosen."""
        return None if self._saved is None else Path(self._saved[0]).parent

    def start(self, roles: Roles, program: Program[Any], *, same_run: bool = False) -> None:
        """Load the checkpoint of `find` into the roles and the program. `same_run`: without a checkpoint, the run in the folder
        is repeated from its first step."""
        self.roles, self.program = roles, program
        self._load(self.trainer.resume_mode, same_run=same_run)
        self._first_step = self.state.step

    def go_back(self, back: RollBack, saved_step: int) -> None:
        """Continue from the newest checkpoint of this run, last saved at step `saved_step`. Raises NumericsError when there is
        no checkpoint."""
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
        values, changed = resumable_state(checkpoint, self.state, self.state_schema, self.specs, self.trainer)
        if changed:
            log.warning("%s", changed)
        return self.broadcast((str(checkpoint), values))

    def _load(self, mode: str, back: RollBack | None = None, *, same_run: bool = False) -> None:
        while self._saved is not None and not self._load_roles(self._saved[0]):
            self._saved = self._find(mode, math.inf)  # names the damage; raises if no checkpoint is left
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


def resumable_state(
    checkpoint: Path, state: RunState, schema: Mapping[str, Check], specs: Sequence[RoleSpec], trainer: TrainerConfig
) -> tuple[dict[str, Any], str]:
    """The content of trainer_state.json, and a sentence with inputs of `state` that have changed since ("" without any). Raises
    CheckpointError when a run of the models `specs` cannot resume from `checkpoint`."""
    values = read_state(checkpoint, state.command, schema)
    changed = changed_inputs(checkpoint, values.get("inputs"), state.inputs, trainer.resume_changed_inputs)
    for spec in specs:
        if spec.changes:
            require_saved(checkpoint, spec)
    return values, changed


def read_state(checkpoint: Path, command: str, schema: Mapping[str, Check]) -> dict[str, Any]:
    """The content of trainer_state.json, for a run of `command`, by a program with the state schema `schema`. Raises
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
