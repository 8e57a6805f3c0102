"""No process that verl starts imports a module of the current folder, nor takes one of a user's folder for the standard
library's; and signals that a child does not hear."""

import os
import signal
import subprocess
import sys

import pytest

from tests.house.source import files
from tests.slow import slow
from verl.data_proto.samples import ScoreRequest
from verl.parallel.child_processes import blocked_sigterm, is_ending, python_command
from verl.rewards.functions import RewardFunctionSpec
from verl.rewards.pool import RewardPool
from verl.rewards.sandbox import launch

# every module that verl runs in a separate process; without arguments each imports its dependencies, and ends
MODULES = (
    "verl.rewards.worker",
    "verl.rewards.sandbox.reaper",
    "verl.page",
    "verl.rollout.process_main",
    "verl.parallel.child_processes",
    "verl.cli.machine.probes",
    "verl.compat.measure",
    "torch.distributed.run",
)
INSTALLED = ("verl", "torch", "numpy", "yaml", "psutil", "omegaconf", "starlette", "uvicorn", "rich", "flash_attn")


@pytest.fixture
def traps(tmp_path, monkeypatch):
    """The file that lists modules that ran. The current folder has a module of every name that a process may import."""
    folder, ran = tmp_path / "traps", tmp_path / "ran"
    folder.mkdir()
    for name in (*sys.stdlib_module_names, *INSTALLED):
        (folder / f"{name}.py").write_text(f"open({str(ran)!r}, 'a').write('{name} ')\n")
    monkeypatch.chdir(folder)
    return ran


@pytest.mark.parametrize(
    ("module", "safe_path"),
    [slow(module, path, when=path == "1" and module != "verl.page") for module in MODULES for path in ("", "1")],
)
def test_no_process_imports_a_module_of_the_current_folder(traps, module, safe_path):
    environment = {**os.environ, "PYTHONSAFEPATH": safe_path}
    done = subprocess.run(python_command(module), capture_output=True, text=True, timeout=120, env=environment)
    assert not traps.exists(), traps.read_text()
    assert "No module named" not in done.stderr, done.stderr


def test_plain_python_does_import_it(traps):
    """So that the test above would find the fault."""
    subprocess.run([sys.executable, "-m", "json.tool"], input=b"{}", capture_output=True, timeout=120)
    assert traps.exists()


@pytest.mark.parametrize("namespaces", [True, False], ids=["namespaces", "reaper"])
def test_a_reward_function_imports_its_neighbours_but_not_as_the_standard_library(
    traps, tmp_path, monkeypatch, namespaces
):
    if not namespaces:
        monkeypatch.setattr(launch, "namespace_command", lambda *_: ())
    project = tmp_path / "project"
    project.mkdir()
    for name in ("json", "random", "struct"):
        (project / f"{name}.py").write_text(f"open({str(tmp_path / 'ran')!r}, 'a').write('{name} ')\n")
    (project / "answers.py").write_text("RIGHT = 0.75\n")
    (project / "reward.py").write_text(
        "import json, random\nfrom answers import RIGHT\n\n\n"
        "def compute_score(data_source, solution_str, ground_truth, extra_info=None):\n"
        "    return json.loads(str(RIGHT)) + 0 * random.random()\n"
    )
    function = RewardFunctionSpec(str(project / "reward.py"))
    with RewardPool(function, num_workers=1, timeout_s=60, memory_mb=None) as pool:
        (result,) = pool.score_all([ScoreRequest("a", "unit/test", "reply", "gold")])
    assert (result.score, result.error) == (0.75, None)
    assert not traps.exists(), traps.read_text()


def test_a_process_has_the_verl_of_its_parent(tmp_path, monkeypatch):
    """Also where the parent found it in the current folder, and another one is on PYTHONPATH."""
    other = tmp_path / "other"
    (other / "verl").mkdir(parents=True)
    (other / "verl" / "__init__.py").write_text("raise SystemExit('another verl')\n")
    (other / "place.py").write_text("import verl.errors\nprint(verl.errors.__file__)\n")
    monkeypatch.setenv("PYTHONPATH", str(other))
    done = subprocess.run(python_command("place"), capture_output=True, text=True, timeout=120)
    assert done.stdout.strip() == str(files()["verl.errors"]), done.stderr


HEARS = "from verl.parallel.child_processes import unblock_sigterm\nunblock_sigterm()"
# the source of a process that gets SIGTERM, then starts a child and sends it SIGTERM
PROGRAM = """
import os, signal, subprocess, sys
{first}
print("ready", flush=True)
input()
own = subprocess.Popen([sys.executable, "-c", "input()"], stdin=subprocess.PIPE)
own.terminate()
own.communicate(b"\\n", timeout=120)
print(own.returncode)
"""


def start(first):
    process = subprocess.Popen(
        [sys.executable, "-c", PROGRAM.format(first=first)], stdin=subprocess.PIPE, stdout=subprocess.PIPE
    )
    assert process.stdout.readline() == b"ready\n"
    process.send_signal(signal.SIGTERM)
    return process


def test_a_process_and_its_children_do_not_get_sigterm():
    with blocked_sigterm():
        process = start("")
    assert process.communicate(b"\n", timeout=120)[0] == b"0\n"
    ordinary = start("")
    ordinary.communicate(timeout=120)
    assert ordinary.returncode == -signal.SIGTERM


def test_a_process_goes_on_and_its_children_get_sigterm():
    with blocked_sigterm():
        process = start(HEARS)
    assert process.communicate(b"\n", timeout=120)[0] == b"-15\n"
    assert process.returncode == 0


def test_a_process_ends_before_it_is_gone():
    if (pid := os.fork()) == 0:
        os._exit(0)
    os.waitid(os.P_PID, pid, os.WEXITED | os.WNOWAIT)
    assert is_ending(pid)
    os.waitpid(pid, 0)
    assert is_ending(pid)
    assert not is_ending(os.getpid())
