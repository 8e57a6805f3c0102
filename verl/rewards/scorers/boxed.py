r"""Answers in \boxed{} as text: what existing reward functions and preparation scripts cut out of a solution."""

from __future__ import annotations

import re

_BOX = re.compile(r"\\(?:boxed|fbox)(?=\s*\{|\s)")

# Minerva (Lewkowycz et al. 2022, arXiv:2206.14858), appendix D.1: what is rewritten and what is left out
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


def last_boxed_only_string(string: str) -> str | None:
    r"""The last \boxed{...} or \fbox{...} with its braces balanced, or the last "\boxed x" up to a dollar sign; None when
    there is none or it never closes."""
    found = list(_BOX.finditer(string))
    if not found:
        return None
    start, rest = found[-1].start(), found[-1].end()
    body = string[rest:].lstrip()
    if not body.startswith("{"):
        return string[start:].split("$")[0]
    depth = 0
    for end in range(rest, len(string)):
        depth += {"{": 1, "}": -1}.get(string[end], 0)
        if depth == 0 and string[end] == "}":
            return string[start : end + 1]
    return None


def remove_boxed(s: str) -> str:
    r"""The contents of "\boxed{...}", "\fbox{...}" or "\boxed x". Raises ValueError for another text."""
    if match := re.fullmatch(r"\\(?:boxed|fbox)\s*\{(.*)\}", s, re.DOTALL):
        return match[1]
    if s.startswith("\\boxed "):
        return s.removeprefix("\\boxed ")
    raise ValueError(f"{s!r:.80} is not a \\boxed{{...}}.")


def normalize_final_answer(final_answer: str) -> str:
    """A mathematical answer as Minerva compares it: after the last "=", without units, articles, spaces and LaTeX text,
    with the braces of fractions and roots, and whole numbers without commas."""
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
