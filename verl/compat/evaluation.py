"""`main_eval`: the mean score of the responses in a data file, by data source.

python -m verl.trainer.main_eval data.path=answers.parquet custom_reward_function.path=score.py
"""

from __future__ import annotations

import logging
import sys
from collections.abc import Sequence
from typing import Any

from verl.cli.main import run_guarded, run_verb
from verl.compat.commands import Arguments
from verl.errors import ConfigError, DataError, RewardError, nearest

log = logging.getLogger(__name__)

# keys of the data file and the columns that they name
_DATA = {
    "path": None,
    "prompt_key": "prompt",
    "response_key": "responses",
    "data_source_key": "data_source",
    "reward_model_key": "reward_model",
    "use_shm": False,
}
_SCORING = ("custom_reward_function.", "reward.", "reward_model.", "sandbox_fusion.", "ray_kwargs.")


def main_eval(argv: Sequence[str]) -> int:
    """With `data.path`, score that file; else validate a model, as `verl eval` does. Returns the exit code."""
    if not any(argument.lstrip("+").startswith("data.path=") for argument in argv):
        return run_verb("eval", argv)
    return run_guarded("eval", _score_and_show, argv)


def _score_and_show(argv: list[str]) -> int:
    arguments = Arguments(argv)
    arguments.drop_config_flags()
    known = [f"data.{name}" for name in _DATA]
    for key in arguments.texts:
        if key not in known and not key.startswith(_SCORING):
            raise ConfigError(f"main_eval has no key {key!r}{nearest(key, known) or '; it has ' + ', '.join(known)}")
    data = {name: arguments.take(f"data.{name}", default) for name, default in _DATA.items()}
    metrics = score_file(data, arguments.argv())
    sys.stdout.write(f"{metrics}\n")
    return 0


def score_file(data: dict[str, Any], overrides: Sequence[str] = ()) -> dict[str, float]:
    """test_score/{data source}: the mean over its rows of the mean score of a row's responses.

    `data` names the file (`path`) and its columns, `overrides` are `reward.*` and `custom_reward_function.*` keys. Each
    call has a time limit. A response whose call fails gets `reward.default_score`, or without a default counts in no mean;
    the number of failures is logged. Raises ConfigError, DataError or RewardError.
    """
    from verl.config import load_config
    from verl.data.files import read_rows
    from verl.rewards.managers.build import build_pool

    rows = read_rows(data["path"])
    requests, row_of, sources = [], [], []
    for number in range(len(rows)):
        of_row = _requests(rows[number], rows.place(number), number, data)
        requests += of_row
        row_of += [number] * len(of_row)
        sources.append(of_row[0].data_source)
    pool = build_pool(load_config(overrides).config.reward, by_position=True)
    with pool:
        pool.start(sorted(set(sources)))
        scores = pool.score_all(requests)
    failed = [score for score in scores if score.error is not None]
    if failed:
        log.warning(
            "The scorer failed for %d of %d responses; the first: %s", len(failed), len(scores), failed[0].error
        )
    by_row: dict[int, list[float]] = {}
    for number, score in zip(row_of, scores, strict=True):
        if score.error is None or pool.default_score is not None:
            by_row.setdefault(number, []).append(score.score)
    if not by_row:
        raise RewardError(f"None of the {len(scores)} responses could be scored. The first: {failed[0].error}")
    by_source: dict[str, list[float]] = {}
    for number, values in by_row.items():
        by_source.setdefault(sources[number], []).append(sum(values) / len(values))
    return {f"test_score/{source}": sum(means) / len(means) for source, means in by_source.items()}


def _requests(row: dict[str, Any], place: str, number: int, data: dict[str, Any]) -> list[Any]:
    """One request per response of a row; a plain string is one response."""
    from verl.data_proto.samples import ScoreRequest

    for key in ("response_key", "data_source_key", "reward_model_key"):
        if data[key] not in row:
            hint = nearest(str(data[key]), row) or f"; there are {', '.join(map(str, row))}."
            raise DataError(f"{place}: there is no field {data[key]!r}{hint} data.{key} names it.")
    responses = row[data["response_key"]]
    responses = [responses] if isinstance(responses, str) else list(responses)
    reward = row[data["reward_model_key"]]
    if not responses or not isinstance(reward, dict) or "ground_truth" not in reward:
        raise DataError(f"{place}: a row needs at least one response, and {{ground_truth: ...}} to score it by.")
    return [
        ScoreRequest(
            f"{number}/{i}",
            str(row[data["data_source_key"]]),
            str(text),
            reward["ground_truth"],
            row.get("extra_info") or {},
        )
        for i, text in enumerate(responses)
    ]
