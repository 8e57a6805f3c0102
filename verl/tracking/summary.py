"""What a run came to, for people and for scripts: summary.json."""

from __future__ import annotations

import platform
import statistics
import subprocess
from dataclasses import asdict, dataclass, field
from importlib import metadata
from pathlib import Path
from typing import Any

from verl._version import __version__
from verl.tracking.files import read_rows

_GIT_TIMEOUT_S = 5.0


@dataclass(frozen=True)
class Summary:
    """Rewards are means over all held-out prompts, sampled and greedy; None where no validation ran. `seconds` and
    `tokens_per_s` are of training steps alone, over all restarts."""

    reward_before: float | None
    reward_after: float | None
    greedy_before: float | None
    greedy_after: float | None
    steps: int
    seconds: float
    num_tokens: int
    tokens_per_s: float | None
    device: str
    batch_invariant: str | None = None  # "yes" or "no", why, and the dtype of generation; None where nobody generates
    median_step_s: float | None = None
    phase_seconds: dict[str, float] = field(default_factory=dict)  # sum over all steps
    median_phase_s: dict[str, float] = field(default_factory=dict)
    versions: dict[str, str | None] = field(default_factory=dict)
    git_revision: str | None = None

    @classmethod
    def of_run(
        cls,
        *,
        reward_before: float | None,
        reward_after: float | None,
        greedy_before: float | None,
        greedy_after: float | None,
        steps: int,
        seconds: float,
        num_tokens: int,
        device: str,
        batch_invariant: str | None = None,
        metrics_file: Path,
    ) -> Summary:
        """The given figures, and those that the metrics file and the installation tell."""
        phases = _phases(metrics_file)
        step_seconds = phases.pop("step", [])
        return cls(
            reward_before=reward_before,
            reward_after=reward_after,
            greedy_before=greedy_before,
            greedy_after=greedy_after,
            steps=steps,
            seconds=seconds,
            num_tokens=num_tokens,
            tokens_per_s=num_tokens / seconds if seconds > 0 else None,
            device=device,
            batch_invariant=batch_invariant,
            median_step_s=statistics.median(step_seconds) if step_seconds else None,
            phase_seconds={name: sum(values) for name, values in phases.items()},
            median_phase_s={name: statistics.median(values) for name, values in phases.items()},
            versions=versions(),
            git_revision=git_revision(),
        )

    def to_json(self) -> dict[str, Any]:
        return asdict(self)


def versions() -> dict[str, str | None]:
    """Of Python, torch, transformers and verl; None for a package that is not installed."""
    found: dict[str, str | None] = {"python": platform.python_version(), "verl": __version__}
    for package in ("torch", "transformers"):
        try:
            found[package] = metadata.version(package)
        except metadata.PackageNotFoundError:
            found[package] = None
    return found


def git_revision() -> str | None:
    """The commit that this package is checked out at; None when it is installed rather than checked out."""
    folder = str(Path(__file__).resolve().parent)
    # an installed package may lie inside somebody else's repository, which says nothing about it
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
    found: dict[str, list[float]] = {}
    for row in read_rows(metrics_file):
        for name, value in row.items():
            if name.startswith("timing_s/") and value is not None:
                found.setdefault(name.removeprefix("timing_s/"), []).append(value)
    return found
