"""Processor seconds of each test file; other work on the machine changes them less than the clock:

    python -m pytest -n 2 --dist loadfile -p tests.processor_time

Counted are the test's process, the processes that it started and that have ended, and those forked for it (forked.py). Not
counted are the cluster of Ray, what left its session, and what each test process imports before its first test.
"""

import multiprocessing.forkserver
import os
from collections import Counter
from pathlib import Path

import pytest

BEGAN = pytest.StashKey[float]()


def spent():
    times = os.times()
    return sum(times[:4]) + _spent_by_forks()


def _spent_by_forks():
    server = multiprocessing.forkserver._forkserver._forkserver_pid
    try:
        fields = Path(f"/proc/{server}/stat").read_text().rpartition(")")[2].split()
    except OSError:  # there is no server yet, or no /proc
        return 0.0
    return sum(map(int, fields[11:15])) / os.sysconf("SC_CLK_TCK")


@pytest.hookimpl(tryfirst=True)
def pytest_runtest_setup(item):
    item.stash[BEGAN] = spent()


@pytest.hookimpl(hookwrapper=True)
def pytest_runtest_makereport(item, call):
    report = yield
    if call.when == "teardown":
        report.get_result().user_properties.append(("processor_s", spent() - item.stash[BEGAN]))


def pytest_terminal_summary(terminalreporter):
    seconds = Counter()
    for reports in terminalreporter.stats.values():
        for report in reports:
            for name, value in getattr(report, "user_properties", ()):
                if name == "processor_s":
                    seconds[report.nodeid.partition("::")[0]] += value
    terminalreporter.section("processor seconds")
    terminalreporter.line(f"{sum(seconds.values()):8.1f} all")
    for file, value in seconds.most_common(25):
        terminalreporter.line(f"{value:8.1f} {file}")
