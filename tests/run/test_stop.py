"""A requested stop: of a run that stops in time, and of a run that waits for something that does not end."""

import json
import os

import pytest

from tests.forked import run_forked
from verl.errors import DeadlineError

STOP = """
import logging, os, signal, sys, threading
from pathlib import Path
from verl.run.loop import StopRequested, StopSignal

logging.basicConfig()
with StopSignal(Path(sys.argv[1]), float(sys.argv[2])) as stop:
    os.kill(os.getpid(), signal.SIGTERM)
    os.kill(os.getpid(), signal.SIGTERM)  # a group gets it, and then its supervisor hands it on
    try:
        stop.check()
    except StopRequested:
        sys.argv[3] == "hangs" and threading.Event().wait()  # in place of a save
for thread in threading.enumerate():
    if thread.name == "stop-deadline":  # it ends with the stop, long before its limit
        thread.join()
print("ended", flush=True)
"""


@pytest.fixture
def stopped(tmp_path):
    (tmp_path / "heartbeat.json").write_text(
        json.dumps({"pid": 1, "host": "here", "step": 3, "phase": "save_checkpoint", "since": 0.0})
    )
    (tmp_path / "stop.py").write_text(STOP)

    def run(limit_s, save):
        return run_forked(tmp_path / "stop.py", tmp_path, limit_s, save, env=os.environ, timeout_s=120)

    return run


def test_a_run_that_does_not_stop_is_ended_with_a_sentence(stopped):
    code, said = stopped(0.3, "hangs")
    assert code == DeadlineError.exit_code
    assert "asked to stop 0.3 s ago (trainer.stop_timeout_s) and is still in step 3 (save_checkpoint)" in said
    assert "run the same command again to resume" in said
    assert said.count("Stopping after this phase and saving, within 0.3 s") == 1


@pytest.mark.parametrize("limit_s", [100, 0])
def test_a_run_that_stops_in_time_is_not_killed(limit_s, stopped):
    code, said = stopped(limit_s, "ends")
    assert (code, said.strip().splitlines()[-1]) == (0, "ended")
