"""Scores of countdown, and of knights and knaves, as the forks that train on them give them."""

import pytest

from verl.errors import DataError
from verl.rewards.scorers.puzzles import equation_value
from verl.rewards.scorers.route import check_truth, default_compute_score

TARGET = {"target": 24, "numbers": [4, 6, 1]}
ROLES = {"solution_text_format": "(1) Zoey is a knight\n(2) Oliver is a knave"}


@pytest.mark.parametrize(
    ("reply", "score"),
    [
        ("<think>x</think><answer>4 * 6 * 1</answer>", 1.0),
        ("<answer>(4*6)/1 = 24</answer>", 1.0),
        ("<answer>1 + 2</answer> no: <answer>6*4*1</answer>", 1.0),
        ("<answer>4 * 6</answer>", 0.1),  # a number is left out
        ("<answer>4 * 6 * 1 * 1</answer>", 0.1),
        ("<answer>4 + 6 + 1</answer>", 0.1),
        ("<answer>4 ** 6 * 1</answer>", 0.1),
        ("<answer>__import__('os')</answer>", 0.1),
        ("<answer>4 / (6 - 6) * 1</answer>", 0.1),
        ("4 * 6 * 1", 0.0),
        ("", 0.0),
    ],
)
def test_countdown(reply, score):
    assert default_compute_score("countdown", reply, TARGET) == score


def test_an_equation_is_bounded():
    assert equation_value("9" * 19) is None
    assert equation_value("(" * 400 + "1" + ")" * 400) is None
    assert equation_value("1+" * 600 + "1") is None
    assert equation_value("7/2 - -1") == (pytest.approx(4.5), [7, 2, 1])


@pytest.mark.parametrize(
    ("reply", "score"),
    [
        ("<think>a</think><answer>(1) Zoey is a knight\n(2) Oliver is a knave</answer>", 3.0),
        ("a</think><answer>Oliver is a KNAVE and Zoey is a knight.</answer>", 3.0),  # the prompt began the thoughts
        ("<think>a</think><answer>Zoey is a knave, Oliver is a knave</answer>", -0.5),
        ("<think>a</think><answer>Zoey is a knight</answer>", -1.0),
        ("<answer>Zoey is a knight, Oliver is a knave</answer>", -3.0),
        ("<think>a</think><answer>b</answer><answer>Zoey is a knight</answer>", -3.0),
        ("", -3.0),
    ],
)
def test_knights_and_knaves(reply, score):
    assert default_compute_score("kk_logic", reply, ROLES) == score


@pytest.mark.parametrize(
    ("source", "truth"),
    [
        ("countdown", "24"),
        ("countdown", {"target": 24}),
        ("countdown", {"target": "x", "numbers": [1]}),
        ("countdown", {"target": 24, "numbers": []}),
        ("kk_logic", "Zoey is a knight"),
        ("kk_logic", {"solution_text_format": "nothing"}),
    ],
)
def test_reference_answers_of_another_form(source, truth):
    check_truth("countdown", TARGET)
    check_truth("kk_logic", ROLES)
    with pytest.raises(DataError, match="ountdown|Knights"):
        check_truth(source, truth)
