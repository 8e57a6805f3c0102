"""What a built-in scorer is."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any


def _nothing() -> None:
    return None


@dataclass(frozen=True)
class Scorer:
    """`compute_score(*, data_source, solution_str, ground_truth, extra_info)` gives a number or a dict with "score".

    `reference(ground_truth, extra_info)` writes the reference answer as a reply that must get the score 1, None when
    the row has no reference answer. `warm()` imports what the scorer needs, so that the first sample does not wait
    for it.
    """

    compute_score: Callable[..., Any]
    reference: Callable[[Any, dict[str, Any]], str | None]
    warm: Callable[[], object] = _nothing
