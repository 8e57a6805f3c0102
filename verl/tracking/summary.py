"""summary.json: results, time and versions of a finished run."""

from __future__ import annotations

import platform
import statistics
import subprocess
from collections.abc import Sequence
from dataclasses import asdict, dataclass, field
from functools import cache
from importlib import metadata
from pathlib import Path
from typing import Any

from verl._version import __version__
from verl.tracking.files import read_metrics

_GIT_TIMEOUT_S = 5.0


@dataclass(frozen=True)
class Result:
    """A value on held-out rows before and after training; None if it was not measured. summary.json has it as {name}_before and
    {name}_after; the closing table leaves it out without a `label`."""

    name: str
    label: str
    before: float | None
    after: float | None


@dataclass(frozen=True)
class Summary:
    """Results, times and versions of a run. `seconds` and `tokens_per_s` count only training steps, over all restarts."""

    results: Sequence[Result]
    steps: int
    seconds: float
    num_tokens: int
    tokens_per_s: float | None
    device: str
    batch_invariant: str | None = None  # "yes" or "no", why, and the dtype of generation; None without generation
    median_step_s: float | None = None
    phase_seconds: dict[str, float] = field(default_factory=dict)  # sum over all steps
    median_phase_s: dict[str, float] = field(default_factory=dict)
    versions: dict[str, str | None] = field(default_factory=dict)
    git_revision: str | None = None

    @classmethod
    def of_run(cls, *, metrics_file: Path, seconds: float, num_tokens: int, **entries: Any) -> Summary:
        """A summary of `entries` (fields by name), the times in the metrics file, and the versions of the installation."""
        phases = _phases(metrics_file)
        step_seconds = phases.pop("step", [])
        return cls(
            seconds=seconds,
            num_tokens=num_tokens,
            tokens_per_s=num_tokens / seconds if seconds > 0 else None,
            median_step_s=statistics.median(step_seconds) if step_seconds else None,
            phase_seconds={name: sum(values) for name, values in phases.items()},
            median_phase_s={name: statistics.median(values) for name, values in phases.items()},
            versions=versions(),
            git_revision=git_revision(),
            **entries,
        )

    def to_json(self) -> dict[str, object]:
        """The object of summary.json."""
        measures = {f"{r.name}_{when}": getattr(r, when) for r in self.results for when in ("before", "after")}
        return measures | {name: value for name, value in asdict(self).items() if name != "results"}


@cache
def versions() -> dict[str, str | None]:
    """Versions of Python, torch, transformers and verl; None for a package that is not installed."""
    installed: dict[str, str | None] = {"python": platform.python_version(), "verl": __version__}
    for package in ("torch", "transformers"):
        try:
            installed[package] = metadata.version(package)
        except metadata.PackageNotFoundError:
            installed[package] = None
    return installed


@cache
def git_revision() -> str | None:
    """The commit of this checkout; None for an installed package."""
    folder = str(Path(__file__).resolve().parent)
    # an installed package may be inside an unrelated repository
    if _git("-C", folder, "ls-files", "--error-unmatch", Path(__file__).name) is None:
        return None
    return _git("-C", folder, "rev-parse", "HEAD")


def _git(*arguments: str) -> str | None:
    try:
        done = subprocess.run(["git", *arguments], capture_output=True, text=True, timeout=_GIT_TIMEOUT_S, check=False)
    except (OSError, subprocess.TimeoutExpired):
        return None
    return done.stdout.strip() if done.returncode == 0 else None


def _phases(metrics_file: Path) -> dict[str, list[float]]:
    """Seconds of each phase at each step that has it."""
    phases: dict[str, list[float]] = {}
    for row in read_metrics(metrics_file):
        for name, value in row.items():
            if name.startswith("timing_s/") and not name.startswith("timing_s/agent_loop/"):  # those are of episodes
                phases.setdefault(name.removeprefix("timing_s/"), []).append(value)
    return phases
