"""The tests of models, rollout, engines and reshard with several releases of PyTorch, transformers and Python.

    python benchmarks/versions.py --work work/versions                      # every cell, then docs/versions.md
    python benchmarks/versions.py --work work/versions --only 2.11.0 3.14   # the cells with one of these versions
    python benchmarks/versions.py                                           # the page again, from docs/versions.json

A cell has an environment as `pip install` makes it, and a clone of HEAD with compiled libraries. The libraries, which do not
use Python, are compiled once. CUDA packages, gigabytes for each release of PyTorch, are installed once and shared. Where pip
refuses a release because verl excludes it, verl is installed without its dependencies, and the row has the last line of
`verl train`.
"""

import argparse
import hashlib
import json
import os
import re
import shutil
import subprocess
import sys
import time
import xml.etree.ElementTree as ET
from pathlib import Path
from typing import Any, NamedTuple

ROOT = Path(__file__).resolve().parents[1]
PAGE, RESULTS = ROOT / "docs" / "versions.md", ROOT / "docs" / "versions.json"
BEGIN, END = "<!-- results: written by benchmarks/versions.py, do not edit -->", "<!-- end of the results -->"
# interfaces of PyTorch and transformers; clients of services, kernels in C and plans show little of a release
FILES = {
    "models": "adapter_choice chunked_mlp convert cpu_decoder folder load log_probs lora neftune optim packed padded rounding "
    "straight text_tokens varlen",
    "rollout": "contract device_backend native_forward paging rollout_model sampling",
    "engines": "checkpointing contract fsdp offload",
    "reshard": "device_memory digest rounding_layouts transport update weight_files",
}
TESTS = (
    *(f"tests/{folder}/test_{name}.py" for folder, names in FILES.items() for name in names.split()),
    *("-k", "not (http or vllm)"),
)
# a distributed arrangement -> its test, which compares two ranks over gloo with one device
DISTRIBUTED = {"FSDP 2": "check_fsdp", "TP 2": "check_tensor", "Ulysses 2": "check_sequence"}
_LIMIT_S = 1500.0
Row = dict[str, Any]


class Cell(NamedTuple):
    """Releases of one environment; `python` is "3.12"."""

    torch: str
    transformers: str
    python: str

    @property
    def name(self) -> str:
        return "-".join(self)


_RELEASES = (
    "2.15.0 5.24.0 3.13, 2.11.0 5.17.0 3.12, 2.14.1 5.24.0 3.13, 2.9.1 5.6.0 3.10, 2.14.1 5.19.0 3.14, 2.9.1 5.24.0 3.12, "
    "2.13.0 5.19.0 3.11, 2.14.1 5.6.0 3.12, 2.13.0 5.17.0 3.10, 2.11.0 5.24.0 3.13, 2.8.0 5.24.0 3.12, 2.13.0 5.4.0 3.11"
)
CELLS = tuple(Cell(*releases.split()) for releases in _RELEASES.split(", "))


def interpreter(version: str) -> str:
    """A Python of `version` on the PATH or of pyenv. Raises FileNotFoundError when there is none."""
    name = f"python{version}"
    pyenv = sorted((Path.home() / ".pyenv" / "versions").glob(f"{version}.*/bin/{name}"))
    for path in [shutil.which(name), *map(str, pyenv)]:
        if path and subprocess.run([path, "--version"], capture_output=True).returncode == 0:
            return path
    raise FileNotFoundError(f"no {name} on the PATH or of pyenv")


class Environment:
    """A virtual environment of Python `version` in `folder`, made where it is missing. `shared` has the folders of CUDA
    packages; everything that is run is written to `log`."""

    def __init__(self, folder: Path, version: str, shared: Path):
        self.folder, self.python, self.shared = folder, folder / "bin" / "python", shared
        self.log = folder.with_name(f"{folder.name}.log")
        shared.mkdir(parents=True, exist_ok=True)
        if not self.python.exists():
            self.run(interpreter(version), "-m", "venv", str(folder))

    def pip(self, *arguments: str, compiler: str | None = None) -> None:
        """Run pip. With the compiler "false" no library is compiled. Raises CalledProcessError with what pip printed."""
        # of the modules that pip would compile, tests import few
        prefix = ["env", "PIP_NO_COMPILE=1", *([] if compiler is None else [f"CC={compiler}"])]
        self.run(*prefix, str(self.python), "-m", "pip", "--disable-pip-version-check", *arguments)

    def install_torch(self, release: str) -> None:
        """Install PyTorch. The CUDA packages that it requires are in a folder that all environments of a release have on their
        path."""
        self.pip("install", "--no-deps", f"torch=={release}")
        code = "import importlib.metadata as m; print(chr(10).join(m.requires('torch')))"
        listed = self.run(str(self.python), "-c", code).splitlines()
        cuda = [line.split(";")[0].strip() for line in listed if line.startswith(("nvidia-", "cuda-toolkit"))]
        folder = self.shared / f"cuda-{release}"
        if cuda and not folder.exists():
            self.pip("install", "--target", f"{folder}.part", *cuda)
            os.replace(f"{folder}.part", folder)
        if cuda:
            (next(self.folder.glob("lib/python*/site-packages")) / "cuda.pth").write_text(f"{folder}\n")

    def run(self, *command: str) -> str:
        """The output of the command. Raises CalledProcessError."""
        done = subprocess.run(command, capture_output=True, text=True, timeout=_LIMIT_S)
        with self.log.open("a", encoding="utf-8") as log:
            log.write(f"$ {' '.join(command)}\n{done.stdout[-2000:]}{done.stderr[-4000:]}\n")
        done.check_returncode()
        return done.stdout


def install(environment: Environment, cell: Cell, clone: Path) -> str:
    """Install the releases of `cell` and the clone; returns pip's refusal of the releases, or ""."""
    environment.install_torch(cell.torch)
    sources = b"".join(file.read_bytes() for file in sorted(clone.glob("verl/**/*.[ch]")))
    libraries = environment.shared / f"libraries-{hashlib.sha256(sources).hexdigest()[:12]}"
    compiled = sorted(libraries.glob("**/*.so"))
    for file in compiled:
        shutil.copy(file, clone / file.relative_to(libraries))
    releases = [f"torch=={cell.torch}", f"transformers=={cell.transformers}"]
    try:
        packages = (*releases, "-e", f"{clone}[gguf,pillow]", "peft", "pytest", "pytest-xdist", "hypothesis")
        environment.pip("install", *packages, compiler="false" if compiled else None)
    except subprocess.CalledProcessError as error:
        refusal = re.search(r"verl\S* \S+ depends on (.*)", error.stdout + error.stderr)
        if refusal is None:
            raise
        environment.pip("install", *releases, "tensordict", "omegaconf", "rich", "psutil", "xxhash", "httpx", "pyarrow")
        environment.pip("install", "--no-deps", "-e", str(clone))
        return f"pip: verl depends on {refusal[1]}"
    for file in clone.glob("verl/**/*.cpython-*.so"):
        library = libraries / file.relative_to(clone).with_name(f"{file.name.partition('.')[0]}.so")
        library.parent.mkdir(parents=True, exist_ok=True)
        shutil.copy(file, library)
    return ""


def tested(environment: Environment, clone: Path) -> Row:
    """The outcomes of the tests of `clone`."""
    report = environment.folder.with_name(f"{environment.folder.name}.xml")
    report.unlink(missing_ok=True)
    variables = {**os.environ, "OMP_NUM_THREADS": "1", "HF_HUB_OFFLINE": "1", "PYTHONPATH": ""}
    with environment.log.open("a", encoding="utf-8") as log:
        command = [environment.python, "-m", "pytest", "-q", "-p", "no:cacheprovider", f"--junitxml={report}", *TESTS]
        subprocess.run(command, cwd=clone, env=variables, stdout=log, stderr=log, timeout=_LIMIT_S)
    return outcomes(report)


def outcomes(report: Path) -> Row:
    """Counts, failures and the distributed arrangements of a JUnit report."""
    row: Row = {"passed": 0, "failed": 0, "skipped": 0, "failures": [], "distributed": {}}
    for test in ET.parse(report).iter("testcase"):
        kinds = {child.tag for child in test}
        state = "failed" if kinds & {"failure", "error"} else "skipped" if "skipped" in kinds else "passed"
        row[state] += 1
        name = test.get("name", "")
        if state == "failed":
            row["failures"].append(f"{test.get('classname')}::{name}"[:120])
        for arrangement, check in DISTRIBUTED.items():
            if name == f"test_two_ranks_equal_one_device[{check}]":
                row["distributed"][arrangement] = state
    return row


def run(cell: Cell, work: Path) -> Row:
    """Make the environment of `cell` in `work` and run its tests."""
    start = time.monotonic()
    clone = work / f"{cell.name}-clone"
    environment = Environment(work / cell.name, cell.python, work)
    shutil.rmtree(clone, ignore_errors=True)
    environment.run("git", "clone", "--quiet", str(ROOT), str(clone))
    refusal = install(environment, cell, clone)
    row: Row = {**cell._asdict(), "date": time.strftime("%Y-%m-%d")}
    if refusal:  # and the last line of `verl train`
        train = [environment.python, "-m", "verl", "train"]
        done = subprocess.run(train, cwd=clone, capture_output=True, text=True, timeout=300)
        row |= {"pip": refusal, "refusal": (done.stderr or done.stdout).strip().splitlines()[-1]}
    else:
        row |= tested(environment, clone)
    return {**row, "seconds": round(time.monotonic() - start)}


def record(row: Row) -> None:
    """Put `row` in the place of an earlier result of its cell."""
    rows = {"-".join(r[field] for field in Cell._fields): r for r in (*results(), row)}
    ordered = [rows[cell.name] for cell in CELLS if cell.name in rows]
    RESULTS.write_text("[\n" + ",\n".join(json.dumps(row) for row in ordered) + "\n]\n", encoding="utf-8")


def results() -> list[Row]:
    return json.loads(RESULTS.read_text(encoding="utf-8")) if RESULTS.exists() else []


def block(rows: list[Row]) -> str:
    """The generated part of the page."""
    lines = ["| PyTorch | transformers | Python | tests | FSDP 2 | TP 2 | Ulysses 2 | date |", "|" + "---|" * 8]
    for row in rows:
        if "refusal" in row:
            tests, arrangements = f"{row['pip']}. `verl train`: {row['refusal']}", ["-"] * len(DISTRIBUTED)
        else:
            tests = f"{row['passed']} passed, {row['failed']} failed, {row['skipped']} skipped"
            arrangements = [row["distributed"].get(name, "not run") for name in DISTRIBUTED]
        cells = [row["torch"], row["transformers"], row["python"], tests, *arrangements, row["date"]]
        lines.append("| " + " | ".join(cells) + " |")
    failures = [
        f"- PyTorch {r['torch']}, Python {r['python']}: `{name}`" for r in rows for name in r.get("failures", ())
    ]
    return "\n".join([*lines, *(["", "Failed:", "", *failures] if failures else [])])


def page() -> str:
    """docs/versions.md with the block of docs/versions.json."""
    before, _, rest = PAGE.read_text(encoding="utf-8").partition(BEGIN)
    return f"{before}{BEGIN}\n\n{block(results())}\n\n{END}{rest.partition(END)[2]}"


def main(argv: list[str] | None = None) -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--work", type=Path, help="where environments are made; none: no cell runs")
    parser.add_argument("--only", nargs="+", metavar="VERSION")
    arguments = parser.parse_args(argv)
    failed = False
    for cell in CELLS if arguments.work else ():
        if arguments.only and not set(arguments.only) & {*cell, cell.name}:
            continue
        try:
            row = run(cell, arguments.work.resolve())
        except FileNotFoundError as error:
            print(f"{cell.name}: {error}; its row stays as it is", flush=True)
            continue
        failed |= bool(row.get("failed"))
        record(row)
        print(cell.name, {name: value for name, value in row.items() if name not in cell._fields}, flush=True)
    PAGE.write_text(page(), encoding="utf-8")
    return int(failed)


if __name__ == "__main__":
    sys.exit(main())
