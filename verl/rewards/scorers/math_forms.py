"""Forms of mathematical answers that math-verify reads as another value, or does not read."""

from __future__ import annotations

import re
import unicodedata
from fractions import Fraction
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from sympy import Basic

MAX_POWER = 10_000  # exponents and factorials that are computed; answers with larger ones are compared as text
RELATIVE_TOLERANCE = 1e-9

MAGNITUDES = {"dozen": 12, "hundred": 10**2, "thousand": 10**3, "million": 10**6, "billion": 10**9, "trillion": 10**12}
_MAGNITUDE = re.compile(
    rf"(\d(?:[\d,]*\d)?(?:\.\d+)?)(?:\\[,;: ]|[\s~])*(?:\\(?:text|textbf|mathrm|mbox)\s*\{{)?\s*({'|'.join(MAGNITUDES)})s?\b"
)
_MINUS = "\u2212"
_FRACTIONS = {c: unicodedata.normalize("NFKD", c).split("\u2044") for c in "½¼¾⅐⅑⅒⅓⅔⅕⅖⅗⅘⅙⅚⅛⅜⅝⅞"}
_UNICODE = str.maketrans(
    {
        "\u200b": "", "\ufeff": "", "\u00b7": r"\cdot ", "\u221e": r"\infty ", "\u2264": r"\le ", "\u2265": r"\ge ",
        "\u2044": "/", "\u00b0": r"^\circ", **{c: rf"\frac{{{above}}}{{{below}}}" for c, (above, below) in _FRACTIONS.items()},
    }
)  # fmt: skip
_RAISED = re.compile("[\u00b2\u00b3\u00b9\u2070\u2074-\u207b]+")
_DEGREES = {"\u221a": "", "\u221b": "[3]", "\u221c": "[4]"}
_ROOT = re.compile(
    r"([\u221a-\u221c])\s*(?:\{((?:[^{}]|\{[^{}]*\})*)\}|\(((?:[^()]|\([^()]*\))*)\)|(\d+(?:\.\d+)?|\\[a-zA-Z]+|[a-zA-Z]))"
)
_NUMBER_IN_TEXT = re.compile(r"\\(?:text|textbf|mathrm|mbox)\s*\{\s*([+-]?\$?\d[\d.,]*)(?:\\[,;: ]|[\s~])*([^{}\d]*)\}")
_TEXT = re.compile(r"\\(?:text|textbf|mathrm|mbox)\s*\{([^{}]*)\}")
_REPEATING = re.compile(r"(\d{0,15})\.(\d{0,15})\\overline\s*\{(\d{1,15})\}|(\d{0,15})\.(\d{0,15})\\overline\s*(\d)")
_SCIENTIFIC = re.compile(r"([+-]?\d+(?:\.\d+)?)[eE]([+-]?\d{1,3})")
_BASED = re.compile(r"\s*([0-9A-Za-z]+)\s*_\s*\{?\s*(\d+|\\text\{[a-z]+\})\s*\}?\s*")
_DOTS = re.compile(r"\\[lc]?dots[cbmio]?|\.\.\.|\u2026")
_LARGE = re.compile(
    r"\^\s*\{?\s*\(?-?\d{5,}|\d{5,}\s*\)?\s*!|!\s*\)?\s*[!^]|\^\s*[\w{(]+!"  # a large exponent or factorial, and nested ones
    r"|\^\s*[{(][^{}()]*\^\s*(?:[{(][^{}()]*\^|[{(]?\s*\d{2})|\*\*\s*\w+\s*\*\*\s*(?:\w+\s*\*\*|\d{2})"
)
_RELATIONS = {
    r"\leq": "<=",
    r"\le": "<=",
    r"\geq": ">=",
    r"\ge": ">=",
    "\u2264": "<=",
    "\u2265": ">=",
    r"\lt": "<",
    r"\gt": ">",
}
_BOUND = r"([^<>=,]+?)"
_BETWEEN = re.compile(rf"{_BOUND}(<=?|>=?)([a-zA-Z])(<=?|>=?){_BOUND}")
_BEYOND = re.compile(rf"([a-zA-Z])(<=?|>=?){_BOUND}|{_BOUND}(<=?|>=?)([a-zA-Z])")
_IS_INTERVAL = re.compile(r"[(\[].*[)\]]", re.DOTALL)


def rewritten(text: str) -> str:
    """`text` with numbers out of \\text{}, repeating decimals as fractions, 1e3 as a product, signs of Unicode as LaTeX, and
    5 million as a number."""
    text = text.translate(_UNICODE)
    text = _RAISED.sub(lambda m: f"^{{{unicodedata.normalize('NFKD', m[0]).replace(_MINUS, '-')}}}", text)
    text = _ROOT.sub(lambda m: rf"\sqrt{_DEGREES[m[1]]}{{{m[2] or m[3] or m[4]}}}", text)
    text = _MAGNITUDE.sub(_multiplied, text) if _MAGNITUDE.search(text) else text
    text = _NUMBER_IN_TEXT.sub(r"\1\\text{ \2}", text.strip())
    text = _REPEATING.sub(_fraction, text)
    return _SCIENTIFIC.sub(r"\1 \\times 10^{\2}", text) if _SCIENTIFIC.fullmatch(text) else text


def _multiplied(match: re.Match[str]) -> str:
    value = Fraction(match[1].replace(",", "")) * MAGNITUDES[match[2]]
    number = str(value) if value.denominator == 1 else match[1]
    return number + (r"\text{" if "{" in match[0] else "")


def _fraction(match: re.Match[str]) -> str:
    integer, plain, repeated = match.groups()[:3] if match[3] else match.groups()[3:]
    value = Fraction(
        int(integer + plain + repeated) - int(integer + plain or 0), 10 ** len(plain) * (10 ** len(repeated) - 1)
    )
    return rf"\frac{{{value.numerator}}}{{{value.denominator}}}"


def without_text(text: str) -> str:
    return _TEXT.sub(r"\1", text)


def same_form(gold: str, answer: str) -> bool | None:
    """Whether numbers of a base, or expressions with dots or with powers that are too large to compute, agree as text; None
    for other answers."""
    base_of_gold, base = _BASED.fullmatch(gold), _BASED.fullmatch(answer)
    if (base_of_gold and base_of_gold[1].isdigit()) or (base and base[1].isdigit()):
        digits = answer.strip() if base is None else base[1]
        if base_of_gold is None:
            return digits == gold.strip()
        return base is not None and base.groups() == base_of_gold.groups()
    if any(pattern.search(text) for pattern in (_DOTS, _LARGE) for text in (gold, answer)):
        return False  # the caller has compared them as text
    return None


def as_interval(text: str, other: str) -> str:
    r"""An inequality of one variable as an interval, if `other` is an interval: x>3 as (3,\infty)."""
    if not _IS_INTERVAL.fullmatch(other.strip()):
        return text
    plain = re.sub(r"\s+|\\[,;! ]", "", text)
    for name, sign in _RELATIONS.items():
        plain = plain.replace(name, sign)
    if (match := _BETWEEN.fullmatch(plain)) and match[2][0] == match[4][0]:
        low, low_sign, _, high_sign, high = match.groups()
        if low_sign[0] == ">":
            low, low_sign, high_sign, high = high, high_sign, low_sign, low
        return f"{'[' if '=' in low_sign else '('}{low},{high}{']' if '=' in high_sign else ')'}"
    if match := _BEYOND.fullmatch(plain):
        sign, bound = (match[2], match[3]) if match[1] else ({"<": ">", ">": "<"}[match[5][0]] + match[5][1:], match[4])
        closed = "=" in sign
        return (
            f"{'[' if closed else '('}{bound},\\infty)"
            if sign[0] == ">"
            else f"(-\\infty,{bound}{']' if closed else ')'}"
        )
    return text


def is_close(gold: Basic, answer: Basic) -> bool:
    """Whether two sympy expressions that math-verify calls equal are equal in their numbers too, each by itself: exactly if
    they are rational, else to RELATIVE_TOLERANCE."""
    if getattr(gold, "is_number", False) and getattr(answer, "is_number", False):
        return _same_number(gold, answer)
    parts, answer_parts = getattr(gold, "args", ()), getattr(answer, "args", ())
    if type(gold) is not type(answer) or len(parts) != len(answer_parts) or not parts:
        return True
    if type(gold).__name__ in ("Tuple", "Interval"):
        return all(map(is_close, parts, answer_parts))
    if type(gold).__name__ in ("FiniteSet", "Union"):
        return all(any(is_close(part, other) for other in answer_parts) for part in parts)
    return True


def _same_number(gold: Basic, answer: Basic) -> bool:
    import sympy

    gold, answer = gold.doit(), answer.doit()
    if gold.is_Rational and answer.is_Rational:
        return bool(gold == answer)
    one, other = sympy.N(gold, 20), sympy.N(answer, 20)
    return bool(one == other or abs(one - other) <= RELATIVE_TOLERANCE * max(abs(one), abs(other)))
