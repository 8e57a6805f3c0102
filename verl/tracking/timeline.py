"""What every role did in a step: busy, waiting, exchanging data. One line per step in timeline.jsonl.

    {"step": 3, "of": 100, "start": 1763.2, "seconds": 12.4,
     "phases": {"rollout": 7.1, "reward": 0.3, "training": 4.2, "other": 0.8},
     "roles": {"rollout": {"busy_s": 7.1, "waiting_s": 5.3, "utilisation": 0.57}, ...},
     "communication": {"seconds": 0.4, "bytes": 541065216}}

`phases` is what the program was occupied with, and adds up to the step; roles that work side by side may be busy for longer
than that together. A step's time runs from the end of the one before, so that validation and saving belong to the step after
which they came.
"""

from __future__ import annotations

import threading
import time
from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import Any

from verl.parallel.traffic import TRAFFIC, Traffic
from verl.tracking.files import append_rows

# span -> (phase of the step, role that is busy meanwhile)
_SPANS: dict[str, tuple[str, str | None]] = {
    "gen": ("rollout", "rollout"),
    "gen_max": ("rollout", "rollout"),
    "rollout_wait": ("rollout", None),  # for samples that are generated elsewhere meanwhile
    "reward": ("reward", None),  # for scores; the scorers' own seconds are given
    "old_log_prob": ("training", "actor"),
    "update_actor": ("training", "actor"),
    "ref": ("training", "reference"),
    "values": ("training", "critic"),
    "update_critic": ("training", "critic"),
    "adv": ("training", None),
    "update_weights": ("communication", None),
    "testing": ("validation", None),
    "save_checkpoint": ("saving", None),
}


class Timeline:
    """`busy` may be called by any thread, the others by the one that runs the program."""

    def __init__(self, path: Path, total_steps: int | None = None, *, traffic: Traffic = TRAFFIC):
        self._path = path
        self._total_steps = total_steps
        self._traffic = traffic
        self._lock = threading.Lock()
        self._busy: dict[str, float] = {}
        self._began = time.time()

    def busy(self, role: str, seconds: float) -> None:
        """`role` worked for so long beside the program: in another thread, process or device (their mean, if several)."""
        with self._lock:
            self._busy[role] = self._busy.get(role, 0.0) + seconds

    def write(self, step: int, spans: Iterable[Mapping[str, Any]]) -> None:
        """Add the line of `step`, from the spans that ended in it."""
        now = time.time()
        start, self._began = self._began, now
        with self._lock:
            elsewhere, self._busy = self._busy, {}
        exchanged = self._traffic.take()
        row = {
            "step": step,
            "of": self._total_steps,
            "start": round(start, 3),
            **summarise(spans, now - start, elsewhere),
            "communication": {"seconds": exchanged.seconds, "bytes": exchanged.num_bytes},
        }
        append_rows(self._path, [row])


def summarise(
    spans: Iterable[Mapping[str, Any]], seconds: float, elsewhere: Mapping[str, float] | None = None
) -> dict[str, Any]:
    """`seconds`, `phases` and `roles` of a stretch of time with these outermost spans (a span with a parent is part of
    it) and the busy seconds of roles that worked `elsewhere`."""
    phases: dict[str, float] = {}
    busy: dict[str, float] = dict(elsewhere or {})
    for span in spans:
        if span.get("parent") is not None:
            continue
        phase, role = _SPANS.get(span["name"], ("other", None))
        phases[phase] = phases.get(phase, 0.0) + span["seconds"]
        if role is not None and role not in (elsewhere or {}):
            busy[role] = busy.get(role, 0.0) + span["seconds"]
    phases["other"] = phases.get("other", 0.0) + max(seconds - sum(phases.values()), 0.0)
    roles = {
        role: {
            "busy_s": worked,
            "waiting_s": max(seconds - worked, 0.0),
            "utilisation": min(worked / seconds, 1.0) if seconds > 0 else 0.0,
        }
        for role, worked in busy.items()
    }
    return {"seconds": seconds, "phases": phases, "roles": roles}
