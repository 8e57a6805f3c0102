"""Validation metrics: from n samples of each prompt to mean@n, best@k, worst@k, maj@k and pass@k per data source.

They are over the samples of a prompt that have a value (a NaN is a missing one). Names count all samples of the prompt: mean@4
of a prompt with three values is their mean. best@k is the expected best of k samples, estimated by a bootstrap: 1,000 times k
of a prompt's n samples (likewise worst@k, and maj@k, the value of the most frequent answer among the k). The random choices
are as in existing releases: RandomState(42), restarted for each prompt. pass@k is the unbiased estimate
1 - C(n - c, k) / C(n, k) for c right ones of n samples (Chen et al. 2021, arXiv:2107.03374, equation 1), of variables that are
0 or 1; k is at most the number of values.
"""

from collections.abc import Iterable, Mapping, Sequence
from math import comb

import numpy as np

NUM_DRAWS = 1000
SEED = 42

Metrics = dict[str, float]  # "mean@4", "best@2/std", ...


def validation_metrics(
    data_sources: Sequence[str],
    uids: Sequence[str],
    values: Mapping[str, Sequence[float] | np.ndarray],
    predictions: Sequence[object] | None = None,
) -> dict[str, float]:
    """`val-core/{source}/{variable}/{metric}` and `val-aux/...`, averaged over the prompts of each source.

    All arguments have one entry per sample; samples of one prompt share a uid. Core are mean@n, best@n and maj@n for the
    largest n, of the variable `acc`, or of `reward` if a source has no `acc`. `predictions` are the extracted answers and give
    maj@k to sources that have any.
    """
    named: dict[str, float] = {}
    for source, variables in metrics_per_source(data_sources, uids, values, predictions).items():
        core_variable = "acc" if "acc" in variables else "reward"
        for variable, metrics in variables.items():
            largest = max(_count(name) for name in metrics)
            for name, value in metrics.items():
                core = (
                    variable == core_variable and _count(name) == largest and name.startswith(("mean", "best", "maj"))
                )
                named[f"{'val-core' if core else 'val-aux'}/{source}/{variable}/{name}"] = value
    return named


def metrics_per_source(
    data_sources: Sequence[str],
    uids: Sequence[str],
    values: Mapping[str, Sequence[float] | np.ndarray],
    predictions: Sequence[object] | None = None,
    seed: int = SEED,
) -> dict[str, dict[str, Metrics]]:
    """source -> variable -> metric -> mean over the prompts with the variable in a sample."""
    rows_of: dict[tuple[str, str], list[int]] = {}
    for row, key in enumerate(zip(data_sources, uids, strict=True)):
        rows_of.setdefault(key, []).append(row)
    labels = None if predictions is None else _labels(predictions)
    answered = {source for source, answer in zip(data_sources, predictions or (), strict=False) if answer is not None}
    sums: dict[str, dict[str, dict[str, tuple[float, int]]]] = {}
    for variable, values_of_samples in values.items():
        column = np.asarray(values_of_samples, dtype=np.float64)
        blocks: dict[
            tuple[str, int, int], list[list[int]]
        ] = {}  # prompts with equally many samples and values, as rows
        is_binary: dict[str, bool] = {}
        missing = np.isnan(column).tolist()
        for (source, _), rows in rows_of.items():
            if present := [row for row in rows if not missing[row]]:
                blocks.setdefault((source, len(rows), len(present)), []).append(present)
                is_binary[source] = is_binary.get(source, True) and bool(np.isin(column[present], (0, 1)).all())
        for (source, num_samples, _), groups in blocks.items():
            index = np.asarray(groups)
            votes = None if labels is None or source not in answered else labels[index]
            totals = sums.setdefault(source, {}).setdefault(variable, {})
            for name, per_prompt in _block_metrics(column[index], votes, seed, num_samples, is_binary[source]):
                total, count = totals.get(name, (0.0, 0))
                totals[name] = (total + float(per_prompt.sum()), count + len(per_prompt))
    return {
        source: {
            variable: {m: total / count for m, (total, count) in pairs.items()} for variable, pairs in by_name.items()
        }
        for source, by_name in sums.items()
    }


def _block_metrics(
    block: np.ndarray, labels: np.ndarray | None, seed: int, num_samples: int, is_binary: bool
) -> Iterable[tuple[str, np.ndarray]]:
    """(metric, value of each prompt) for `block` [prompts, values] and `labels` int [prompts, values] of prompts with
    `num_samples` samples."""
    num_values = block.shape[1]
    yield f"mean@{num_samples}", block.mean(axis=1)
    if num_samples == 1:
        return
    yield f"std@{num_samples}", block.std(axis=1)
    for k in _subset_sizes(num_samples):
        draws = np.random.RandomState(seed).randint(0, num_values, size=(NUM_DRAWS, k))
        for name, reduce in (("best", np.maximum), ("worst", np.minimum)):
            per_draw = _reduce_draws(block, draws, reduce)
            yield f"{name}@{k}/mean", per_draw.mean(axis=0)
            yield f"{name}@{k}/std", per_draw.std(axis=0)
        if is_binary:
            yield f"pass@{k}", _pass_at(min(k, num_values), block)
        if labels is not None:
            per_draw = _majority(block, labels, draws)
            yield f"maj@{k}/mean", per_draw.mean(axis=0)
            yield f"maj@{k}/std", per_draw.std(axis=0)


def _subset_sizes(num_samples: int) -> list[int]:
    """2, 4, 8, ... below `num_samples`, and `num_samples`."""
    sizes, k = [], 2
    while k < num_samples:
        sizes.append(k)
        k *= 2
    return [*sizes, num_samples]


def _pass_at(k: int, block: np.ndarray) -> np.ndarray:
    """[prompts]: the share of choices of `k` different samples that have a right one."""
    num_wrong, choices = (block == 0).sum(axis=1), comb(block.shape[1], k)
    return np.array([1 - comb(int(wrong), k) / choices for wrong in num_wrong])


def _reduce_draws(block: np.ndarray, draws: np.ndarray, reduce: np.ufunc) -> np.ndarray:
    """[NUM_DRAWS, prompts]: max or min over the chosen samples, one of k at a time over contiguous rows."""
    by_sample = np.ascontiguousarray(block.T)
    best: np.ndarray = by_sample[draws[:, 0]]
    for column in draws.T[1:]:
        reduce(best, by_sample[column], out=best)
    return best


def _majority(block: np.ndarray, labels: np.ndarray, draws: np.ndarray) -> np.ndarray:
    """[NUM_DRAWS, prompts]: the value of the most frequent answer among the chosen; ties go to the one chosen first."""
    (num_draws, k), num_samples = draws.shape, block.shape[1]
    times = np.zeros((num_draws, num_samples), dtype=np.float32)
    np.add.at(times, (np.arange(num_draws)[:, None], draws), k + 1)
    place = np.full((num_draws, num_samples), np.inf, dtype=np.float32)  # of a sample's first choice
    for position in reversed(range(k)):
        place[np.arange(num_draws), draws[:, position]] = position
    result = np.empty((num_draws, len(block)))
    for prompt, (values, answers) in enumerate(zip(block, labels, strict=True)):
        same = (answers[:, None] == answers[None, :]).astype(np.float32)
        # a vote counts k + 1, so the position of the first choice decides ties only
        result[:, prompt] = values[(times @ same - place).argmax(axis=1)]
    return result


def _labels(predictions: Sequence[object]) -> np.ndarray:
    """int [samples]: equal answers get equal labels."""
    number: dict[object, int] = {}
    return np.array([number.setdefault(str(p) if not isinstance(p, str) else p, len(number)) for p in predictions])


def _count(metric: str) -> int:
    """16 from "best@16/mean"."""
    return int(metric.split("@")[1].split("/")[0])
