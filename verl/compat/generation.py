"""`main_generation`: responses to the prompts of a data file, into a parquet file. `main_eval`: their mean score.

python -m verl.trainer.main_generation data.path=prompts.parquet data.output_path=answers.parquet model.path=MODEL
python -m verl.trainer.main_eval data.path=answers.parquet custom_reward_function.path=score.py
"""

import logging
import sys
from collections.abc import Sequence
from typing import Any

from verl.cli.main import run_guarded, run_verb
from verl.compat.commands import RELEASE, Arguments
from verl.data.dataset import RLHFDataset
from verl.errors import ConfigError, DataError, RewardError, nearest

_HERE = "verl.compat.generation"
_ROLLOUT = "actor_rollout_ref.rollout"
# defaults of the older form, the one with data.path; the newer form is the training config
_OLDER = {
    f"{_ROLLOUT}.n": 5,
    f"{_ROLLOUT}.temperature": 1.0,
    f"{_ROLLOUT}.top_k": 50,
    f"{_ROLLOUT}.top_p": 0.7,
    "data.max_prompt_length": 1536,
    "data.max_response_length": 512,
    "data.truncation": "right",
}


def main_generation(argv: Sequence[str]) -> int:
    """With `data.output_path`, write the rows of `data.path` (or `data.train_files`) with a column `responses`: a list of
    `data.n_samples` (or rollout.n) strings. Without it, run `verl generate`. Returns the exit code."""
    if not any(argument.lstrip("+").startswith("data.output_path=") for argument in argv):
        return run_verb("generate", [*RELEASE, *argv])
    return run_guarded("generate", _generate, argv)


def _generate(argv: list[str]) -> int:
    from verl.cli.train import run_generate

    return run_generate([*RELEASE, *translate(argv)])


def translate(argv: Sequence[str]) -> list[str]:
    """Translate the command line of `main_generation` to the command line of `verl generate`. Raises ConfigError."""
    arguments = Arguments(argv)
    arguments.drop_config_flags(("generation", "ppo_trainer"))
    output = str(arguments.take("data.output_path"))
    if not output.endswith(".parquet"):
        raise ConfigError(f"data.output_path={output} must end in .parquet: the rows are written with their responses.")
    older = "data.path" in arguments.texts
    arguments.take("data.val_files")  # main_generation has one file, under either name
    arguments.rename("data.path" if older else "data.train_files", "data.val_files")
    arguments.rename("data.n_samples", f"{_ROLLOUT}.n")
    arguments.rename("data.batch_size", "data.val_batch_size")
    for name in ("rollout", "actor", "model"):
        arguments.rename(f"{name}.", f"actor_rollout_ref.{name}.")
    arguments.rename(f"{_ROLLOUT}.prompt_length", "data.max_prompt_length")
    arguments.rename(f"{_ROLLOUT}.response_length", "data.max_response_length")
    for key, value in _OLDER.items() if older else ():
        arguments.default(key, value)
    if "reward.custom_reward_function.path" not in arguments.texts:
        # the rows need no reference answer, and nothing is scored
        arguments.default("data.custom_cls.path", _HERE)
        arguments.default("data.custom_cls.name", Prompts.__name__)
        arguments.default("reward.custom_reward_function.path", _HERE)
        arguments.default("reward.custom_reward_function.name", no_score.__name__)
        arguments.default("reward.num_workers", 1)
    if arguments.value(f"{_ROLLOUT}.temperature") == 0:
        if arguments.value(f"{_ROLLOUT}.n", 1) != 1:
            raise ConfigError("With temperature 0 all samples of a prompt are equal; set data.n_samples=1.")
        for name in ("temperature", "top_k", "top_p"):  # no effect on greedy decoding
            arguments.take(f"{_ROLLOUT}.{name}")
        arguments.default(f"{_ROLLOUT}.do_sample", False)
    return ["--output", output, *arguments.argv()]


class Prompts(RLHFDataset):
    """Rows, read for their prompts only."""

    def __getitem__(self, item: int) -> dict[str, Any]:
        return {
            **super().__getitem__(item),
            self.config.reward_fn_key: "prompts",
            "reward_model": {"style": "model"},
            "extra_info": {},
        }


def no_score(data_source: str, solution_str: str, ground_truth: object, extra_info: object = None) -> float:
    """The score of every response when nothing is scored."""
    return 0.0


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
        return run_verb("eval", [*RELEASE, *argv])
    return run_guarded("eval", _score_and_show, argv)


def _score_and_show(argv: list[str]) -> int:
    arguments = Arguments(argv)
    arguments.drop_config_flags()
    names = [f"data.{name}" for name in _DATA]
    for key in arguments.texts:
        if key not in names and not key.startswith(_SCORING):
            raise ConfigError(f"main_eval has no key {key!r}{nearest(key, names) or '; it has ' + ', '.join(names)}")
    data = {name: arguments.take(f"data.{name}", default) for name, default in _DATA.items()}
    metrics = score_file(data, arguments.argv())
    sys.stdout.write(f"{metrics}\n")
    return 0


def score_file(data: dict[str, Any], overrides: Sequence[str] = ()) -> dict[str, float]:
    """test_score/{data source}: the mean over its rows of the mean score of a row's responses. `data` names the file (`path`)
    and its columns, `overrides` are keys of rewards. A response with a failed call gets `reward.default_score`, or without a
    default counts in no mean. Raises ConfigError, DataError or RewardError."""
    from verl.config import load_config
    from verl.data.files import read_rows
    from verl.rewards.managers.build import build_pool

    rows = read_rows(data["path"])
    requests, row_of, sources = [], [], []
    for number in range(len(rows)):
        added = _requests(rows[number], rows.place(number), number, data)
        requests += added
        row_of += [number] * len(added)
        sources.append(added[0].data_source)
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
