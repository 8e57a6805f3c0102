"""A problem of a configuration: how bad it is, which key it is about, and its sentence."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

Level = Literal["error", "warning", "notice"]
LEVELS: tuple[Level, ...] = ("error", "warning", "notice")


@dataclass(frozen=True)
class Problem:
    level: Level  # an error stops the run, a warning is probably a mistake, a notice says that a key has no effect here
    key: str
    sentence: str


def no_effect(keys: list[str], reason: str) -> str:
    """The notice for keys that change nothing here, all for one reason."""
    return f"No effect: {', '.join(keys)} ({reason})."
