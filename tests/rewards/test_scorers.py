import json
from pathlib import Path

import pytest

from tests.json_lines import read_lines
from verl.data_proto.samples import ScoreRequest
from verl.errors import DataError, RewardError
from verl.rewards.functions import RewardFunctionSpec
from verl.rewards.pool import RewardPool
from verl.rewards.scorers import gsm8k
from verl.rewards.scorers.math_answers import last_boxed, math_equal
from verl.rewards.scorers.reasoning_gym import extract_answer
from verl.rewards.scorers.route import SCORERS, check_truth, default_compute_score, find_scorer
from verl.utils.reward_score import default_compute_score as known_name

GARBAGE = [
    "",
    "#### ",
    "\\boxed{",
    "\\boxed{}",
    "Answer:",
    "<answer></answer>",
    "}{",
    "\x00\ud800",
    "9" * 5000,
    "####" * 500,
]

# data_source, ground truth, extra_info, right replies, wrong replies
CASES = [
    (
        "char_count",
        "2",
        {},
        ["\\boxed{2} n in n-i-n-e.", "n = n.\n\\boxed{1} no, \\boxed{2}"],
        ["2", "\\boxed{3}", "\\boxed{2} or \\boxed{3}", "\\boxed{2.1}"],
    ),
    (
        "openai/gsm8k",
        "1800",
        {},
        ["#### 1800", "so 3 #### 3 no\n#### 1,800", "x" * 5000 + "####1800 dollars"],
        ["1800", "#### 18", "#### 1800 then #### 7", "#### 1800 or 18", "#### 1800.5"],
    ),
    (
        "lighteval/MATH",
        "\\frac{1}{2}",
        {},
        ["\\boxed{\\frac12}", "hence $\\boxed{0.5}$.", "\\boxed{3} no: \\boxed{\\dfrac{1}{2}}", "\\fbox{1/2}"],
        ["0.5", "\\boxed{2}", "\\boxed{\\frac12} or \\boxed{3}", "\\boxed{\\frac{1}{3}}"],
    ),
    (
        "HuggingFaceH4/MATH-500",
        "(3, \\frac{\\pi}{2})",
        {},
        ["\\boxed{\\left(3, \\frac{\\pi}{2}\\right)}"],
        ["\\boxed{(3, 2)}"],
    ),
    ("DigitalLearningGmbH/MATH-lighteval", "x^2+2x+1", {}, ["\\boxed{(x+1)^2}"], ["\\boxed{x^2}"]),
    (
        "HuggingFaceH4/MATH-500",
        "\\frac{\\sqrt{3}}{2}+\\sqrt[3]{x^{10}}",
        {},
        ["\\boxed{√3/2 + ∛(x¹⁰)}", "\\boxed{√{3}⁄2 + ∛{x^{10}}}"],
        ["\\boxed{√2/2 + ∛(x¹⁰)}", "\\boxed{√3/2 + √(x¹⁰)}", "\\boxed{√3/2 + ∛(x¹)}", "\\boxed{√}"],
    ),
    ("HuggingFaceH4/MATH-500", "\\frac{2}{3}", {}, ["\\boxed{⅔}", "\\boxed{⅔°}"], ["\\boxed{⅓}", "\\boxed{⅔²}"]),
    ("numina_aops_forum", ["\\boxed{7}"], {}, ["\\boxed{7.0}"], ["\\boxed{8}"]),
    ("hiyouga/geometry3k", "2 \\sqrt { 221 }", {}, ["\\boxed{2\\sqrt{221}}"], ["\\boxed{\\sqrt{221}}"]),
    (
        "math_dapo",
        "34",
        {},
        ["so\nAnswer: 34", "Answer: $34$.", "answer: \\boxed{34}"],
        ["34", "Answer: 35", "Answer: 3  4", "Answer: 34\nAnswer: 1"],
    ),
    ("math", "\\frac{3}{4}", {}, ["Answer: $\\frac34$", "Answer: 0.75"], ["Answer: 3"]),
    ("aime2024", "204", {}, ["Answer: 204"], ["Answer: 240"]),
    (
        "searchR1_nq",
        {"target": ["The Beatles", "Beatles"]},
        {},
        ["<answer>the  beatles!</answer>", "<answer>x</answer><answer>Beatles</answer>"],
        ["The Beatles", "<answer>The Beatles band</answer>"],
    ),
    (
        "reasoning_gym/basic_arithmetic",
        "-12",
        {"question": "3 - 15 =", "answer": "-12", "metadata": {}, "task": "basic_arithmetic"},
        ["-12", "3 - 15 = -12.", "it is <answer>-12</answer> since 15 > 3", "-12\n"],
        ["12", "-12 or 5", "-12 <answer>3</answer>", "I do not know", "-1", "-120"],
    ),
    (
        "reasoning_gym/gcd",
        "4",
        {"question": "gcd of 8 and 12", "answer": "4", "metadata": "{}", "task": "gcd"},
        ["4", "The answer is 4"],
        ["4 and 8", "14", "four"],
    ),
    (
        "reasoning_gym/spell_backward",
        "olleh",
        {"question": "spell hello backward", "answer": "olleh", "metadata": {"word": "hello"}},
        ["olleh", " olleh \n", "so <answer>olleh</answer>"],
        ["it is olleh", "hello", "olle"],
    ),
]


def value(result):
    return result["score"] if isinstance(result, dict) else result


@pytest.mark.parametrize("case", CASES, ids=[c[0] for c in CASES])
def test_right_wrong_and_garbage(case):
    source, gold, extra, right, wrong = case
    lowest = -1.0 if find_scorer(source) is SCORERS.get("math_dapo") else 0.0
    for reply in right:
        assert value(default_compute_score(source, reply, gold, extra)) == 1.0, reply
    for reply in wrong + GARBAGE:
        assert value(default_compute_score(source, reply, gold, extra)) == lowest, reply
    reference = find_scorer(source).reference(gold, extra)
    assert value(default_compute_score(source, reference, gold, extra)) == 1.0


# data_source -> a reply with this answer, of each scorer with references that may be numbers
ANSWERS = {
    "openai/gsm8k": "#### {}",
    "math_dapo": "Answer: {}",
    "math": "Answer: {}",
    "aime2024": "Answer: {}",
    "lighteval/MATH": "\\boxed{{{}}}",
    "numina_x": "\\boxed{{{}}}",
    "hiyouga/geometry3k": "\\boxed{{{}}}",
    "searchR1_nq": "<answer>{}</answer>",
    "char_count": "\\boxed{{{}}}",
    "reasoning_gym/basic_arithmetic": "<answer>{}</answer>",
}
NOT_NUMBERS = ("apps", "countdown", "kk_logic")
FOLLOWING = ["", "\n", "\nThat is all.", "\n" + "words, and more words. " * 40, "\n\n" + "-" * 100_000]


def test_every_scorer_is_in_the_tables():
    answers, cases = {*ANSWERS, *NOT_NUMBERS}, {case[0] for case in CASES} | set(NOT_NUMBERS)
    for row in SCORERS:
        scorer = SCORERS.get(row)
        assert scorer in map(find_scorer, cases), f"give {row!r} a row of CASES"
        assert scorer in map(find_scorer, answers), f"give {row!r} a row of ANSWERS, or of NOT_NUMBERS"


def spellings(number):
    """Numerals of one value."""
    texts = [str(number), f"{number}.0", f"{number}.", f"{number}.00", f"{number:,}", f"{number:,}.0"]
    return texts if number < 0 else [*texts, f"${number}"]


@pytest.mark.parametrize("source", ANSWERS)
def test_a_score_depends_on_the_answer_and_not_on_what_follows_or_how_the_number_is_spelled(source):
    extra = {"question": "", "metadata": {}, "task": "basic_arithmetic"}
    for number in (7, 1234, 1234567, -1234):
        for gold in spellings(number):
            extra["answer"] = gold
            for answer in spellings(number):
                if answer.startswith("$") and source in ("math_dapo", "math", "aime2024"):
                    answer += "$"  # TeX
                reply = ANSWERS[source].format(answer)
                assert value(default_compute_score(source, reply, gold, extra)) == 1.0, (answer, gold)
            reply, wrong = (ANSWERS[source].format(n) for n in (number, number + 1))
            for following in FOLLOWING:
                assert value(default_compute_score(source, reply + following, gold, extra)) == 1.0, (
                    gold,
                    following[:30],
                )
                assert value(default_compute_score(source, wrong + following, gold, extra)) <= 0.0, (
                    gold,
                    following[:30],
                )
            assert value(default_compute_score(source, f"{reply}\n{wrong}", gold, extra)) <= 0.0


def test_the_window_of_existing_releases_is_an_option():
    after = "\n" + "x" * 400
    for source, reply, lowest in (("openai/gsm8k", "#### 7", 0.0), ("math_dapo", "Answer: 7", -1.0)):
        assert value(default_compute_score(source, reply + after, "7")) == 1.0
        assert value(default_compute_score(source, reply + after, "7", legacy=True)) == lowest
    strict = {"strict_box_verify": True}
    assert [value(default_compute_score("math_dapo", text, "7", **strict)) for text in ("Answer: 7", r"\boxed{7}")] == [
        -1,
        1,
    ]
    assert default_compute_score("openai/gsm8k", "#### 1234", "1234.0") == 1.0
    assert default_compute_score("openai/gsm8k", "#### 1234", "1234.0", legacy=True) == 0.0


# replies that a scorer judges otherwise than a person, and why
DISAGREEMENTS = {
    r"So the answer is \boxed{5\text{ m}}.": "units are ignored, as by MATH's scorer: references have one or none at random",
    r"\boxed{5\text{ feet}}": "units are ignored",
    r"So the answer is \boxed{1:2}.": "a ratio is a quotient: `2/3` for `2:3` is right",
    r"\boxed{AB}": "two letters are a product more often than a name",
    r"\boxed{e^{i\pi}}": "math-verify reads e as a variable",
}


def test_replies_that_a_person_has_judged():
    rows = read_lines(Path(__file__).parent / "judged_replies.jsonl")
    wrong = [
        row["reply"]
        for row in rows
        if (value(default_compute_score(row["data_source"], row["reply"], row["reference"])) == 1.0) is not row["right"]
    ]
    assert sorted(wrong) == sorted(DISAGREEMENTS)
    assert len(rows) > 230


def test_gsm8k_reads_the_first_number_on_request():
    for reply, reference in (("#### 18 or 20", "18"), ("#### 1/2", "1"), ("#### 5e3", "5")):
        assert default_compute_score("openai/gsm8k", reply, reference) == 0.0
        assert default_compute_score("openai/gsm8k", reply, reference, legacy=True) == 1.0


def test_dapo_says_what_it_read():
    assert default_compute_score("math_dapo", "Answer: 7", "8") == {"score": -1.0, "acc": False, "pred": "7"}
    assert default_compute_score("math_dapo", "7", "8")["pred"] == "[none]"


def test_gsm8k_flexible_and_partial_credit():
    assert gsm8k.compute_score("it is 1,800 dollars. Or so.", "1800", method="flexible") == 1.0
    assert gsm8k.compute_score("it is 18.", "18", method="flexible") == 1.0
    assert gsm8k.compute_score("nothing . , here", "18", method="flexible") == 0.0
    assert gsm8k.compute_score("#### 7", "18", format_score=0.1) == 0.1
    assert default_compute_score("openai/gsm8k", "18", "18", method="flexible") == 1.0


def test_gsm8k_gives_1_to_the_fixture():
    for line in (Path(__file__).parent / "gsm8k.jsonl").read_text().splitlines():
        row = json.loads(line)
        assert gsm8k.compute_score(row["answer"], row["ground_truth"]) == 1.0, row


@pytest.mark.parametrize("split", ["train", "test"])
def test_gsm8k_gives_1_to_every_reference_answer(split):
    file = Path(__file__).resolve().parents[3] / "shared" / "data" / "gsm8k" / f"{split}.jsonl"
    if not file.exists():
        pytest.skip("the GSM8K files are not beside the repository")
    rows = read_lines(file)
    assert len(rows) in (7473, 1319)
    for row in rows:
        gold = row["answer"].split("####")[1].strip()
        assert gsm8k.compute_score(row["answer"], gold) == 1.0
        assert gsm8k.compute_score(row["answer"], gold.replace(",", "")) == 1.0
        assert gsm8k.compute_score(row["answer"], gold + "1") == 0.0


@pytest.mark.parametrize(
    ("text", "boxed"),
    [
        ("\\boxed{a}", "a"),
        ("\\boxed{a} \\boxed {\\frac{1}{2}} end", "\\frac{1}{2}"),
        ("\\boxed{\\boxed{3}}", "3"),
        ("\\boxed{1} \\boxed{2", None),
        ("none", None),
    ],
)
def test_last_boxed(text, boxed):
    assert last_boxed(text) == boxed


@pytest.mark.parametrize(
    ("gold", "answer", "same"),
    [
        ("1/2", "0.5", True),
        ("10\\%", "0.1", True),
        ("x=3", "3", True),
        ("\\{1,2\\}", "\\{2,1\\}", True),
        ("2", "3", False),
        ("(1,2)", "(2,1)", False),
        ("a b", "ab", True),
        ("a b", "b a", True),
        ("2xy", "2yx", True),
        ("ab-c", "-c+ab", True),
        ("kk", "k^2", True),
        ("infinity", "\\infty", True),
        ("A, C", "C, A", True),
        # words are no products of letters
        ("cat", "act", False),
        ("cat", "a c t", False),
        ("the cat", "het act", False),
        ("tic-tac", "cit-cat", False),
        ("x = cat", "act", False),
        ("cat, dog", "act, dgo", False),
        ("\\text{cat}", "\\mathrm{act}", False),
        ("\\text{Cat}", "\\textbf{cat}.", True),
        ("True", "true", True),
        ("mn", "m \\cdot n", True),
        ("mn", "nm", True),
        ("red and blue", "\\text{blue}, red", True),
    ],
)
def test_math_equal(gold, answer, same):
    assert math_equal(gold, answer) is same


@pytest.mark.parametrize(
    ("reply", "reference", "answer"),
    [
        ("5 * 7 = 35.", "35", "35"),
        ("1,234 it is", "7", "1234"),
        ("10-3", "7", "3"),
        ("x -3.5!", "7", "-3.5"),
        ("<answer> 7 </answer> 8", "7", "7"),
        ("no digits", "7", ""),
        (" word ", "word", "word"),
        ("3/4 cup", "3/4", "3/4 cup"),
        ("anything", None, "anything"),
    ],
)
def test_extract_answer(reply, reference, answer):
    assert extract_answer(reply, reference) == answer


def test_reasoning_gym_gives_no_partial_credit_and_takes_failing_scorers_as_wrong():
    extra = {"question": "q", "answer": "2 × 2 × 3", "metadata": {"number": 12, "factors": [2, 2, 3]}}
    source = "reasoning_gym/prime_factorization"
    assert default_compute_score(source, "2 × 2 × 3", extra["answer"], extra) == 1.0
    assert default_compute_score(source, "<answer>two × two</answer>", extra["answer"], extra) == 0.0
    assert default_compute_score(source, "6 × 2", extra["answer"], extra) == 0.0


@pytest.mark.parametrize("task", ["countdown", "arc_agi", "spell_backward", "number_sequence", "maze", "sudoku"])
def test_reasoning_gym_reference_answers_survive_json(task):
    reasoning_gym = pytest.importorskip("reasoning_gym")
    item = reasoning_gym.create_dataset(task, size=1, seed=3)[0]
    plain = json.loads(
        json.dumps({"metadata": item["metadata"], "question": item["question"], "answer": item["answer"]})
    )
    assert default_compute_score(f"reasoning_gym/{task}", plain["answer"], plain["answer"], plain) == 1.0


def test_a_reply_that_hangs_the_task_scorer_costs_one_sample():
    extra = {"question": "q", "answer": "1 + 2", "metadata": {"numbers": [1, 2], "target": 3, "expression": "1 + 2"}}
    replies = ["1 + 2", "9**9**9**9**9", "2 + 1"]
    requests = [ScoreRequest(r, "reasoning_gym/countdown", r, "1 + 2", extra) for r in replies]
    pool = RewardPool(RewardFunctionSpec(), num_workers=1, timeout_s=0.7, memory_mb=1024)
    try:
        pool.start(["reasoning_gym/countdown"])
        scores = pool.score_all(requests)
    finally:
        pool.close()
    assert [s.score for s in scores] == [1.0, 0.0, 1.0]
    assert "took longer than 0.7 s, for sample 9**9**9**9**9" in scores[1].error


@pytest.mark.parametrize("source", ["codecontests", "apps", "codeforces", "taco"])
def test_programs_need_tests(source):
    with pytest.raises(RewardError, match=r"needs 'inputs' and 'outputs', or 'assert_case'"):
        default_compute_score(source, "print(1)", "1", sandbox_fusion_url="http://localhost:1")


def test_unequal_inputs_and_outputs_of_a_program_are_named():
    truth = {"inputs": ["1", "2"], "outputs": ["1"]}
    with pytest.raises(
        RewardError, match=r"has 2 inputs and 1 outputs; give each input of a program its expected output"
    ):
        default_compute_score("apps", "print(1)", json.dumps(truth))
    for answer in (truth, json.dumps(truth)):
        with pytest.raises(DataError, match=r"field 'reward_model.ground_truth' has 2 inputs and 1 outputs"):
            check_truth("apps", answer)
    check_truth("apps", {"inputs": ["1"], "outputs": ["1"]})
    check_truth("mine", truth)


def test_unknown_data_source_and_task():
    with pytest.raises(RewardError, match=r"data_source 'mine'; there are openai/gsm8k.*custom_reward_function\.path"):
        default_compute_score("mine", "", "")
    with pytest.raises(RewardError, match="no task 'nonsense'"):
        default_compute_score("reasoning_gym/nonsense", "", "")


def test_the_known_door():
    assert known_name is default_compute_score
    from verl.utils.reward_score import gsm8k as through_the_door

    assert through_the_door.compute_score("#### 2", "2") == 1.0
