"""The host's part of trainer_state.json; a program adds its own keys beside them."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import asdict, dataclass, field
from typing import Any, ClassVar

from verl.tracking.files import Check, each, is_count, is_number, is_text, maybe


@dataclass
class RunState:
    """`step` is the last step that has ended; `seconds` and `num_tokens` are of all training steps, over all restarts.
    `command` and `inputs` (see verl/run/inputs.py) are of this process; a checkpoint's are compared with them."""

    step: int = 0
    seconds: float = 0.0
    num_tokens: int = 0
    first_validation: dict[str, float] = field(default_factory=dict)
    command: str = ""
    inputs: dict[str, str] = field(default_factory=dict)

    schema: ClassVar[Mapping[str, Check]] = {
        "step": is_count,
        "seconds": is_number,
        "num_tokens": is_count,
        "first_validation": each(lambda value: isinstance(value, int | float)),  # NaN, where nothing was measured
        "command": maybe(is_text),  # null, as `inputs`, in older checkpoints
        "inputs": maybe(each(is_text)),
    }

    def state_dict(self) -> dict[str, Any]:
        """As JSON."""
        return asdict(self)

    def load_state_dict(self, saved: Mapping[str, Any]) -> None:
        """Continue where `state_dict` was taken."""
        for name in ("step", "seconds", "num_tokens", "first_validation"):
            setattr(self, name, saved[name])
