"""Results of a benchmark: medians with their spread, ratios against a named baseline, a plain table, and the same as JSON."""

import json
import os
import platform
import statistics
import sys
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from importlib import metadata
from importlib.util import find_spec
from pathlib import Path
from typing import Any


@dataclass(frozen=True)
class Series:
    """One measured quantity over the rounds."""

    values: tuple[float, ...]

    @property
    def median(self) -> float:
        return statistics.median(self.values)

    @property
    def spread(self) -> float:
        """Largest minus smallest, as a share of the median."""
        return (max(self.values) - min(self.values)) / self.median if self.median else 0.0

    def text(self, unit: str = "") -> str:
        """ "12.3 s ±4%": the median, and half the spread."""
        return f"{number(self.median)}{unit and ' ' + unit} ±{100 * self.spread / 2:.0f}%"

    def to_json(self) -> dict[str, Any]:
        return {"median": self.median, "spread": self.spread, "values": list(self.values)}


def ratio(baseline: Series, ours: Series) -> float:
    """Ratio of the baseline's median to ours."""
    return baseline.median / ours.median if ours.median else float("inf")


def number(value: float) -> str:
    """Three significant digits, without an exponent in the usual range."""
    if not 1e-3 <= abs(value) < 1e6:
        return f"{value:.2e}" if value else "0.000"
    return f"{value:,.{sum(abs(value) < limit for limit in (1, 10, 100))}f}" if abs(value) >= 0.1 else f"{value:.2g}"


def table(header: Sequence[str], rows: Sequence[Sequence[object]]) -> str:
    """Columns as wide as their widest cell; the first to the left, the others to the right."""
    cells = [[str(cell) for cell in row] for row in (header, *rows)]
    widths = [max(map(len, column)) for column in zip(*cells, strict=True)]
    cells.insert(1, ["-" * width for width in widths])
    lines = (zip(row, widths, "<" + ">" * len(row), strict=False) for row in cells)
    return "\n".join("  ".join(f"{cell:{side}{width}}" for cell, width, side in line).rstrip() for line in lines)


@dataclass
class Report:
    """Results of one run of a script."""

    title: str
    facts: dict[str, Any] = field(default_factory=dict)  # workload, versions, settings
    tables: list[tuple[list[str], list[list[str]]]] = field(default_factory=list)
    results: dict[str, Any] = field(default_factory=dict)
    notes: list[str] = field(default_factory=list)

    def text(self) -> str:
        facts = [f"{name}: {plain(value)}" for name, value in self.facts.items()]
        tables = [table(header, rows) for header, rows in self.tables]
        return "\n\n".join([self.title, "\n".join(facts), *tables, "\n".join(self.notes)]).rstrip()

    def finish(self, file: Path | None) -> None:
        """Print, and write the JSON if a file was asked for."""
        print(self.text(), flush=True)
        if file is not None:
            file.parent.mkdir(parents=True, exist_ok=True)
            head = {"title": self.title, "command": " ".join(["python", *sys.argv]), "machine": machine()}
            content = {**head, "facts": self.facts, "results": self.results, "notes": self.notes}
            file.write_text(json.dumps(content, indent=2, default=str) + "\n")


def machine() -> dict[str, Any]:
    """Processor, cores, load and versions, for later readers of the results."""
    info = Path("/proc/cpuinfo")
    names = [line.split(":", 1)[1].strip() for line in info.read_text().splitlines() if line.startswith("model name")]
    return {
        "processor": names[0] if names else platform.machine(),
        "cores": os.cpu_count(),
        "load_average": list(os.getloadavg()),
        "python": platform.python_version(),
        "versions": versions("torch", "transformers"),
    }


def versions(*packages: str) -> dict[str, str]:
    """Installed versions; packages that are not there are left out."""
    return {package: metadata.version(package) for package in packages if find_spec(package)}


def plain(value: Any) -> str:
    """A fact for people: "a 1, b 2" for a mapping."""
    return ", ".join(f"{k} {plain(v)}" for k, v in value.items()) if isinstance(value, Mapping) else str(value)


def gigabytes(num_bytes: float) -> str:
    return f"{num_bytes / 1e9:.2f} GB"


def series_of(rounds: Sequence[Mapping[str, Any]], name: str) -> Series:
    """The quantity `name` of each round."""
    return Series(tuple(float(r[name]) for r in rounds))
