"""One command for a quarter of an hour of a GPU: steps in order of value, each in a process with a time limit.

    python benchmarks/gpu/report.py run --minutes 14 --out DIR              # one NVIDIA GPU
    python benchmarks/gpu/report.py run --minutes 9 --out DIR --only "sizes 1.5b" "decode sweep"
    python benchmarks/gpu/report.py run --minutes 3 --out DIR --main-job FOLDER   # with model and data, see functions.py
    python benchmarks/gpu/report.py run --device cpu --out DIR              # tiny shapes: does every step run?
    python benchmarks/gpu/report.py render DIR/report.jsonl                 # the GPU section of docs/benchmarks.md

docs/benchmarks.md lists the packages that it needs. No network and no files.

    DIR/report.jsonl   one line for each step when it ends, synchronized to disk: name, exit status, seconds, numbers
    DIR/logs.tar.gz    the end of every step's output and its numbers, written again after each step
"""

import argparse
import contextlib
import io
import json
import os
import signal
import subprocess
import sys
import tarfile
import tempfile
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any, NamedTuple

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

from gpu.results import DEVICE, RESULTS, ROOT

PAGE = ROOT / "docs" / "benchmarks.md"
FIGURES = PAGE.with_name("gpu.jsonl")  # the report that the page shows; absent until a GPU has run one
PREDICTIONS = Path(__file__).with_name("predictions.json")
BEGIN, END = "<!-- gpu report: begin -->", "<!-- gpu report: end -->"
_LOG_BYTES = 1 << 20  # of each step, in the archive: some machines return files of 16 MiB at most
_LEAST_SHARE = 0.6  # of a step's expected time: with less left, the step is skipped
_FOR_THE_REPORT_S = 5.0


class Step(NamedTuple):
    """`expected_s` on an H100, `cpu_s` on two cores with tiny shapes. A step is killed after twice that."""

    name: str
    command: tuple[str, ...]  # arguments of Python
    expected_s: float
    cpu_s: float = 60.0


def _script(name: str, *arguments: str) -> tuple[str, ...]:
    return (str(Path(__file__).with_name(name)), *arguments)


STEPS = (  # in order of value; seconds as an H100 took on 27 November 2026 where it ran the step, else estimates
    Step("environment", _script("functions.py", "environment"), 30),
    Step("training profile", _script("speed.py", "profile"), 75),
    Step("fsdp of one rank", _script("functions.py", "fsdp"), 30),
    Step("weights by IPC", _script("speed.py", "weights"), 20),
    Step("times of kernels", _script("kernel_times.py"), 25),
    Step("decode sweep", _script("speed.py", "decode"), 120),
    Step("backend", _script("functions.py", "tests", "tests/rollout/test_device_backend.py"), 30),
    Step("loop", _script("functions.py", "loop"), 86, 240),
    Step(
        "kernels",
        _script("functions.py", "tests", "tests/models/test_varlen.py", "tests/reshard/test_device_memory.py"),
        21,
    ),
    Step("kernels by Triton", _script("functions.py", "tests", "tests/models/test_kernels.py"), 115),
    Step("decode profile", _script("speed.py", "decode-profile"), 45),
    Step("service", _script("functions.py", "service"), 30),
    Step("sizes 1.5b", _script("sizes.py", "--size", "1.5b", "--limit-s", "200"), 110),
    Step("TRL 0.5b", _script("functions.py", "trl", "0.5b"), 120),
    Step("sizes 0.5b", _script("sizes.py", "--size", "0.5b", "--limit-s", "170"), 80),
)


def main_job(folder: Path) -> Step:
    """The step that trains the pretrained model in `folder`; see main_job of functions.py."""
    return Step("main job", _script("functions.py", "main-job", str(folder)), 110, 900)


def run(out: Path, steps: tuple[Step, ...], minutes: float, device: str | None = None, patience: float = 1.0) -> None:
    """Run the steps that the time allows; the others are listed as skipped. `patience` is a factor of the time limits."""
    out.mkdir(parents=True, exist_ok=True)
    end = time.monotonic() + 60 * minutes
    with tempfile.TemporaryDirectory(prefix="gpu-report-") as scratch:
        for number, step in enumerate(steps):
            expected_s = step.cpu_s if device == "cpu" else step.expected_s
            left_s = end - time.monotonic() - _FOR_THE_REPORT_S
            row: dict[str, Any] = {"step": step.name, "expected_s": expected_s}
            if left_s < _LEAST_SHARE * expected_s:
                row["skipped"] = f"{max(left_s, 0):.0f} s left"
            else:
                row |= _run_step(step, Path(scratch) / f"{number:02d}", min(2 * patience * expected_s, left_s), device)
            _append(out / "report.jsonl", row)
            _archive(Path(scratch), out / "logs.tar.gz")
            print(f"{step.name}: {row.get('skipped') or row['status']}, {row.get('seconds', 0)} s", flush=True)


def _run_step(step: Step, files: Path, limit_s: float, device: str | None) -> dict[str, Any]:
    """Run a step in a new session. All its processes are killed at the limit, or when the first process has ended."""
    log, results = files.with_suffix(".log"), files.with_suffix(".json")
    environment = {**os.environ, RESULTS: str(results), "HF_HUB_OFFLINE": "1", "PYTHONUNBUFFERED": "1"}
    if device is not None:
        environment[DEVICE] = device
    start = time.monotonic()
    with log.open("wb") as output:
        command = [sys.executable, *step.command]
        child = subprocess.Popen(
            command, stdout=output, stderr=output, env=environment, cwd=ROOT, start_new_session=True
        )
        try:
            status: int | str = child.wait(limit_s)
        except subprocess.TimeoutExpired:
            status = f"killed after {limit_s:.0f} s"
        finally:
            with contextlib.suppress(ProcessLookupError):
                os.killpg(child.pid, signal.SIGKILL)
            child.wait()
    row = {"status": status, "seconds": round(time.monotonic() - start, 1)}
    row["tail"] = [line[:300] for line in _end_of(log).decode(errors="replace").splitlines()[-3:]]
    if results.exists():
        row["numbers"] = json.loads(results.read_text(encoding="utf-8"))
    return row


def _append(file: Path, row: dict[str, Any]) -> None:
    """One write for each line, so that a kill leaves whole lines."""
    with file.open("ab", buffering=0) as output:
        output.write((json.dumps(row) + "\n").encode())
        os.fsync(output)


def _archive(folder: Path, file: Path) -> None:
    """Archive the end of each log and all numbers; an interrupted write leaves the previous archive."""
    part = file.with_suffix(".part")
    with tarfile.open(part, "w:gz") as archive:
        for path in sorted(folder.iterdir()):
            if path.suffix in (".log", ".json"):
                data, entry = _end_of(path), tarfile.TarInfo(f"logs/{path.name}")
                entry.size = len(data)
                archive.addfile(entry, io.BytesIO(data))
    os.replace(part, file)


def _end_of(file: Path) -> bytes:
    with file.open("rb") as opened:
        opened.seek(max(0, file.stat().st_size - _LOG_BYTES))
        return opened.read()


def read_report(file: Path) -> list[dict[str, Any]]:
    """The lines of a report. Raises ValueError when one is no JSON object with a step."""
    rows = [json.loads(line) for line in file.read_text(encoding="utf-8").splitlines()]
    if not all(isinstance(row, dict) and "step" in row for row in rows):
        raise ValueError(f"{file} has a line that is not the result of a step.")
    return rows


def section(rows: Sequence[dict[str, Any]]) -> str:
    """Markdown between the markers. If a step ran twice, the later result counts; a skipped step replaces no result."""
    last: dict[str, dict[str, Any]] = {}
    for row in rows:
        if "skipped" not in row or row["step"] not in last:
            last[row["step"]] = row
    predictions = json.loads(PREDICTIONS.read_text(encoding="utf-8"))
    numbers = {name: dict(row.get("numbers", {})) for name, row in last.items()}
    environment = numbers.get("environment", {})
    machine = [str(environment[name][0]) for name in ("device", "torch", "transformers") if name in environment]
    lines = [BEGIN, "", f"{', '.join(machine) or 'Unknown device'}. {predictions['note']}", ""]
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


def keep(rows: Sequence[dict[str, Any]], file: Path) -> None:
    """Write the report without its ends of logs, which name paths of the machine."""
    shortened = ({name: value for name, value in row.items() if name != "tail"} for row in rows)
    file.write_text("".join(json.dumps(row) + "\n" for row in shortened), encoding="utf-8")


def _result(row: dict[str, Any]) -> str:
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


def chosen_steps(names: list[str] | None, table: Path | None) -> tuple[Step, ...]:
    """The steps called `names` (None: all) of STEPS, or of the JSON file `table`: [name, arguments of Python, seconds]."""
    steps = STEPS
    if table is not None:
        steps = tuple(Step(name, tuple(command), s, s) for name, command, s in json.loads(table.read_text()))
    return tuple(step for step in steps if not names or step.name in names)


def main(argv: list[str] | None = None) -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    verbs = parser.add_subparsers(dest="verb", required=True)
    options = verbs.add_parser("run")
    options.add_argument("--out", type=Path, required=True)
    options.add_argument("--minutes", type=float, default=14.0)
    options.add_argument("--device", choices=("cuda", "cpu"), default=os.environ.get(DEVICE))
    options.add_argument("--patience", type=float, default=1.0, help="factor of the time limits, for a busy machine")
    options.add_argument("--only", nargs="+", metavar="STEP", choices=[step.name for step in STEPS])
    options.add_argument("--steps", type=Path, help="JSON list of [name, arguments of Python, seconds] for STEPS")
    options.add_argument("--main-job", type=Path, metavar="FOLDER", help="only the main job, with model and data there")
    render = verbs.add_parser("render")
    render.add_argument("report", type=Path, nargs="?", help="none: only the predictions")
    render.add_argument("--page", type=Path, default=PAGE)
    arguments = parser.parse_args(argv)
    if arguments.verb == "run":
        chosen = chosen_steps(arguments.only, arguments.steps)
        steps = (main_job(arguments.main_job),) if arguments.main_job else chosen
        run(arguments.out, steps, arguments.minutes, arguments.device, arguments.patience)
        failed = [row["step"] for row in read_report(arguments.out / "report.jsonl") if row.get("status") != 0]
        print("all steps passed" if not failed else f"failed or skipped: {', '.join(failed)}")
        return int(bool(failed))
    rows = read_report(arguments.report) if arguments.report else []
    if rows and arguments.page == PAGE:
        keep(rows, FIGURES)
    rewrite_page(arguments.page, section(rows))
    return 0


if __name__ == "__main__":
    sys.exit(main())
