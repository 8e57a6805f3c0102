"""Whether two mathematical answers are the same: as text, else by math-verify (which works on sympy expressions).

Nothing here limits time: a tower of powers can keep sympy busy for ever. The worker's time limit is what ends it.
"""

from __future__ import annotations

import logging
import re
from types import ModuleType

_SPACE = re.compile(r"\s+|\\[,;:!]|\$")


def load_math_verify() -> ModuleType:
    """The module; importing it takes a third of a second."""
    import math_verify

    for name in ("math_verify.parser", "math_verify.grader"):  # they warn once that timing is ours to do: it is
        logging.getLogger(name).setLevel(logging.ERROR)
    return math_verify


def last_boxed(text: str) -> str | None:
    r"""The contents of the last \boxed{...} or \fbox{...}, braces balanced; None when there is none or it never
    closes."""
    starts = [m.end() for m in re.finditer(r"\\(?:boxed|fbox)\s*\{", text)]
    if not starts:
        return None
    depth = 1
    for i in range(starts[-1], len(text)):
        depth += {"{": 1, "}": -1}.get(text[i], 0)
        if depth == 0:
            return text[starts[-1] : i].strip()
    return None


def math_equal(gold: str, answer: str) -> bool:
    r"""Whether `answer` equals `gold`, both LaTeX or plain: "0.5" and "\frac{1}{2}" do."""
    if _SPACE.sub("", gold) == _SPACE.sub("", answer):
        return True
    math_verify = load_math_verify()
    parsed = [math_verify.parse(f"\\boxed{{{text}}}", parsing_timeout=None) for text in (gold, answer)]
    return bool(all(parsed) and math_verify.verify(*parsed, timeout_seconds=None))
