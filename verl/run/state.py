"""The host's keys of trainer_state.json, to which a program adds its own, and the start of a run: its time and digest."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import asdict, dataclass, field
from datetime import datetime
from pathlib import Path
from typing import Any, ClassVar

from verl.checkpoint.retention import candidates
from verl.config import LoadedConfig, RunConfig
from verl.config.diff import settings_of_work
from verl.models.content import digest_of_text
from verl.tracking.files import Check, each, has, is_count, is_number, is_text, json_text, maybe, read_json

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
        "first_validation": each(lambda value: isinstance(value, int | float)),  # NaN, where nothing was measured
        "command": maybe(is_text),  # null, as `inputs`, in older checkpoints
        "inputs": maybe(each(is_text)),
        "started_at": lambda value: value is None or _is_time(value),
    }

    def state_dict(self) -> dict[str, object]:
        """As JSON."""
        return asdict(self)

    def load_state_dict(self, saved: Mapping[str, object]) -> None:
        """Continue where `state_dict` was taken."""
        for name in ("step", "seconds", "num_tokens", "first_validation"):
            setattr(self, name, saved[name])


def time_of_start(root: Path, trainer: Any, *, restarted: bool) -> str:
    """The local time at which the run in `root`, or the run that it resumes from, has started (ISO 8601); now for a new run.
    Chat templates that write the date get this time, so that a run which is resumed a day later renders the same prompts.
    `trainer` is the config section; `restarted`: after a crash of the same command."""
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
    """The value of `name` in a JSON file; None where it cannot be read, or is missing as in an earlier version."""
    try:
        return read_json(file, has(**{name: check}))[name]
    except (OSError, ValueError):
        return None


def _is_time(value: object) -> bool:
    try:
        return isinstance(value, str) and bool(datetime.fromisoformat(value))
    except ValueError:
        return False
