r"""Mathematical answers: extraction from \boxed{} and "Answer:", comparison as text or by math-verify, three scorers.

Nothing here limits time: a tower of powers can keep sympy busy for hours. The worker's time limit ends it.
"""

import logging
import re
from collections.abc import Mapping
from types import ModuleType

from verl.rewards.scorers.exact_match import last_answer, same_number
from verl.rewards.scorers.math_forms import as_interval, is_close, rewritten, same_form, without_text
from verl.rewards.scorers.route import Scorer

LEGACY_WINDOW = 300  # characters at the end of a reply: existing releases look for "Answer:" there
_SPACE = re.compile(
    r"(?<!\d) | (?!\d)| (?=\d{3}(?!\d))|\\[,;:!]|\$"
)  # a space between digits only before three of them
_TEXT = re.compile(r"\\(?:text|textbf|textit|mathrm|mbox)\s*\{([^{}]*)\}")
_SIGNS = re.compile(r"\\(?:cdot|times)(?![a-z])|\\[,;:! ]|[*$~]")  # a product, or nothing
_WORD = re.compile(r"[^\W\d_]{3}")  # two letters are a product more often, or the name of a line
_PHRASE = re.compile(r"[^\W\d_]+(?:['’ ]+[^\W\d_]+|(?<=[^\W\d_]{2})-[^\W\d_]{2,})*")
_BOX = re.compile(r"\\(?:boxed|fbox)(?=\s*\{|\s)")
_ANSWER = re.compile(r"answer\s*:\s*([^\n]+)", re.IGNORECASE)
_THINK_THEN_ANSWER = re.compile(r"\s*<think>.*?</think>\s*<answer>.*?</answer>\s*", re.DOTALL)

# Minerva (Lewkowycz et al. 2022, arXiv:2206.14858), appendix D.1: substitutions, removed words, rewrites
_SUBSTITUTIONS = (
    ("an ", ""), ("a ", ""), (".$", "$"), ("\\$", ""), (r"\ ", ""), (" ", ""), ("mbox", "text"), (",\\text{and}", ","),
    ("\\text{and}", ","), ("\\text{m}", "\\text{}"),
)  # fmt: skip
_REMOVED = (
    "square", "ways", "integers", "dollars", "mph", "inches", "hours", "km", "units", "\\ldots", "sue", "points", "feet",
    "minutes", "digits", "cents", "degrees", "cm", "gm", "pounds", "meters", "meals", "edges", "students",
    "childrentickets", "multiples", "\\text{s}", "\\text{.}", "\\text{\ns}", "\\text{}^2", "\\text{}^3", "\\text{\n}",
    "\\text{}", r"\mathrm{th}", r"^\circ", r"^{\circ}", r"\;", r",\!", "{,}", '"', "\\dots",
)  # fmt: skip
_REWRITES = (
    (r"(.*?)(\$)(.*?)(\$)(.*)", r"$\3$"),
    (r"(\\text\{)(.*?)(\})", r"\2"),
    (r"(\\textbf\{)(.*?)(\})", r"\2"),
    (r"(\\overline\{)(.*?)(\})", r"\2"),
    (r"(\\boxed\{)(.*)(\})", r"\2"),
    (r"(frac)([^{])(.)", r"frac{\2}{\3}"),
    (r"(sqrt)([^{])", r"sqrt{\2}"),
)


def score_boxed(solution_str: str, ground_truth: object, **_other: object) -> float:
    r"""Score of MATH (Hendrycks et al. 2021), Numina and Geometry3K: 1 when the last \boxed{} equals the reference, else 0.

    `ground_truth` may be a list of accepted answers, each boxed or not.
    """
    answer = last_boxed(solution_str)
    if not answer:
        return 0.0
    accepted = ground_truth if isinstance(ground_truth, list) else [ground_truth]
    return float(any(math_equal(last_boxed(str(gold)) or str(gold), answer) for gold in accepted))


def score_count(solution_str: str, ground_truth: object, **_other: object) -> float:
    r"""Score of counting letters (verl/data/tasks/char_count.py): 1 when the last \boxed{} is the reference count, else 0."""
    return float(same_number(last_boxed(solution_str) or "", str(ground_truth)))


def score_answer_line(
    solution_str: str, ground_truth: object, strict_box_verify: bool = False, legacy: bool = False, **_other: object
) -> dict[str, object]:
    r"""Score of DAPO (Yu et al. 2025, arXiv:2503.14476) and AIME; their replies have a line "Answer: X".

    {"score": 1.0 or -1.0, "acc": bool, "pred": the text after the last "Answer:" in its line}. `strict_box_verify`: the last
    \boxed{} in place of that line. `legacy`: as existing releases, only among the last 300 characters of the reply.
    """
    reply = solution_str[-LEGACY_WINDOW:] if legacy else solution_str
    answers = [last_boxed(reply) or ""] if strict_box_verify else _ANSWER.findall(reply)
    answer = _plain(answers[-1]) if answers else ""
    correct = bool(answer) and math_equal(_plain(str(ground_truth)), answer)
    return {"score": 1.0 if correct else -1.0, "acc": correct, "pred": answer or "[none]"}


def score_tagged(
    solution_str: str, ground_truth: object, format_weight: float = 0.1, **_other: object
) -> dict[str, object]:
    """Score of Open-R1-Multimodal for <think>...</think> <answer>...</answer>: mathematics and multiple choice.

    {"score": (1 - format_weight) accuracy + format_weight format, "acc", "format"}. Accuracy is 1 when <answer>, or the
    \\boxed{} in it, equals the reference as text or as mathematics; format is 1 for a reply of just the two tags.
    """
    gold = last_answer(str(ground_truth)) or str(ground_truth)
    answer = last_answer(solution_str)
    correct = False
    if answer:
        answer, gold = last_boxed(answer) or answer, last_boxed(gold) or gold
        correct = answer.strip() == gold.strip() or math_equal(gold, answer)
    form = float(_THINK_THEN_ANSWER.fullmatch(solution_str) is not None)
    return {"score": (1 - format_weight) * correct + format_weight * form, "acc": correct, "format": form}


def _plain(answer: str) -> str:
    answer = last_boxed(answer) or answer
    return answer.strip().strip("*$").rstrip(".").strip("$ ")


def math_equal(gold: str, answer: str) -> bool:
    r"""Whether `answer` equals `gold`, both LaTeX or plain: "0.5" and "\frac{1}{2}" do. Words are compared as text:
    math-verify reads "cat" as the product c a t, and so as equal to "act"."""
    gold, answer = rewritten(gold), rewritten(answer)
    plain, plain_gold = (_SPACE.sub("", " ".join(without_text(text).split())) for text in (answer, gold))
    if plain == plain_gold or same_number(gold.rstrip("\\% "), answer.rstrip("\\% ")):
        return True
    if (same := same_form(gold, answer)) is not None:
        return same
    words, phrases = _phrases(answer), _phrases(gold)
    if words and any(map(_WORD.search, phrases)):  # not "a b", a product
        return sorted(p.replace(" ", "") for p in words) == sorted(p.replace(" ", "") for p in phrases)
    gold, answer = as_interval(gold, answer), as_interval(answer, gold)
    math_verify = load_math_verify()
    parsed = [math_verify.parse(f"\\boxed{{{text}}}", parsing_timeout=None) for text in (gold, answer)]
    equal = all(parsed) and math_verify.verify(*parsed, timeout_seconds=None)
    return bool(equal) and is_close(parsed[0][0], parsed[1][0])


def _phrases(text: str) -> list[str]:
    """The items of a list of words or phrases in lower case; none for any other text."""
    plain = _SIGNS.sub("", _TEXT.sub(r"\1", text.rpartition("=")[2])).strip(" .").lower()
    items = [" ".join(item.split()) for item in re.split(r",|\sand\s", plain)]
    return items if all(map(_PHRASE.fullmatch, items)) else []


def load_math_verify() -> ModuleType:
    """Import math_verify, in a third of a second."""
    import math_verify

    for name in ("math_verify.parser", "math_verify.grader"):  # they warn that timeouts are off; the worker has its own
        logging.getLogger(name).setLevel(logging.ERROR)
    module: ModuleType = math_verify
    return module


def last_boxed(text: str) -> str | None:
    r"""Contents of the last \boxed{...} or \fbox{...}, braces balanced; None without one and when it never closes."""
    starts = [match.end() for match in re.finditer(r"\\(?:boxed|fbox)\s*\{", text)]
    end = _closing(text, starts[-1] - 1) if starts else None
    return None if end is None else text[starts[-1] : end].strip()


def last_boxed_only_string(string: str) -> str | None:
    r"""The last \boxed{...} or \fbox{...} with its braces balanced, or the last "\boxed x" up to a dollar sign; None when
    there is none or it never closes."""
    boxes = list(_BOX.finditer(string))
    if not boxes:
        return None
    start = boxes[-1].start()
    opening = re.compile(r"\s*\{").match(string, boxes[-1].end())
    if opening is None:
        return string[start:].split("$")[0]
    end = _closing(string, opening.end() - 1)
    return None if end is None else string[start : end + 1]


def _closing(text: str, opening: int) -> int | None:
    """Position of the brace that closes the one at `opening`."""
    depth = 0
    for position in range(opening, len(text)):
        depth += {"{": 1, "}": -1}.get(text[position], 0)
        if depth == 0:
            return position
    return None


def remove_boxed(s: str) -> str:
    r"""Contents of "\boxed{...}", "\fbox{...}" or "\boxed x". Raises ValueError for another text."""
    if match := re.fullmatch(r"\\(?:boxed|fbox)\s*\{(.*)\}", s, re.DOTALL):
        return match[1]
    if s.startswith("\\boxed "):
        return s.removeprefix("\\boxed ")
    raise ValueError(f"{s!r:.80} is not a \\boxed{{...}}.")


def normalize_final_answer(final_answer: str) -> str:
    """A mathematical answer as Minerva compares it: after the last "=", without units, articles, spaces and LaTeX text,
    with the braces of fractions and roots, and integers without commas."""
    answer = final_answer.split("=")[-1]
    for before, after in _SUBSTITUTIONS:
        answer = answer.replace(before, after)
    for expression in _REMOVED:
        answer = answer.replace(expression, "")
    for pattern, replacement in _REWRITES:
        answer = re.sub(pattern, replacement, answer)
    answer = answer.replace("$", "")
    if answer.replace(",", "").isdigit():
        answer = answer.replace(",", "")
    return answer.strip()


def _boxed_reference(ground_truth: object, extra_info: Mapping[str, object]) -> str:
    gold = str(ground_truth[0] if isinstance(ground_truth, list) else ground_truth)
    return f"\\boxed{{{last_boxed(gold) or gold}}}"


BOXED = Scorer(score_boxed, _boxed_reference, load_math_verify)
ANSWER_LINE = Scorer(score_answer_line, lambda ground_truth, extra_info: f"Answer: {ground_truth}", load_math_verify)
COUNT = Scorer(score_count, lambda ground_truth, extra_info: f"\\boxed{{{ground_truth}}}")
