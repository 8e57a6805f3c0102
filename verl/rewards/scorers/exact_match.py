"""Scorer of question answering with search (Search-R1, arXiv:2503.09516): exact match inside <answer>...</answer>."""

import re
import string
from decimal import Decimal

from verl.rewards.scorers.route import Scorer

_ARTICLE = re.compile(r"\b(a|an|the)\b")
_NUMERAL = re.compile(r"[+-]?(?:(?:[0-9]+|[0-9]{1,3}(?:,[0-9]{3})+)(?:\.[0-9]*)?|\.[0-9]+)")
_NO_PUNCTUATION = str.maketrans("", "", string.punctuation)


def last_answer(text: str) -> str | None:
    """Text of the last <answer>...</answer>, stripped; None without one."""
    for part in reversed(text.split("</answer>")[:-1]):  # a pattern would look at the rest behind each tag
        _, tag, answer = part.partition("<answer>")
        if tag:
            return answer.strip()
    return None


def number_of(text: str) -> Decimal | None:
    """The value of a decimal numeral: 1234 of "1234", "1,234.", "$1234.0" and " +1234"; None for other text."""
    plain = text.strip().replace("$", "", 1)
    return Decimal(plain.replace(",", "")) if _NUMERAL.fullmatch(plain) else None


def same_number(first: str, second: str) -> bool:
    """Whether both texts are numerals of one value."""
    value = number_of(first)
    return value is not None and value == number_of(second)


def compute_score(
    solution_str: str, ground_truth: object, format_score: float = 0.0, score: float = 1.0, **_other: object
) -> float:
    """`score` for an accepted answer, up to case, punctuation, articles and spacing; `format_score` for another one. Two
    numerals are compared by value.

    0 without the tags. `ground_truth`: text, a list of texts, or {"target": either}.
    """
    answer = last_answer(solution_str)
    if answer is None:
        return 0.0
    return score if any(_same(answer, target) for target in _targets(ground_truth)) else format_score


def _targets(ground_truth: object) -> list[str]:
    if isinstance(ground_truth, dict):
        ground_truth = ground_truth["target"]
    return [str(t) for t in ground_truth] if isinstance(ground_truth, list) else [str(ground_truth)]


def _same(answer: str, target: str) -> bool:
    values = number_of(answer), number_of(target)
    return _normal(answer) == _normal(target) if None in values else values[0] == values[1]


def _normal(text: str) -> str:
    return " ".join(_ARTICLE.sub(" ", text.lower().translate(_NO_PUNCTUATION)).split())


def _reference(ground_truth: object, extra_info: dict[str, object]) -> str:
    return f"<answer>{_targets(ground_truth)[0]}</answer>"


SCORER = Scorer(compute_score, _reference)
