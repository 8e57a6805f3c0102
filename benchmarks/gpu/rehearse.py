"""The GPU report on a CPU, as a machine with a GPU runs it: its packages, a fresh clone, no network, tiny shapes.

    python benchmarks/gpu/rehearse.py --out DIR --environments work/versions

The environment has the releases of MACHINE, the clone has no compiled libraries, and WHEELS come as files. Exit code 1: a step
failed. An assertion says which limit of such machines was passed.
"""

import argparse
import os
import re
import shutil
import subprocess
import sys
from pathlib import Path
from typing import NamedTuple

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

from gpu.report import STEPS, read_report
from gpu.results import ROOT
from versions import Environment

PYTHON, TORCH = "3.12", "2.11.0"
MACHINE = (
    "transformers==5.17.0 numpy>=2.5,<2.6 pytest pytest-timeout pytest-xdist hypothesis xxhash psutil httpx rich pyarrow"
    " cloudpickle peft accelerate pandas requests aiohttp jinja2"
).split()
WHEELS = (
    "tensordict==0.15.3 pyvers==0.2.3 omegaconf==2.4.0 antlr4-python3-runtime==4.13.2 math-verify==0.9.0"
    " latex2sympy2-extended==1.11.0 trl==1.16.0 datasets==4.8.5 dill==0.4.1 multiprocess==0.70.19"
).split()
# limits of machines that are lent for minutes: what travels there, the command, and what comes back
_MAX_TREE_BYTES, _MAX_COMMAND = 64 << 20, 2000
_MAX_FILES, _MAX_FILE_BYTES, _MAX_DEPTH = 8, 16 << 20, 3
_INSTALL = "python3 -m pip install -q --no-index --no-deps --no-compile --no-cache-dir --upgrade --target {site} .whl/*.whl && "
_RUN = "export PYTHONPATH={site} && exec python3 benchmarks/gpu/report.py run --device cpu --out $OUT {arguments}"
_PATIENCE = 6  # the steps must run, however busy the machine is


class Rehearsal(NamedTuple):
    """A fresh clone with the wheels in `.whl`, and the environment of the machine."""

    tree: Path
    environment: Environment
    site: Path

    def start(self, out: Path, command: str, arguments: str) -> subprocess.Popen[bytes]:
        """`command` in the clone on the machine, with `out` as its $OUT and without a network."""
        command = command.format(site=self.site, arguments=arguments)
        assert len(command) < _MAX_COMMAND, f"the command has {len(command)} characters"
        out.mkdir(parents=True)
        path = f"{self.environment.python.parent}:/usr/local/bin:/usr/bin:/bin"
        temporary = out.with_name(f"{out.name}-temporary")  # a killed runner leaves its files there
        temporary.mkdir()
        variables = {"OUT": str(out), "PATH": path, "HOME": str(self.site.parent), "TMPDIR": str(temporary)}
        variables["OMP_NUM_THREADS"] = "1"
        isolated = ["unshare", "--map-root-user", "--net", "bash", "-c", f"ip link set lo up && {command}"]
        return subprocess.Popen(isolated, cwd=self.tree, env=variables, stdout=subprocess.DEVNULL)

    def run_all(self, out: Path, minutes: float) -> bool:
        """Run all steps; returns whether all passed. GPU tests must be collected and skipped."""
        runner = self.start(out, _INSTALL + _RUN, f"--minutes {minutes:g} --patience {_PATIENCE}")
        status = runner.wait(60 * minutes + 120)
        rows = {row["step"]: row for row in read_report(out / "report.jsonl")}
        for name, row in rows.items():
            print(f"{name}: {row.get('skipped') or row['status']}, {row.get('seconds', 0)} s", flush=True)
            if row.get("status") != 0:
                print("   " + "\n   ".join(row.get("tail", ())), flush=True)
        check_output(out)
        for name in (step.name for step in STEPS if "tests" in step.command):
            numbers = rows[name].get("numbers", {})
            assert set(numbers) == {"skipped tests"}, f"tests of {name} that are not skipped on a CPU: {numbers}"
        return status == 0 and list(rows) == [step.name for step in STEPS]


def prepare(out: Path, environments: Path) -> Rehearsal:
    """Make the clone in `out`, and environment and wheels in `environments` where they are missing."""
    environment = Environment(environments / "gpu-machine", PYTHON, environments)
    wheels = environments / "wheels"
    if not wheels.exists():
        environment.install_torch(TORCH)
        environment.pip("install", f"torch=={TORCH}", *MACHINE)
        environment.pip("download", "--no-deps", "--dest", f"{wheels}.part", *WHEELS)
        os.replace(f"{wheels}.part", wheels)
    tree = out / "tree"
    environment.run("git", "clone", "--quiet", str(ROOT), str(tree))
    shutil.rmtree(tree / ".git")
    shutil.copytree(wheels, tree / ".whl")
    assert not list(tree.rglob("*.so")), "the clone has compiled libraries"
    size = sum(file.stat().st_size for file in tree.rglob("*") if file.is_file())
    assert size < _MAX_TREE_BYTES, f"tree and wheels have {size} bytes"
    print(f"tree and wheels: {size / (1 << 20):.1f} MiB", flush=True)
    return Rehearsal(tree, environment, out / "site")


def check_output(out: Path) -> None:
    """Assert that everything below `out` may come back from such a machine."""
    files = [file for file in out.rglob("*") if file.is_file()]
    assert len(files) <= _MAX_FILES, f"{len(files)} files"
    for file in files:
        parts = file.relative_to(out).parts
        assert len(parts) <= _MAX_DEPTH, f"{file} is too deep"
        assert all(re.fullmatch(r"[\w.-]+", part, re.ASCII) for part in parts), f"{file} has an odd name"
        assert file.stat().st_size <= _MAX_FILE_BYTES, f"{file} is too large"


def main(argv: list[str] | None = None) -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--out", type=Path, required=True)
    parser.add_argument("--environments", type=Path, default=ROOT / "work/versions", help="kept for the next rehearsal")
    parser.add_argument("--minutes", type=float, default=120.0, help="of all steps")
    arguments = parser.parse_args(argv)
    out = arguments.out.resolve()
    out.mkdir(parents=True)
    rehearsal = prepare(out, arguments.environments.resolve())
    return int(not rehearsal.run_all(out / "report", arguments.minutes))


if __name__ == "__main__":
    sys.exit(main())
