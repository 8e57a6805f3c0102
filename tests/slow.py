"""Cases of parametrized tests that only the slow run takes."""

import pytest


def slow(*values, when=True, **more):
    """`pytest.param(*values)`, left to `-m slow` where `when` holds."""
    return pytest.param(*values, marks=pytest.mark.slow if when else (), **more)
