"""Verdicts of judges that reply as the test says: both orders, ties, rubrics, and replies that are asked for once."""

import json
import math
import os

import pytest
from hypothesis import given
from hypothesis import strategies as st

from verl.errors import ConfigError
from verl.roles.verdicts import (
    PAIR_TEMPLATE,
    RUBRIC_TEMPLATE,
    CachedReplies,
    Criterion,
    PairVerdict,
    compare_pairs,
    fill,
    read_rubric,
    rubric_scores,
    verdict_metrics,
    verdict_of,
)

TEMPLATE = "{prompt}|{first}|{second}"


def longer_wins(questions):
    """An unbiased judge."""
    verdicts = []
    for question in questions:
        _, first, second = question.split("|")
        verdicts.append("[[C]]" if len(first) == len(second) else "[[A]]" if len(first) > len(second) else "[[B]]")
    return verdicts


def first_wins(questions):
    """A judge with a position bias."""
    return ["The better one is A." for _ in questions]


@pytest.mark.parametrize(
    ("reply", "verdict"),
    [
        ("[[A]]", 1),
        ("A has more detail, but [[B]]", -1),
        ("first [[A]], on reflection [[ C ]]", 0),
        ("[[tie]]", 0),
        ("I prefer response B.", -1),
        ("It is a tie", 0),
        ("Response B is better, since A is wrong.", None),
        ("Better: BB, because", None),
        ("", None),
    ],
)
def test_a_verdict_is_read_from_the_reply(reply, verdict):
    assert verdict_of(reply) == verdict


def test_both_orders_agree_for_an_unbiased_judge():
    verdicts = compare_pairs(
        longer_wins, TEMPLATE, [("p", "long answer", "short"), ("p", "no", "yes"), ("p", "ab", "cd")]
    )
    assert [v.preference for v in verdicts] == [1.0, -1.0, 0.0]
    assert verdict_metrics(verdicts) == pytest.approx(
        {"order_agreement": 1.0, "first_shown": 0.5, "tie": 1 / 3, "unusable": 0.0}
    )


def test_a_position_bias_becomes_a_tie_and_is_measured():
    (verdict,) = compare_pairs(first_wins, TEMPLATE, [("p", "x", "y")])
    assert (verdict.straight, verdict.swapped, verdict.preference, verdict.agrees) == (1, -1, 0.0, False)
    metrics = verdict_metrics([verdict])
    assert (metrics["order_agreement"], metrics["first_shown"]) == (0.0, 1.0)


def test_a_reply_without_a_verdict_leaves_the_other_order():
    verdict = PairVerdict(None, 1)
    assert (verdict.preference, verdict.agrees) == (1.0, None)
    assert PairVerdict(None, None).preference is None
    assert verdict_metrics([verdict])["unusable"] == 0.5
    assert all(math.isnan(value) for value in verdict_metrics([]).values())


VERDICTS = st.sampled_from(["[[A]]", "[[B]]", "[[C]]", "no idea"])


@given(st.dictionaries(st.sampled_from(["p|x|y", "p|y|x"]), VERDICTS, min_size=2))
def test_exchanging_the_responses_negates_the_preference(replies):
    def ask(questions):
        return [replies[q] for q in questions]

    (one,), (other,) = compare_pairs(ask, TEMPLATE, [("p", "x", "y")]), compare_pairs(ask, TEMPLATE, [("p", "y", "x")])
    assert one.agrees == other.agrees
    assert one.preference == (None if other.preference is None else -other.preference)


def test_a_place_in_an_answer_is_no_place():
    assert fill(TEMPLATE, prompt="{first}", first="{second} {x}", second="s") == "{first}|{second} {x}|s"
    assert all(place in PAIR_TEMPLATE for place in ("{prompt}", "{first}", "{second}"))
    assert all(place in RUBRIC_TEMPLATE for place in ("{prompt}", "{response}", "{criterion}"))


def test_a_rubric_weighs_its_criteria():
    rubric = [Criterion("length", "long", 3.0), Criterion("tone", "kind")]

    def ask(questions):
        assert len(questions) == len(set(questions)) == 4
        return [
            {"a long": "4 of 10: 4", "a kind": "7-8 (out of 10)", "b long": "9" * 500, "b kind": "2"}[q]
            for q in questions
        ]

    rows = [("p", "a", "t"), ("p", "b", "t"), ("p", "a", "t")]
    first, second, again = rubric_scores(ask, "{response} {criterion}", rubric, rows)
    assert first == again == {"length": 4.0, "tone": 8.0, "score": (3 * 4 + 8) / 4}
    assert second["tone"] == 2.0
    assert math.isnan(second["score"])


def test_a_rubric_is_read_and_checked(tmp_path):
    file = tmp_path / "rubric.yaml"
    file.write_text("- {name: true_facts, question: Is it true?, weight: 2}\n- {name: tone, question: Is it kind?}\n")
    assert read_rubric(file) == [Criterion("true_facts", "Is it true?", 2.0), Criterion("tone", "Is it kind?")]
    for text, says in (
        ("[]", "no list of criteria"),
        ("- {name: a}", "criterion 1 must have a name and a question"),
        ("- {name: a, question: b, weight: 0}", "weight 0; it must be a number above 0"),
        ("- {name: a, question: b}\n- {name: a, question: c}", "same name"),
        ("- {name: a, question: b, weight: 1.0e+308}\n- {name: c, question: b, weight: 1.0e+308}", "of at most 1e.06"),
        ("- {name: score, question: b}", "another name than score"),
        ("- {name: a, question: null}", "must have texts as name and question"),
        ("[" * 5000, "is nested more than 50 deep"),
        (
            "a: &a [x, x, x, x]\n"
            + "".join(f"b{i}: &b{i} [{', '.join([f'*b{i - 1}' if i else '*a'] * 9)}]\n" for i in range(9)),
            "values, counting aliases each time",
        ),
        ('- !!python/object/apply:os.system ["true"]', "cannot be read"),
    ):
        file.write_text(text)
        with pytest.raises(ConfigError, match=says):
            read_rubric(file)
    file.write_text('- {name: "\\e[31ma\\n", question: b}')
    assert read_rubric(file)[0].name == "\\x1b[31ma"
    with pytest.raises(ConfigError, match="does not exist"):
        read_rubric(tmp_path / "none.yaml")


def test_an_equal_question_is_asked_once_whatever_happens_between(tmp_path):
    requests = []

    def ask(questions):
        requests.extend(questions)
        return [question.upper() for question in questions]

    file = tmp_path / "cache" / "replies.jsonl"
    assert CachedReplies(ask, file, "judge")(["a", "b", "a"]) == ["A", "B", "A"]
    with file.open("a") as cut:
        cut.write('{"digest": "half')  # the run died here
    again = CachedReplies(ask, file, "judge")
    assert again(["b", "c"]) == ["B", "C"]
    assert CachedReplies(ask, file, "judge")(["c", "a"]) == ["C", "A"]
    assert requests == ["a", "b", "c"]
    assert CachedReplies(ask, file, "another judge")(["a"]) == ["A"]
    assert requests == ["a", "b", "c", "a"]
    lines = [json.loads(line) for line in file.read_text().splitlines() if line.endswith("}")]
    assert [line["reply"] for line in lines] == ["A", "B", "C", "A"]


def test_a_reply_with_another_bit_is_asked_again(tmp_path):
    file = tmp_path / "replies.jsonl"
    CachedReplies(lambda questions: ["[[A]]"], file, "judge")(["a"])
    row = json.loads(file.read_text())
    content = file.read_bytes()
    for bit in range(0, 8 * len(content), 5):
        damaged = bytearray(content)
        damaged[bit // 8] ^= 1 << bit % 8
        file.write_bytes(damaged)
        assert CachedReplies(lambda questions: ["[[A]]"], file, "judge")(["a"]) == ["[[A]]"], bit
    file.write_text(json.dumps({"digest": row["digest"], "reply": "of an older version"}))
    assert CachedReplies(pytest.fail, file, "judge")(["a"]) == ["of an older version"]


@pytest.mark.parametrize("kind", ["pipe", "device", "text"])
def test_a_cache_that_is_none_stops_nothing_for_ever(tmp_path, kind):
    file = tmp_path / "replies.jsonl"
    if kind == "pipe":
        os.mkfifo(file)
    elif kind == "device":
        file.symlink_to("/dev/zero")
    else:
        file.write_text('[1]\n{"digest": 1, "reply": []}\n\xff{')
    replies = CachedReplies(lambda questions: ["r"] * len(questions), file, "judge")
    if kind == "text":
        assert replies(["a"]) == ["r"]
        return
    with pytest.raises(OSError, match="not a regular file"):
        replies(["a"])
