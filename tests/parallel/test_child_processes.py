"""Ties between a process and its parent: signals that it does not hear."""

import signal
import subprocess
import sys

from verl.parallel.child_processes import blocked_sigterm

HEARS = "from verl.parallel.child_processes import unblock_sigterm\nunblock_sigterm()"
# the source of a process that gets SIGTERM, then starts a child and sends it SIGTERM
PROGRAM = """
import os, signal, subprocess, sys
{first}
print("ready", flush=True)
input()
own = subprocess.Popen([sys.executable, "-c", "input()"], stdin=subprocess.PIPE)
own.terminate()
own.communicate(b"\\n", timeout=20)
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
    assert process.communicate(b"\n", timeout=30)[0] == b"0\n"
    ordinary = start("")
    ordinary.communicate(timeout=30)
    assert ordinary.returncode == -signal.SIGTERM


def test_a_process_goes_on_and_its_children_get_sigterm():
    with blocked_sigterm():
        process = start(HEARS)
    assert process.communicate(b"\n", timeout=30)[0] == b"-15\n"
    assert process.returncode == 0
