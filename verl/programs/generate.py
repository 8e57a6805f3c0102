"""`verl generate`: samples for the held-out prompts, with their scores, into a file."""

import logging
import os
import statistics
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

from verl.config import LoadedConfig, PPOConfig
from verl.data.files import write_parquet
from verl.data_proto.sample_rows import sample_rows
from verl.errors import ConfigError
from verl.foreign_text import quoted
from verl.manifest import put_in_place
from verl.parallel.torch_settings import run_settings
from verl.programs.api import ProgramSpecs
from verl.programs.collect import VALIDATION_STEP, generate_samples
from verl.programs.ppo import PPO
from verl.programs.ppo_data import PPOData, load_data
from verl.programs.ppo_roles import PPORoles
from verl.registry import reference_to
from verl.regular_files import kind_of, make_folder, sync_file
from verl.rewards.functions import FUNCTION_LIST, no_reward
from verl.rewards.scorers.route import find_scorer
from verl.roles.rollout import sampling_params
from verl.runtime.api import open_runtime
from verl.tracking.files import json_text

log = logging.getLogger(__name__)


@run_settings()
def generate(loaded: LoadedConfig[Any], output: Path) -> str:
    """Sample from the prompts of data.val_files as rollout.* says, and write the samples with their scores to `output`; a
    sentence with their number and mean score, "" on ranks that write nothing."""
    config = loaded.config
    kind, named = kind_of(output), config.data.val_files or []
    if kind not in (None, "a file"):
        raise ConfigError(f"The output {output} is {kind}; name a file to write the samples to.")
    prompts = [Path(name).expanduser() for name in ([named] if isinstance(named, str) else named)]
    if kind and any(file.exists() and file.samefile(output) for file in prompts):
        raise ConfigError(f"The output {output} is a file of data.val_files; name another one.")
    data = load_data(config, train=False, scored=_names_reward(config))
    if data.validation is None:
        raise ConfigError("Generation needs prompts: set data.val_files.")
    unscored = [] if _names_reward(config) else [name for name in data.data_sources if find_scorer(name) is None]
    data.data_sources = [name for name in data.data_sources if name not in unscored]
    if not data.data_sources:
        config = _without_reward(config)
    with open_runtime(ProgramSpecs(PPO, config)) as runtime:
        roles = runtime.build_roles(total_steps=1, data_sources=data.data_sources, train=False)
        try:
            target = output if runtime.is_rank_zero else Path(os.devnull)
            scores = _write_samples(config, PPORoles.of(roles), data, target)
        finally:
            roles.close()
    if not runtime.is_rank_zero:
        return ""
    if unscored:
        log.info("Tasks without a built-in scorer, whose samples have no score: %s.", ", ".join(map(quoted, unscored)))
    mean = f", mean score {statistics.mean(numbers):.3f}" if (numbers := [s for s in scores if s is not None]) else ""
    return f"{len(scores)} samples of {data.validation.num_rows} prompts{mean}: {output}"


def _names_reward(config: PPOConfig) -> bool:
    """Whether the config names a reward. Without one only rows with a reference answer for a built-in scorer are scored."""
    return config.reward.custom_reward_function.path is not None or config.reward.reward_model.enable


def _without_reward(config: PPOConfig) -> PPOConfig:
    """`config` with a reward of 0 for every response."""
    named: dict[str, Any] = {
        "path": FUNCTION_LIST,
        "name": "score_lists",
        "reward_kwargs": {"functions": [reference_to(no_reward)]},
    }
    function = replace(config.reward.custom_reward_function, **named)
    manager = replace(config.reward.reward_manager, name="batch")
    return replace(config, reward=replace(config.reward, custom_reward_function=function, reward_manager=manager))


def _write_samples(config: PPOConfig, roles: PPORoles, data: PPOData, output: Path) -> list[float | None]:
    """One JSON line per sample; into a .parquet file the rows of the data, each with its `responses`. Returns the scores."""
    assert data.validation is not None
    make_folder(output.parent)
    scores: list[float | None] = []
    if output.suffix == ".parquet":
        responses: dict[int, list[str]] = {}
        for row in _samples(config, roles, data):
            responses.setdefault(row["ordinal"], []).append(row["response"])
            scores.append(row["score"])
        write_parquet(output, [{**data.validation.row(n), "responses": texts} for n, texts in responses.items()])
        return scores
    writes = output != Path(os.devnull)
    unfinished = output.with_name(f"{output.name}.part") if writes else output
    with unfinished.open("w", encoding="utf-8") as file:
        for row in _samples(config, roles, data):
            file.write(json_text(row) + "\n")
            scores.append(row["score"])
    if writes:
        sync_file(unfinished)
        put_in_place(unfinished, output)
    return scores


def _samples(config: PPOConfig, roles: PPORoles, data: PPOData) -> Iterator[dict[str, Any]]:
    """A row for each sample of the validation prompts, with its score, prompt by prompt."""
    assert data.validation is not None
    params = sampling_params(config.actor_rollout_ref.rollout)
    for prompts in data.validation:
        batch = generate_samples(roles.rollout, prompts, params, step=VALIDATION_STEP, split="generate")
        rows = sample_rows(batch.union(roles.reward.collect(batch)), data.tokenizer)
        yield from rows if data.data_sources else ({**row, "score": None} for row in rows)
