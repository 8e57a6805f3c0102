"""Reward functions that Python code gives: TRL's form over lists, verl's form over one sample, or several with weights.

f(prompts, completions, **columns) -> list of numbers or None      (TRL; a column called as an argument is not passed)
f(data_source, solution_str, ground_truth, extra_info) -> number or dict      (verl)
"""

from __future__ import annotations

import inspect
import math
from collections.abc import Callable, Collection, Mapping, Sequence
from typing import Any

from verl.errors import RewardError, nearest
from verl.registry import load_object

RewardFunction = Callable[..., object]
Sample = tuple[str, str, Any, Mapping[str, Any]]  # data source, response, reference answer, columns of the row


def score_lists(
    data_sources: Sequence[str],
    solution_strs: Sequence[str],
    ground_truths: Sequence[object],
    extra_infos: Sequence[Mapping[str, object]],
    *,
    functions: Sequence[str],
    weights: Sequence[float] = (),
) -> list[dict[str, object]]:
    """The weighted sum of all `functions` (references, see verl/registry.py) for each sample as "score"; with several functions
    each of them is a part under its name. A function that returns None for a sample is left out of its sum.

    Raises RewardError for a function of another form, and for another number of results than samples.
    """
    samples = list(zip(data_sources, solution_strs, ground_truths, extra_infos, strict=True))
    results = {}
    for reference in functions:
        function = load_object(reference)
        if (name := name_of(function)) in results:
            raise RewardError(f"Two reward functions are called {name!r}. Rename one: each is a metric under its name.")
        results[name] = results_of(function, samples)
    rows = zip(*results.values(), strict=True)
    return [_sum(list(results), row, weights or [1.0] * len(results)) for row in rows]


def _sum(names: Sequence[str], values: Sequence[Any], weights: Sequence[float]) -> dict[str, object]:
    if len(names) == 1:
        value = values[0]
        parts = value if isinstance(value, Mapping) else {"score": value}
        return {**parts, "score": _weighted(parts.get("score"), weights[0])}
    scores = [value.get("score") if isinstance(value, Mapping) else value for value in values]
    if wrong := [score for score in scores if score is not None and not hasattr(score, "__float__")]:
        return {"score": wrong[0]}  # the worker refuses it, for this sample
    known = {name: score for name, score in zip(names, scores, strict=True) if score is not None}
    total = sum(weight * score for weight, score in zip(weights, scores, strict=True) if score is not None)
    return {**known, "score": float(total) if known else math.nan}  # also where a function is called "score"


def _weighted(value: Any, weight: float) -> object:
    """`weight` x a number, NaN for None; other values are left to the worker, which refuses them for their sample."""
    if value is None:
        return math.nan
    return weight * value if hasattr(value, "__float__") else value


def _finished(result: object) -> object:
    """`result`, or the result of a coroutine."""
    if not inspect.iscoroutine(result):
        return result
    import asyncio  # half of a worker's imports; a worker starts during a step

    return asyncio.run(result)


def name_of(function: RewardFunction) -> str:
    """The name of a reward function, which is the name of its metric."""
    return str(getattr(function, "__name__", type(function).__name__))


def reward_parameters(function: RewardFunction) -> Mapping[str, inspect.Parameter]:
    """The parameters of a reward function. Raises RewardError for a function of another form."""
    signature = inspect.signature(function)
    if not {"solution_str", "completions"} & set(signature.parameters):
        raise RewardError(
            f"The reward function {name_of(function)}{signature} has no parameter 'completions' or 'solution_str'. "
            "Write it as f(completions, **columns), which returns a list of numbers, or as "
            "f(data_source, solution_str, ground_truth, extra_info)."
        )
    return signature.parameters


def require_columns(function: RewardFunction, columns: Collection[str]) -> None:
    """Raises RewardError for a parameter of a function of TRL's form that is not in `columns` and has no default value."""
    for key, parameter in reward_parameters(function).items():
        is_named = parameter.kind in (parameter.POSITIONAL_OR_KEYWORD, parameter.KEYWORD_ONLY)
        if is_named and parameter.default is parameter.empty and key not in columns:
            names = set(columns) - {"prompts", "completions"}
            hint = nearest(key, names) or f"; they have {', '.join(sorted(names)) or 'none'}."
            raise RewardError(
                f"The reward function {name_of(function)} takes {key!r}, and the rows have no such column{hint}"
            )


def results_of(
    function: RewardFunction, samples: Sequence[Sample], further: Mapping[str, object] | None = None
) -> list[Any]:
    """One result for each of `samples`, in order. `further` are arguments that a function of TRL's form gets if it takes them.

    Raises RewardError for a function of another form, and for another number of results than samples.
    """
    name, parameters = name_of(function), reward_parameters(function)
    if "solution_str" in parameters:
        return [
            _finished(function(data_source=source, solution_str=text, ground_truth=answer, extra_info=dict(extra)))
            for source, text, answer, extra in samples
        ]
    names = {key: None for *_, extra in samples for key in extra}
    columns = {key: [extra.get(key) for *_, extra in samples] for key in names}
    prompts = columns.pop("prompt", [None] * len(samples))
    completions = [
        text if isinstance(prompt, str) else [{"role": "assistant", "content": text}]
        for (_, text, _, _), prompt in zip(samples, prompts, strict=True)
    ]
    arguments = {**columns, **(further or {}), "prompts": prompts, "completions": completions}
    if not any(p.kind is p.VAR_KEYWORD for p in parameters.values()):
        arguments = {key: value for key, value in arguments.items() if key in parameters}
    require_columns(function, arguments)
    returned = _finished(function(**arguments))
    if isinstance(returned, str | Mapping) or not hasattr(returned, "__iter__"):
        raise RewardError(
            f"The reward function {name} returned a {type(returned).__name__} for {len(samples)} completions. "
            "Return a list with a number for each."
        )
    results = list(returned)
    if len(results) != len(samples):
        raise RewardError(f"The reward function {name} returned {len(results)} rewards for {len(samples)} completions.")
    return results
