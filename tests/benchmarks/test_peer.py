"""Measured processes: answers, failures, deadlines, and that nothing outlives its parent."""

import os
import signal
import subprocess
import sys
import time

import pytest
from peer import Peer, PeerFailed

from tests.benchmarks.conftest import FOLDERS
from tests.processes import is_alive, wait_until

ECHO = """
import os, subprocess, sys, time
from child import serve

def spin(seconds):
    until = time.process_time() + seconds
    while time.process_time() < until:
        pass
    return {}

def grandchild(code="import time; time.sleep(60)"):
    return {"pid": subprocess.Popen([sys.executable, "-c", code]).pid}

print("this is the log", flush=True)
serve({
    "build": lambda **a: {"got": a, "print": print("noise on stdout")},
    "break": lambda: 1 / 0,
    "die": lambda: os._exit(3),
    "hang": lambda: time.sleep(60),
    "spin": spin,
    "grandchild": grandchild,
})
"""


@pytest.fixture
def start(tmp_path):
    script = tmp_path / "echo.py"
    script.write_text(ECHO)
    peers = []

    def make():
        peers.append(Peer("echo", str(script), log=tmp_path / "echo.log"))
        return peers[-1]

    yield make
    for peer in peers:
        peer.close()


def test_answers_carry_results_and_what_was_used(start):
    peer = start()
    peer.build(20.0, x=1, y=["a"])
    assert peer.facts["got"] == {"x": 1, "y": ["a"]}
    assert "cpu_s" not in peer.facts
    answer = peer.ask("spin", 20.0, seconds=0.05)
    assert answer["peak_rss_bytes"] > 1e6
    assert answer["cpu_s"] - answer["cpu_before_s"] >= 0.05


def test_what_the_process_started_counts_too(start):
    peer = start()
    peer.ask("grandchild", 20.0, code="while True: pass")

    def used():
        time.sleep(0.2)
        used.answer = peer.ask("build", 20.0)
        return peer.idle_share > 0

    assert wait_until(used)
    answer = used.answer
    assert answer["children_peak_rss_bytes"] > 1e6


def test_an_idle_process_uses_no_processor(start):
    peer = start()
    peer.build(20.0)
    time.sleep(0.3)
    peer.ask("spin", 20.0, seconds=0.2)
    assert peer.idle_share < 0.05


@pytest.mark.parametrize(
    ("command", "limit_s", "message"),
    [
        ("break", 20.0, "failed in 'break': ZeroDivisionError"),
        ("die", 20.0, "ended in 'die'"),
        ("hang", 0.3, "did not answer 'hang' within 0 s"),
    ],
)
def test_failures_say_what_and_show_the_log(start, command, limit_s, message):
    peer = start()
    peer.build(20.0)
    with pytest.raises(PeerFailed, match=message) as caught:
        peer.ask(command, limit_s)
    assert "this is the log" in str(caught.value)


def test_closing_ends_what_the_process_started(start):
    peer = start()
    pid = peer.ask("grandchild", 20.0)["pid"]
    assert is_alive(pid)
    peer.close()
    assert wait_until(lambda: not is_alive(pid))
    peer.close()  # a second time is harmless


def test_a_process_dies_with_its_parent(tmp_path):
    script = tmp_path / "echo.py"
    script.write_text(ECHO)
    parent = (
        "import sys, time\nfrom pathlib import Path\nfrom peer import Peer\n"
        f"peer = Peer('echo', {str(script)!r}, log=Path({str(tmp_path / 'log')!r}))\n"
        "peer.build(20.0)\nprint(peer._process.pid, flush=True)\ntime.sleep(60)\n"
    )
    process = subprocess.Popen(
        [sys.executable, "-c", parent],
        stdout=subprocess.PIPE,
        env={**os.environ, "PYTHONPATH": os.pathsep.join(FOLDERS)},
    )
    pid = int(process.stdout.readline())
    assert is_alive(pid)
    process.send_signal(signal.SIGKILL)
    process.wait(120)
    process.stdout.close()
    assert wait_until(lambda: not is_alive(pid))
