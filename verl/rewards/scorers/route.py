"""Built-in scorers by data_source. A row ending in "*" matches every data_source with that prefix."""

from collections.abc import Callable, Iterable
from dataclasses import dataclass
from typing import Any

from verl.errors import RewardError, nearest
from verl.registry import Registry

_GSM8K = "verl.rewards.scorers.gsm8k:SCORER"
_MATH = "verl.rewards.scorers.math_answers:BOXED"
_DAPO = "verl.rewards.scorers.math_answers:ANSWER_LINE"
_CODE = "verl.rewards.scorers.code:SCORER"

SCORERS = Registry(
    "built-in scorer",
    {
        "openai/gsm8k": _GSM8K,
        "lighteval/MATH": _MATH,
        "DigitalLearningGmbH/MATH-lighteval": _MATH,
        "HuggingFaceH4/MATH-500": _MATH,
        "math_dapo": _DAPO,
        "math": _DAPO,
        "math_dapo_reasoning": _DAPO,
        "aime*": _DAPO,
        "numina_*": _MATH,
        "hiyouga/geometry3k": _MATH,
        "codecontests": _CODE,
        "apps": _CODE,
        "codeforces": _CODE,
        "taco": _CODE,
        "searchR1_*": "verl.rewards.scorers.exact_match:SCORER",
        "countdown": "verl.rewards.scorers.puzzles:COUNTDOWN",
        "kk*": "verl.rewards.scorers.puzzles:KNIGHTS",
        "char_count": "verl.rewards.scorers.math_answers:COUNT",
        "reasoning_gym/*": "verl.rewards.scorers.reasoning_gym:SCORER",
    },
)


@dataclass(frozen=True)
class Scorer:
    """Functions of a built-in scorer.

    `compute_score(*, data_source, solution_str, ground_truth, extra_info)` returns a number or a dict with "score".
    `reference(ground_truth, extra_info)` writes the reference answer as a reply that must get the score 1, None when
    the row has no reference answer. `warm()` imports the scorer's dependencies, so that the first sample does not wait.
    `check(ground_truth)` raises DataError for one that no response could be scored against.
    """

    compute_score: Callable[..., Any]
    reference: Callable[[object, dict[str, object]], str | None]
    warm: Callable[[], object] = lambda: None
    check: Callable[[object], object] = lambda ground_truth: None


def find_scorer(data_source: str) -> Scorer | None:
    """The built-in scorer of a data_source, or None."""
    if data_source in SCORERS:
        return SCORERS.get(data_source)  # type: ignore[no-any-return]
    for row in SCORERS:
        if row.endswith("*") and data_source.startswith(row[:-1]):
            return SCORERS.get(row)  # type: ignore[no-any-return]
    return None


def route(data_source: str) -> Scorer:
    """The built-in scorer of a data_source. Raises RewardError with the list of them."""
    scorer = find_scorer(data_source)
    if scorer is None:
        hint = nearest(data_source, SCORERS) or f"; there are {', '.join(SCORERS)}."
        raise RewardError(
            f"There is no built-in scorer for data_source {data_source!r}{hint} Set reward.custom_reward_function.path to a "
            "file with your compute_score function; from Python, pass `reward`."
        )
    return scorer


def check_truth(data_source: str, ground_truth: object) -> None:
    """Raise DataError for a reference answer that the built-in scorer of a data_source cannot read."""
    if (scorer := find_scorer(data_source)) is not None:
        scorer.check(ground_truth)


def warm(data_sources: Iterable[str]) -> None:
    """Import what these data sources' scorers need. Raises RewardError for a data_source without a scorer."""
    for scorer in {route(d) for d in data_sources}:
        scorer.warm()


def default_compute_score(
    data_source: str,
    solution_str: str,
    ground_truth: object,
    extra_info: dict[str, object] | None = None,
    sandbox_fusion_url: str | None = None,
    **kwargs: object,
) -> float | dict[str, Any]:
    """Score a reply with the scorer of its data_source; `kwargs` go to that scorer (gsm8k: method, format_score,
    score).

    Raises RewardError for a data_source without a scorer. `sandbox_fusion_url` has no effect: this version has no client
    for that service, and programs run in the sandbox of the scorer.
    """
    return route(data_source).compute_score(  # type: ignore[no-any-return]
        data_source=data_source,
        solution_str=solution_str,
        ground_truth=ground_truth,
        extra_info=extra_info or {},
        **kwargs,
    )


def default_compute_scores(
    data_sources: list[str],
    solution_strs: list[str],
    ground_truths: list[object],
    extra_infos: list[dict[str, object]],
    **kwargs: Any,
) -> list[float | dict[str, object]]:
    """default_compute_score over a batch, for the manager `batch` without a function of the user's."""
    rows = zip(data_sources, solution_strs, ground_truths, extra_infos, strict=True)
    return [default_compute_score(*row, **kwargs) for row in rows]
