"""Scorer of GSM8K (Cobbe et al. 2021, arXiv:2110.14168): what stands behind "####" must be the reference number."""

from __future__ import annotations

import re
from fractions import Fraction
from typing import Literal

from verl.rewards.scorers.math_forms import MAGNITUDES
from verl.rewards.scorers.route import Scorer

LEGACY_WINDOW = 300  # characters at the end of a reply: existing releases look for the answer there
_MARKED = re.compile(r"#### (-?\$?[0-9.,]+)")
_ANY = re.compile(r"-?\$?[0-9.,]+")
_LAST_LINE = re.compile(r".*####([^\n]*)", re.DOTALL)
_BOX = re.compile(r"\\(?:boxed|text|mathrm)\s*\{([^{}]*)\}")
_LABEL = re.compile(r"\s*(?:(?:the\s+)?(?:final\s+)?answer(?:\s+is)?|[a-z]\w*(?=\s*=))\s*[:=]?", re.IGNORECASE)
_COMPUTED = re.compile(r"[\d\s.,+*/x×÷()^%-]*|\s*[^\W\d]\w*\s*")  # what may stand before "=": arithmetic, or a name
_GROUPED = r"[0-9]{1,3}(?:[, \u00a0\u202f][0-9]{3})+|[0-9]{1,2}(?:,[0-9]{2})*,[0-9]{3}|[0-9]+"
_NUMBER = re.compile(
    rf"\s*([+-]?)\s*([+-]?)((?:{_GROUPED})(?:\.[0-9]*)?|\.[0-9]+)(?:[eE]([+-]?[0-9]{{1,2}})|/([0-9]{{1,9}}))?"
)
_MAX_LENGTH = 200  # characters of an answer
_MAGNITUDE = re.compile(rf"\s*-?({'|'.join(MAGNITUDES)}|k)s?\b", re.IGNORECASE)
_PART = re.compile(r"\band\b.*\b(?:half|quarters?|thirds?)\b")  # "18 and a half"
_SIGNS = str.maketrans("\u2212", "-", '$€£¥*_`"\u200b')


def extract_solution(
    solution_str: str, method: Literal["strict", "flexible"] = "strict", legacy: bool = False
) -> str | None:
    """The final number as text without thousands separators; None without one.

    "strict": the last one after "#### "; "flexible": the last number of the text. `legacy`: only among the last 300 characters.
    """
    pattern = _MARKED if method == "strict" else _ANY
    numbers = pattern.findall(solution_str[-LEGACY_WINDOW:] if legacy else solution_str)
    return next((_plain(n) for n in reversed(numbers) if any(c.isdigit() for c in n)), None)


def compute_score(
    solution_str: str,
    ground_truth: object,
    method: Literal["strict", "flexible"] = "strict",
    format_score: float = 0.0,
    score: float = 1.0,
    legacy: bool = False,
    **_other: object,
) -> float:
    """`score` when the value of all that is behind the last "####" of the reply equals the reference, `format_score` for
    another value, 0 without one. `legacy`: the rule of existing releases. They compare the first number behind "#### " as
    text and see the last 300 characters of the reply only."""
    if method == "strict" and not legacy:
        line = _LAST_LINE.match(solution_str)
        value = None if line is None else value_of(line[1])
        if value is None:
            return 0.0
        return score if value == value_of(str(ground_truth)) else format_score
    answer = extract_solution(solution_str, method, legacy)
    if answer is None:
        return 0.0
    reference = _plain(str(ground_truth).strip())
    return score if answer == reference or (not legacy and value_of(answer) == value_of(reference)) else format_score


def value_of(text: str) -> Fraction | None:
    """The number that is the only answer in a text: 18 of "**18**", "+$18.00 a day" and "3 x 6 = 18", 1/2 of "1/2".

    None without a number, and for a second number: "18 or 20", "18-20", "2^5", "12:30"."""
    if len(text) > _MAX_LENGTH:
        return None
    *computed, last = _BOX.sub(r"\1", text).replace(r"\$", "").translate(_SIGNS).strip(" \t\r()[]").split("=")
    values = [value for side in computed if (value := _number(side)) is not None]
    value = _number(_LABEL.sub("", last, count=1))
    if not all(map(_COMPUTED.fullmatch, computed)) or any(other != value for other in values):
        return None
    return value


def _number(text: str) -> Fraction | None:
    match = _NUMBER.match(text)
    rest = "" if match is None else text[match.end() :]
    if match is None or any(c.isnumeric() for c in rest) or rest.lstrip()[:1] in ("^", "/") or _PART.search(rest):
        return None
    first, second, digits, exponent, denominator = match.groups()
    if denominator is not None and not int(denominator):
        return None
    value = Fraction(re.sub(r"[^0-9.]", "", digits)) * Fraction(10) ** int(exponent or 0) / int(denominator or 1)
    if magnitude := _MAGNITUDE.match(rest):
        value *= MAGNITUDES.get(magnitude[1].lower(), 1000)
    return -value if (first == "-") != (second == "-") else value


def _plain(number: str) -> str:
    return number.replace(",", "").replace("$", "").rstrip(".")


SCORER = Scorer(compute_score, lambda ground_truth, extra_info: f"#### {ground_truth}")
