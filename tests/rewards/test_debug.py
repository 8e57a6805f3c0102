"""`reward.debug`: reward calls in the process of the run, so that a debugger reaches them."""

import bdb
import dataclasses
import os
import pty
import subprocess
import sys

import pytest

from tests.rewards.test_hostile import overrides
from tests.rewards.test_pool import request
from verl.config import CustomRewardFunctionConfig, RewardConfig
from verl.rewards.managers import build_reward_manager

pytestmark = pytest.mark.seed("A1")

SOURCE = """
import bdb, os


def compute_score(data_source, solution_str, ground_truth, extra_info=None):
    if solution_str == "raise":
        raise ValueError("no number")
    if solution_str == "leave":
        raise bdb.BdbQuit
    breakpoint()
    return {"score": float(solution_str), "pid": os.getpid()}
"""


def test_a_reward_function_is_called_in_this_process(tmp_path, monkeypatch):
    stops = []
    monkeypatch.setattr(sys, "breakpointhook", lambda: stops.append(sys._getframe(1).f_locals["solution_str"]))
    (tmp_path / "reward.py").write_text(SOURCE)
    function = dataclasses.replace(CustomRewardFunctionConfig(), path=str(tmp_path / "reward.py"))
    config = dataclasses.replace(RewardConfig(), debug=True, default_score=-1.0, custom_reward_function=function)
    manager = build_reward_manager(config, max_response_length=8)
    manager.start(["unit/test"])
    good, bad, huge = manager.score([request("0.5"), request("raise"), request("1e39")])
    assert stops == ["0.5", "1e39"]
    assert (good.score, good.parts) == (0.5, {"pid": os.getpid()})
    assert bad.score == huge.score == -1.0
    assert "raised ValueError: no number (line" in bad.error
    assert "max_abs_score" in huge.error
    with pytest.raises(bdb.BdbQuit):
        manager.score([request("leave")])
    manager.close()


@pytest.mark.slow
def test_a_person_at_a_terminal_debugs_a_run(tiny_llama, tmp_path):
    """pytest -m slow tests/rewards/test_debug.py: pdb in a reward function of `verl train`, with the live bar at its side."""
    run = overrides(tmp_path, tiny_llama)
    (tmp_path / "reward.py").write_text(
        "calls = []\n"
        "def of_row(data_source, solution_str, ground_truth, extra_info=None, api_key=None):\n"
        "    calls.append(1)\n"
        "    if len(calls) == 3:\n"
        "        breakpoint()\n"
        "    return 0.25\n"
    )
    terminal, inner = pty.openpty()
    try:
        process = subprocess.Popen(
            [sys.executable, "-m", "verl", "train", *run, "reward.debug=True", "trainer.logger=[console]"],
            stdin=inner,
            stdout=inner,
            stderr=inner,
            env={**os.environ, "TERM": "xterm"},
        )
        os.close(inner)
        said = _read_until(terminal, b"(Pdb) ")
        os.write(terminal, b"p 'calls so far:', len(calls) * 14\n")
        said += _read_until(terminal, b"(Pdb) ")
        os.write(terminal, b"c\n")
        said += _read_until(terminal, None)
        assert process.wait(120) == 0, said.decode()
        assert b"('calls so far:', 42)" in said
        assert b"-> return 0.25" in said
    finally:
        process.kill()
        os.close(terminal)


def _read_until(terminal, end):
    """The output of the process up to `end`; None: up to the end of the process."""
    output = b""
    while end is None or not output.endswith(end):
        try:
            output += os.read(terminal, 4096)
        except OSError:  # the other side is closed
            break
    return output
