"""Spin time of torch's idle OpenMP threads. Torch-free: the runtime reads it once, when torch is imported."""

from __future__ import annotations

import os
import sys

# Threads that sleep between two operators cost small steps half their speed. Threads that spin for milliseconds take the
# cores of another process: two generations side by side on two cores fell to a tenth. So they spin for some microseconds.
SPIN_COUNT = "1000"
_VARIABLES = ("GOMP_SPINCOUNT", "OMP_WAIT_POLICY")


def spin_briefly() -> bool:
    """Set the environment so that torch's threads spin briefly and then sleep, unless the user has set how they wait. Returns
    whether a setting is in force: False where torch is imported already, without one."""
    if any(name in os.environ for name in _VARIABLES):
        return True
    if "torch" in sys.modules:
        return False
    os.environ["GOMP_SPINCOUNT"] = SPIN_COUNT
    return True
