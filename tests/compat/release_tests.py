"""Counts how many CPU tests of a release of the existing verl pass here; nothing of the release is in this repository.

    pip download --no-deps --no-binary :all: verl==0.9.1
    python -m tests.compat.release_tests verl-0.9.1.tar.gz

A folder with a `tests` folder in it, such as a checkout, is taken as well. Each file runs in a process.
"""

import argparse
import os
import subprocess
import sys
import tarfile
import tempfile
from collections import Counter
from dataclasses import dataclass, field
from pathlib import Path
from xml.etree import ElementTree

import verl

LIMIT_S = 600


@dataclass
class Outcome:
    """Tests of a file, and the first line of each failure by the test's name."""

    counts: Counter = field(default_factory=Counter)
    failures: dict[str, str] = field(default_factory=dict)


def unpack(archive: Path, folder: Path) -> Path:
    """A folder with the release's `tests`, and `verl`, which is the package here: some tests read its files."""
    root = folder / "release"
    root.mkdir()
    if archive.is_dir():
        (root / "tests").symlink_to(archive.resolve() / "tests")
    else:
        with tarfile.open(archive) as packed:
            members = [member for member in packed if "tests" in Path(member.name).parts[1:2]]
            packed.extractall(folder / "packed", members, filter="data")
        next((folder / "packed").iterdir()).joinpath("tests").rename(root / "tests")
    (root / "verl").symlink_to(Path(verl.__file__).parent)
    return root


def run_file(root: Path, file: Path) -> Outcome:
    """The outcome of a file's tests. A file that ends without a report counts as one error."""
    outcome, report = Outcome(), root.parent / "report.xml"
    report.unlink(missing_ok=True)
    command = [
        "-m",
        "pytest",
        "-q",
        "-p",
        "no:xdist",
        "-p",
        "no:cacheprovider",
        "-c",
        os.devnull,
        "--rootdir",
        str(root),
    ]
    # sessions of the release's own asyncio tests
    command += ["-o", "asyncio_mode=auto", f"--junitxml={report}", str(file)]
    environment = {**os.environ, "PYTHONPATH": str(root), "PYTHONDONTWRITEBYTECODE": "1", "HF_HUB_OFFLINE": "1"}
    try:
        subprocess.run(
            [sys.executable, *command], cwd=root, env=environment, timeout=LIMIT_S, capture_output=True, check=False
        )
    except subprocess.TimeoutExpired:
        pass
    if not report.exists():
        return Outcome(Counter(error=1), {file.name: "no report: it ended or hung"})
    for case in ElementTree.parse(report).iter("testcase"):
        kinds = [part for part in case if part.tag in ("failure", "error", "skipped")]
        kind = kinds[0].tag if kinds else "passed"
        outcome.counts[kind] += 1
        if kind in ("failure", "error"):
            text = kinds[0].get("message") or ""
            reasons = [line[1:].strip() for line in (kinds[0].text or "").splitlines() if line.startswith("E ")]
            outcome.failures[case.get("name") or file.name] = (reasons or text.splitlines() or [""])[0][:160]
    return outcome


def count(archive: Path, only: str = "") -> dict[str, Outcome]:
    """File -> outcome, of the files whose path holds `only`."""
    with tempfile.TemporaryDirectory(prefix="verl_release_") as name:
        root = unpack(archive, Path(name))
        files = sorted(root.joinpath("tests").rglob("*_on_cpu.py"))
        places = {file: str(file.relative_to(root / "tests")) for file in files}
        return {place: run_file(root, file) for file, place in places.items() if only in place}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("archive", type=Path)
    parser.add_argument("--only", default="", help="part of the path of the files to run")
    parser.add_argument("--failures", action="store_true", help="print the first line of each failure")
    arguments = parser.parse_args()
    total: Counter = Counter()
    for place, outcome in count(arguments.archive, arguments.only).items():
        total += outcome.counts
        print(f"{outcome.counts['passed']:4} {sum(outcome.counts.values()):4}  {place}", flush=True)
        for test, reason in outcome.failures.items() if arguments.failures else ():
            print(f"             {test}: {reason}")
    print(f"{total['passed']} of {sum(total.values())} pass: {dict(total)}")


if __name__ == "__main__":
    main()
