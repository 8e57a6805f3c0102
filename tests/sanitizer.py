"""Tests of compiled kernels run again in a build that checks each access to memory."""

import os
import subprocess
import sys

import pytest

from tests.commands import ran


def run_checked(source, folder, code, *arguments):
    """The output of `code` in a process with gcc's address sanitizer: its arguments are a build of `source`, then `arguments`.
    Skips the test without such a gcc."""
    built = folder / "checked.so"
    flags = ["-O1", "-g", "-std=gnu11", "-ffp-contract=off", "-fsanitize=address", "-shared", "-fPIC", "-pthread"]
    compiled = subprocess.run(["gcc", *flags, str(source), "-o", str(built), "-lm"], capture_output=True, text=True)
    if compiled.returncode:
        pytest.skip(f"gcc with an address sanitizer is needed: {compiled.stderr[-200:]}")
    runtime = subprocess.run(["gcc", "-print-file-name=libasan.so"], capture_output=True, text=True).stdout.strip()
    environment = {**os.environ, "LD_PRELOAD": runtime, "ASAN_OPTIONS": "detect_leaks=0:handle_segv=0"}
    command = [sys.executable, "-c", code, str(built), *arguments]
    done = ran(*command, env=environment, timeout=900)
    return done.stdout
