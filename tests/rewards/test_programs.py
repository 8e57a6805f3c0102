"""Programs as answers: their permissions, their limits and their scores."""

import ctypes
import itertools
import json
import os
import socket
import textwrap
import time
from types import SimpleNamespace

import pytest

from verl.errors import RewardError
from verl.rewards import programs
from verl.rewards.programs import ProgramLimits, run_program
from verl.rewards.sandbox import processes
from verl.rewards.sandbox.processes import descendants
from verl.rewards.scorers import code
from verl.rewards.scorers.code import program_in, same_text
from verl.rewards.scorers.route import default_compute_score


@pytest.fixture(autouse=True)
def nothing_left():
    """No test leaves a process, nor this process as the parent of orphans."""
    before = set(descendants(os.getpid()))
    yield
    survivors = set(descendants(os.getpid())) - before
    ctypes.CDLL(None).prctl(36, 0, 0, 0, 0)  # PR_SET_CHILD_SUBREAPER
    assert not survivors


SMALL = ProgramLimits(time_s=1.0, memory_mb=256, max_output_mb=1, max_processes=4)


def test_what_a_program_reads_and_prints():
    output = run_program("import sys\nprint(sys.stdin.read().upper())\nsys.stderr.write('aside')", "abc")
    assert (output.stdout, output.stderr, output.failure) == ("ABC\n", "aside", "")


HOSTILE = {  # source -> words of the failure
    "while True: pass": "longer than 1 s",
    "import signal, time\nsignal.signal(signal.SIGTERM, signal.SIG_IGN)\ntime.sleep(99)": "longer than 1 s",
    "bytearray(100 << 30)": "exit code 1",
    "open('big', 'wb').write(bytes(8 << 20))": "exit code 1",
    "while True: print('x' * 9999)": "exit code 1",
    "import os\nwhile True: os.fork()": "processes",
    "import os\nos.kill(os.getpid(), 11)": "SIGSEGV",
    "raise SystemExit(3)": "exit code 3",
}


@pytest.mark.parametrize("source", HOSTILE, ids=[s.splitlines()[-1][:20] for s in HOSTILE])
def test_a_hostile_program_ends_with_all_that_it_started(source):
    assert HOSTILE[source] in run_program(source, limits=SMALL).failure


def test_a_program_that_grows_while_it_is_counted_is_ended(around):
    """A walk without an end to a fork bomb that is faster gives it all process ids of the machine."""
    around(programs, "descendants", lambda counted, pid, limit=0: range(limit + 1) if limit else counted(pid))
    assert "more than 4 processes" in run_program("import time\ntime.sleep(99)", limits=SMALL).failure


def test_a_slow_machine_has_time_to_end_a_program(monkeypatch):
    """Seconds pass between one look at its processes and the next."""
    seconds = itertools.count(step=2.5)
    slow = SimpleNamespace(monotonic=lambda: next(seconds), sleep=lambda _: time.sleep(0.1))
    monkeypatch.setattr(processes, "time", slow)
    run_program("import os, time\nos.fork() or time.sleep(99)")


def test_a_program_has_no_network_no_keys_and_leaves_nothing(monkeypatch):
    monkeypatch.setenv("WANDB_API_KEY", "0123456789")
    source = textwrap.dedent(
        """
        import os, socket
        print(os.getcwd(), "0123456789" in os.environ.values(), flush=True)
        open("left", "w").write("x")
        for leave_group in (os.setsid, os.setpgrp):
            if not os.fork():
                leave_group()
                print("left the group of what is killed at once")
        socket.create_connection(("127.0.0.1", int(input())), 1)
        """
    )
    with socket.create_server(("127.0.0.1", 0)) as server:
        output = run_program(source, str(server.getsockname()[1]), SMALL)
    folder, sees_keys = output.stdout.split()
    assert sees_keys == "False"
    assert "PermissionError" in output.stderr
    assert not os.path.exists(folder)


ADD = "Here it is:\n```python\n{}\n```\nIt adds."
ADD_FUNCTION = ADD.format("def add(a, b):\n    return a + b")
ADD_PROGRAM = ADD.format("a, b = map(int, input().split())\nprint(a + b)")
PRINTED = {"inputs": ["2 3\n", "4 5\n"], "outputs": ["5\n", "9"]}
CALLED = {"inputs": ["2\n3", [4, 5]], "outputs": ["5", [9]], "fn_name": "add"}
LARGE = {"inputs": [""], "outputs": ["4000"]}
ASSERTED = {"assert_case": ["assert add(2, 3) == 5", "assert add(4, 5) == 9"]}


def score(reply, tests, **kwargs):
    return default_compute_score("apps", reply, tests, **kwargs)


@pytest.mark.parametrize(
    ("reply", "tests", "expected"),
    [
        (ADD_PROGRAM, json.dumps(PRINTED), 1.0),
        (ADD_PROGRAM.replace("a + b", "5"), PRINTED, 0.5),
        (ADD_FUNCTION, CALLED, 1.0),
        (ADD_FUNCTION.replace("a + b", "5"), CALLED, 0.5),
        (ADD.format("class Solution:\n    def add(self, a, b):\n        return a + b"), CALLED, 1.0),
        (ADD_FUNCTION, ASSERTED, 1.0),
        (ADD_FUNCTION, ASSERTED["assert_case"], 1.0),
        (ADD_FUNCTION, "assert add(2, 3) == 5", 1.0),
        (ADD_FUNCTION.replace("a + b", "5"), ASSERTED, 0.5),
        ("```python\nimport os\nos._exit(0)\n```", ASSERTED, 0.0),
        ("```python\nraise SystemExit\n```", ASSERTED, 0.0),
        ("no program at all", PRINTED, 0.0),
        (ADD_FUNCTION.replace("a, b", "a: int, b: Optional[int]"), CALLED, 1.0),  # names of typing without their import
        (ADD.format("a, b = map(int, stdin.read().split())\nprint(reduce(add, (a, b)))"), PRINTED, 1.0),
        (
            ADD.format("from __future__ import annotations\nf = lambda n: n and 1 + f(n - 1)\nprint(f(4000))"),
            LARGE,
            1.0,
        ),
        (ADD.format("print(3999)"), LARGE, 0.0),
        (ADD_FUNCTION, {"inputs": ['"4"\n"2"'], "outputs": ["42"], "fn_name": "add"}, 1.0),
    ],
)
def test_scores_of_programs(reply, tests, expected):
    outcome = score(reply, tests)
    assert (outcome["score"], outcome["acc"]) == (expected, float(expected == 1.0))
    assert bool(outcome["failure"]) == (expected < 1)


def test_a_program_that_hangs_ends_its_tests(around):
    programs_run = []
    around(code, "run_program", lambda run, *arguments: programs_run.append(arguments) or run(*arguments))
    outcome = score("```python\nwhile True: pass\n```", PRINTED, time_limit_s=0.3)
    assert (outcome["score"], outcome["num_tests"]) == (0.0, 2)
    assert "took longer" in outcome["failure"]
    assert len(programs_run) == 1


def test_the_last_python_block_is_the_program():
    assert program_in("```python\na\n```\ntext\n```python\nb\n```\n```\noutput\n```") == "b\n"
    assert program_in("```\na\n```") == "a\n"
    assert program_in("```python\nunfinished") == "unfinished"
    assert program_in("a = 1") == "a = 1"
    for language in ("python3", "Python", " python", "py", "{.python}", "cpp"):
        assert program_in(f"```{language}\na\n```\nIt adds.".replace("\n", "\r\n")) == "a\n"
    assert program_in("```python\na = '```b```'\n```\n") == "a = '```b```'\n"


def test_outputs_agree_but_for_space_and_the_last_digits():
    assert same_text("1 2 \n3\n\n", "1 2\n3")
    assert same_text("0.3333333", "0.33333334")
    assert same_text("5.0 -0 1e3", "5 0 1000")
    assert not same_text("123456788", "123456789")  # within 1e-5 of it
    assert not same_text("nan", "1")
    assert not same_text("yes", "no")
    assert not same_text("1\n2", "1")


def test_asserts_that_only_define_functions_are_no_tests():
    with pytest.raises(RewardError, match="only define functions"):
        score(ADD_FUNCTION, "def check(candidate):\n    assert candidate(2, 3) == 5")
