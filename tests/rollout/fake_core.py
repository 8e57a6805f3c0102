"""An engine for tests of verl.rollout.process; it must start quickly, so it imports no torch."""

import os
import signal
import sys
import time

from verl.errors import ModelError


class FakeEngine:
    def __init__(self, setup):
        self.setup = setup

    def add(self, first, second):
        return first + second

    def refuse(self):
        raise ModelError("This does not fit.")

    def count(self, number, pause_s, report):
        for i in range(number):
            time.sleep(pause_s)
            report.alive()
            if i % 2 == 0:
                report([i, 0.1 + i])
        return {"counted": number}

    def hang(self):
        time.sleep(600)

    def die(self):
        print("the last thing that was said", file=sys.stderr, flush=True)
        os.kill(os.getpid(), signal.SIGKILL)

    def stumble(self):
        raise ZeroDivisionError("a bug")


def start(setup):
    if setup.get("refuse"):
        raise ModelError("It cannot start.")
    return FakeEngine(setup)
