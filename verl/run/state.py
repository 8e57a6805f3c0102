"""The host's keys of trainer_state.json, to which a program adds its own, and the time at which a run has started."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import asdict, dataclass, field
from datetime import datetime
from pathlib import Path
from typing import Any, ClassVar

from verl.checkpoint.retention import candidates
from verl.tracking.files import Check, each, is_count, is_number, is_text, maybe, read_json

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

    def state_dict(self) -> dict[str, Any]:
        """As JSON."""
        return asdict(self)

    def load_state_dict(self, saved: Mapping[str, Any]) -> None:
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
    found = (_started_at(file) for file in states)
    return next((time for time in found if time is not None), now())


def now() -> str:
    """The local time, ISO 8601."""
    return datetime.now().isoformat(timespec="seconds")


def _started_at(file: Path) -> str | None:
    try:
        value = read_json(file, lambda found: isinstance(found, dict) and _is_time(found.get("started_at")))
    except (OSError, ValueError):
        return None  # missing or of an earlier version; whatever is wrong with a checkpoint, its loading says
    return str(value["started_at"])


def _is_time(value: Any) -> bool:
    try:
        return isinstance(value, str) and bool(datetime.fromisoformat(value))
    except ValueError:
        return False
