"""Cases of parametrized tests that only the slow run takes."""

import itertools

import pytest


def slow(*values, when=True, **more):
    """`pytest.param(*values)`, left to `-m slow` if `when` holds."""
    return pytest.param(*values, marks=pytest.mark.slow if when else (), **more)


def each_value(*axes):
    """The product of `axes`, of which the default run takes each value of an axis with some value of the others."""
    number_of_cases = max(map(len, axes))
    chosen = [tuple(case % len(axis) for axis in axes) for case in range(number_of_cases)]
    return [
        slow(*(axis[number] for axis, number in zip(axes, numbers, strict=True)), when=numbers not in chosen)
        for numbers in itertools.product(*(range(len(axis)) for axis in axes))
    ]
