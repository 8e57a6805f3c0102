"""`verl train` supervises its run: failures with and without a restart, signals, hangs, and nothing left behind."""

import contextlib
import os
import pty
import re
import signal
import subprocess
import sys

import pytest

from tests.json_lines import read_lines, write_lines
from tests.processes import is_alive, wait_until
from tests.runtime.ranks import ROOT, end_tree


class Supervised:
    """`python -m tests.cli.supervised KIND` in its own run folder."""

    def __init__(self, folder, kind, *changes, **popen):
        self.folder = folder
        model = folder.parent / "model"
        model.mkdir(exist_ok=True)
        (model / "config.json").write_text("{}")
        settings = [
            f"actor_rollout_ref.model.path={model}",
            f"trainer.default_local_dir={folder}",
            "trainer.restart_backoff_s=0.02",
            *changes,
        ]
        environment = {k: v for k, v in os.environ.items() if k not in ("RANK", "WORLD_SIZE", "TORCHELASTIC_RUN_ID")}
        pipes = {"stdin": subprocess.PIPE, "stdout": subprocess.PIPE, "stderr": subprocess.STDOUT}
        self.process = subprocess.Popen(
            [sys.executable, "-m", "tests.cli.supervised", kind, *settings],
            cwd=ROOT, env=environment, **{**pipes, **popen},
        )  # fmt: skip

    def end(self, said=b""):
        """(exit code, output)."""
        output, _ = self.process.communicate(said, timeout=120)
        return self.process.returncode, (output or b"").decode()

    def attempts(self):
        """(process id, resume mode, checkpoint) of each."""
        file = self.folder / "attempts"
        return [line.split() for line in file.read_text().splitlines()] if file.exists() else []

    def events(self):
        return read_lines(self.folder / "events.jsonl")


@pytest.fixture
def supervised(tmp_path):
    started = []

    def start(kind, *changes, **popen):
        started.append(Supervised(tmp_path / "run", kind, *changes, **popen))
        return started[-1]

    yield start
    for one in started:
        end_tree(one.process.pid)


def test_a_good_run_has_its_input_and_output(supervised):
    run = supervised("good")
    assert run.end(b"well\n") == (0, "trained well\n")
    assert not (run.folder / "events.jsonl").exists()


def test_a_run_that_has_ended_is_not_restarted(supervised):
    """Its restart would wait for a cluster that is gone."""
    run = supervised("dies_behind_its_end")
    code, said = run.end()
    assert (code, len(run.attempts())) == (0, 1), said
    assert "taken all of its steps. Its process then ended with exit code 1 and no error" in said
    (run.folder / "summary.json").unlink()
    (run.folder / "fails").write_text("")
    again = supervised("dies_behind_its_end")
    assert (again.end()[0], len(again.attempts())) == (0, 3)


def test_a_lost_raylet_is_named(supervised):
    code, said = supervised("loses_its_raylet").end()
    assert code == 0, said
    assert re.search(r"The run ended in step 2 \(.*\) with the end of Ray's raylet \(pid \d+\), without which", said), (
        said
    )


def test_a_crash_is_gone_on_from(supervised):
    run = supervised("killed_once")
    code, said = run.end()
    assert code == 0
    assert "The run ended in step 3 (gen) with SIGKILL. It resumes from its start in 0.02 s (restart 1 of 3)." in said
    assert len(run.attempts()) == 2
    (event,) = run.events()
    assert (event["event"], event["step"], event["phase"], event["cause"], event["code"]) == (
        "restarted", 3, "gen", "SIGKILL", 137,
    )  # fmt: skip


def test_a_new_checkpoint_is_a_new_beginning(supervised):
    """Five crashes, each after a checkpoint: never too many. A run that was to start afresh resumes from its own."""
    run = supervised("saves_and_dies", "trainer.max_restarts=1", "trainer.resume_mode=disable")
    code, said = run.end()
    assert code == 0, said
    assert said.count("(restart 1 of 1)") == 5
    modes = [(mode, path.rpartition("/")[2]) for _, mode, path in run.attempts()]
    assert modes == [("disable", "None"), *(("resume_path", f"global_step_{n}") for n in range(1, 6))]


def test_the_same_end_twice_is_enough(supervised):
    run = supervised("always_killed")
    code, said = run.end()
    assert code == 128 + signal.SIGKILL
    assert "twice in a row in the same way, last in step 2 (gen) with SIGKILL. It is not restarted" in said
    assert "memory" in said
    assert [event["event"] for event in run.events()] == ["restarted", "gave up"]


@pytest.mark.parametrize(
    ("program", "changes", "expected_code", "num_attempts", "words"),
    [
        (
            "killed_elsewhere", ["trainer.max_restarts=2"], 137, 3,
            ["3 times without a new checkpoint, last in step 3 (gen)"],
        ),
        # an error with another process id in it is the same error
        ("loses_a_rank", [], 10, 2, ["twice in a row", "WorkerLostError: Rank 1 (process"]),
        ("loses_its_folder", [], 137, 0, ["It is not restarted", "was replaced"]),
    ],
)  # fmt: skip
def test_restarts_end(supervised, program, changes, expected_code, num_attempts, words):
    run = supervised(program, *changes)
    code, said = run.end()
    assert code == expected_code
    assert len(run.attempts()) == num_attempts
    assert all(word in said for word in words), said


def test_a_bug_is_shown_and_tried_once_more(supervised):
    run = supervised("bug_once")
    code, said = run.end()
    assert code == 0
    assert "supervised.py, line" in said  # code of ours here, and of the user's for the command line
    assert "raised ZeroDivisionError: in the deep. The file is not part of verl; correct it." in said
    assert run.events()[0]["cause"] == "ZeroDivisionError: in the deep"


@pytest.mark.parametrize(
    ("program", "code", "said"),
    [
        ("bad_input", 2, "verl train: A key is wrong. Set another.\n"),
        # stopped before it handles signals, as the page stops a run that loads its data
        ("is_asked_early", 128 + signal.SIGTERM, ""),
    ],
)
def test_an_end_that_is_no_crash_is_not_tried_again(supervised, program, code, said):
    run = supervised(program)
    assert run.end() == (code, said)
    assert len(run.attempts()) == 1


@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM])
def test_a_stop_goes_to_the_run_and_is_not_a_crash(supervised, number):
    run = supervised("stops_when_asked")
    assert run.process.stdout.readline() == b"READY\n"
    run.process.send_signal(number)
    code, said = run.end(b"\n")
    assert (code, said) == (130, f"read \nverl train: Stopped by {number.name}.\n")
    assert len(run.attempts()) == 1


def test_ctrl_c_in_a_terminal_comes_once_and_input_goes_to_the_run(supervised):
    ours, theirs = pty.openpty()
    run = supervised(
        "stops_when_asked", stdin=theirs, stdout=theirs, stderr=theirs, start_new_session=True,
        preexec_fn=lambda: __import__("fcntl").ioctl(0, __import__("termios").TIOCSCTTY, 0),
    )  # fmt: skip
    os.close(theirs)
    said = b""

    def read(word):
        nonlocal said
        while word not in said:
            said += os.read(ours, 1000)

    read(b"READY")
    os.write(ours, b"hello\n")
    read(b"read hello")
    os.write(ours, b"\x03")
    read(b"Stopped by SIGINT.")
    assert run.process.wait(timeout=120) == 130
    os.close(ours)


def test_a_hang_is_ended_with_its_stack(supervised):
    run = supervised("hangs", "trainer.hang_timeout_s=0.25")
    code, said = run.end()
    assert code == 9
    assert "in step 2 (save_checkpoint) with a hang" in said
    assert re.search(
        r"a hang: save_checkpoint took more than trainer.hang_timeout_s=0.25 s, and it was in \w+ \([\w.]+:\d+\).* < "
        r"write_checkpoint \(supervised.py:\d+\) < hangs", said
    ), said  # fmt: skip
    assert "raise trainer.hang_timeout_s" in said
    assert "twice in a row" in said
    assert "write_checkpoint" in (run.folder / "logs" / "stacks_rank_0.txt").read_text()


def test_a_breakpoint_is_no_hang(supervised):
    run = supervised("at_a_breakpoint", "trainer.hang_timeout_s=1")
    run.process.stdin.write(b"self.heart.start()\n")
    run.process.stdin.flush()
    dump = run.folder / "logs" / "stacks_rank_0.txt"

    def has_looked():
        with contextlib.suppress(FileNotFoundError):  # a file of stacks is replaced by the next one
            return "pdb.py" in dump.read_text()

    assert wait_until(has_looked), "the supervisor took no look"
    code, said = run.end(b"(self.folder / 'heartbeat.json').unlink()\nc\n")
    assert code == 0, said
    assert len(run.attempts()) == 1


def test_nothing_is_left_of_a_run_whose_supervisor_is_killed(supervised):
    run = supervised("stops_when_asked")
    assert run.process.stdout.readline() == b"READY\n"
    run.process.kill()
    assert wait_until(lambda: not is_alive(run.attempts()[0][0])), "the run did not end"


def test_what_a_crash_leaves_behind_is_ended_before_the_restart(supervised):
    run = supervised("leaves_children")
    assert run.end()[0] == 0
    assert not is_alive((run.folder / "child").read_text())


def test_without_restarts_there_is_no_second_process(supervised):
    run = supervised("always_killed", "trainer.max_restarts=0")
    assert run.end()[0] == -signal.SIGKILL
    assert int(run.attempts()[0][0]) == run.process.pid


def test_crashes_are_shown(tmp_path, verl):
    (tmp_path / "config.yaml").write_text("{}")
    rows = [
        {"time": 0, "event": "restarted", "step": 3, "phase": "gen", "cause": "SIGKILL"},
        {"time": 0, "event": "gave up", "step": 3, "phase": "gen", "cause": "SIGKILL"},
    ]
    write_lines(tmp_path / "events.jsonl", rows)
    verl.ends(
        0, "show", tmp_path, words=["restarted 1 time after a crash; then it gave up", "in step 3 (gen): SIGKILL"]
    )
