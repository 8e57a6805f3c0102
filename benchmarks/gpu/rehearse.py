"""The GPU report on a CPU: all steps with tiny shapes, then kills of the runner at random moments.

    python benchmarks/gpu/rehearse.py --out DIR --kills 20

Exit code 1: a step failed, or a report or an archive cannot be read after a kill.
"""

from __future__ import annotations

import argparse
import random
import subprocess
import sys
import tarfile
import time
from collections.abc import Sequence
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

from gpu import report
from gpu.section import read_report, section


def kill_at_random(out: Path, arguments: Sequence[str], kills: int, within_s: float, seed: int = 0) -> int:
    """Start the runner with `arguments` so many times, kill each at a random moment, and return the number of steps in all
    reports. Raises ValueError or tarfile.TarError when a report or an archive cannot be read."""
    moments = random.Random(seed)
    count = 0
    for number in range(kills):
        folder = out / f"kill-{number:02d}"
        command = [sys.executable, report.__file__, "run", "--out", str(folder), *arguments]
        with subprocess.Popen(command, stdout=subprocess.DEVNULL) as runner:
            time.sleep(moments.uniform(0, within_s))
            runner.kill()
        lines, logs = folder / "report.jsonl", folder / "logs.tar.gz"
        rows = read_report(lines) if lines.exists() else []
        section(rows)
        if logs.exists():
            with tarfile.open(logs) as archive:
                archive.getmembers()
        count += len(rows)
        print(f"kill {number + 1}: {len(rows)} steps in the report", flush=True)
    return count


def main(argv: list[str] | None = None) -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--out", type=Path, required=True)
    parser.add_argument("--minutes", type=float, default=60.0, help="of all steps")
    parser.add_argument("--kills", type=int, default=20)
    parser.add_argument("--within-s", type=float, default=60.0, help="latest moment of a kill")
    arguments = parser.parse_args(argv)
    failed = report.main(
        ["run", "--device", "cpu", "--minutes", str(arguments.minutes), "--out", str(arguments.out / "whole")]
    )
    kill_at_random(arguments.out, ["--device", "cpu"], arguments.kills, arguments.within_s)
    return failed


if __name__ == "__main__":
    sys.exit(main())
