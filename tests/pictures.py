"""Runs without the picture of their learning curve, which takes as long as a tiny run.

Pictures are made by tests/tracking/test_console.py, by the runs of tests/examples, and by those that go through the command
line in a process of their own.
"""

from verl.tracking import plot


def leave_out(patch):
    """`patch` is a pytest.MonkeyPatch."""
    patch.setattr(plot, "_draw", lambda *_: None)
