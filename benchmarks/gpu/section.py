"""The GPU section of docs/benchmarks.md: numbers and their predictions in predictions.json; docs/gpu.jsonl has all numbers."""

from __future__ import annotations

import json
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from gpu.results import ROOT

PAGE = ROOT / "docs" / "benchmarks.md"
FIGURES = PAGE.with_name("gpu.jsonl")  # the report that the page shows; absent until a GPU has run one
PREDICTIONS = Path(__file__).with_name("predictions.json")
BEGIN, END = "<!-- gpu report: begin -->", "<!-- gpu report: end -->"
Row = dict[str, Any]


def read_report(file: Path) -> list[Row]:
    """The lines of a report. Raises ValueError when one is no JSON object with a step."""
    rows = [json.loads(line) for line in file.read_text(encoding="utf-8").splitlines()]
    if not all(isinstance(row, dict) and "step" in row for row in rows):
        raise ValueError(f"{file} has a line that is not the result of a step.")
    return rows


def section(rows: Sequence[Row]) -> str:
    """Markdown between the markers. If a step ran twice, the later result counts; a skipped step replaces no result."""
    last: dict[str, Row] = {}
    for row in rows:
        if "skipped" not in row or row["step"] not in last:
            last[row["step"]] = row
    predictions = json.loads(PREDICTIONS.read_text(encoding="utf-8"))
    numbers = {name: dict(row.get("numbers", {})) for name, row in last.items()}
    lines = [BEGIN, "", _heading(numbers.get("environment", {}), bool(rows)) + predictions["note"], ""]
    if rows:
        lines += ["| step | result | time (s) | expected (s) |", "|---|---|---|---|"]
        lines += [
            f"| {name} | {_result(row)} | {row.get('seconds', '-')} | {row['expected_s']:g} |"
            for name, row in last.items()
        ]
        lines.append("")
    lines += ["| step | number | predicted | measured |", "|---|---|---|---|"]
    for step, predicted in predictions["steps"].items():
        for name, (value, unit) in predicted.items():
            result = numbers.get(step, {}).get(name)
            cells = (step, name, _text(value, unit), "not yet" if result is None else _text(*result))
            lines.append("| " + " | ".join(cell.replace("|", "/").replace("\n", " ") for cell in cells) + " |")
    return "\n".join([*lines, "", END])


def rewrite_page(page: Path, text: str) -> None:
    """Put `text` between the markers of `page`. Raises ValueError when it has none."""
    before, begin, rest = page.read_text(encoding="utf-8").partition(BEGIN)
    _, end, after = rest.partition(END)
    if not begin or not end:
        raise ValueError(f"{page} lacks the lines {BEGIN} and {END}; add them where the section belongs.")
    page.write_text(before + text + after, encoding="utf-8")


def keep(rows: Sequence[Row], file: Path) -> None:
    """Write the report without its ends of logs, which name paths of the machine."""
    shortened = ({name: value for name, value in row.items() if name != "tail"} for row in rows)
    file.write_text("".join(json.dumps(row) + "\n" for row in shortened), encoding="utf-8")


def _heading(environment: dict[str, list[Any]], has_run: bool) -> str:
    if not has_run:
        return "No GPU has run this yet. "
    machine = [str(environment[name][0]) for name in ("device", "torch", "transformers") if name in environment]
    return f"{', '.join(machine) or 'Unknown device'}. "


def _result(row: Row) -> str:
    if "skipped" in row:
        return f"skipped: {row['skipped']}"
    if row["status"] == 0:
        return "passed"
    return f"exit status {row['status']}" if isinstance(row["status"], int) else str(row["status"])


def _text(value: Any, unit: str) -> str:
    if value is None:
        return "-"
    if isinstance(value, list):
        return " to ".join(_text(end, "") for end in value) + (f" {unit}" if unit else "")
    if isinstance(value, float | int) and not isinstance(value, bool):
        value = f"{value:,.0f}" if abs(value) >= 1000 else f"{value:.3g}"
    return f"{value} {unit}".rstrip()
