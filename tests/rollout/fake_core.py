"""An engine for tests of verl.rollout.process."""

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
