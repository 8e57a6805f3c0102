"""Rows of a script's own dataset object, as a trainer class of a project passes them: the script's fit makes samples of them.

The run knows only their number, through a file of as many rows in its folder. The rewards are the script's too.
"""

from __future__ import annotations

import itertools
import json
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import TYPE_CHECKING, Any, TypeAlias, cast

import torch

from verl.compat.models import compute_position_id_with_mask
from verl.config import LoadedConfig
from verl.data.dataset import collate_fn
from verl.data.order import prompts_per_generation
from verl.data_proto.merge import object_array
from verl.data_proto.proto import DataProto
from verl.errors import ConfigError
from verl.roles.rollout import UNSCORED, greedy, sampling_params

if TYPE_CHECKING:
    from collections.abc import Sized

    from torch.utils.data import DataLoader, Dataset, Sampler

    from verl.compat.own_fit import FitRun

Row: TypeAlias = dict[str, object]
MASKS = ("attention_mask", "response_mask", "prompt_mask")  # integers for scripts, booleans here


def counted(loaded: LoadedConfig[Any], num_rows: int) -> LoadedConfig[Any]:
    """The config of a run over `num_rows` rows of a script, which the run does not score."""
    config = loaded.config
    file = Path(config.trainer.default_local_dir).absolute() / "inputs" / "rows.jsonl"
    file.parent.mkdir(parents=True, exist_ok=True)
    shared = {"data_source": "script", "reward_model": {"ground_truth": ""}}
    rows = ({"prompt": [{"role": "user", "content": f"row {row}"}], **shared} for row in range(num_rows))
    file.write_text("".join(f"{json.dumps(row)}\n" for row in rows), encoding="utf-8")
    data = replace(config.data, train_files=str(file), val_files=None, filter_overlong_prompts=False)
    scorer = replace(config.reward.custom_reward_function, path="pkg://verl.compat.own_rows", name="no_score")
    reward = replace(config.reward, custom_reward_function=scorer, debug=True)
    return replace(loaded, config=replace(config, data=data, reward=reward))


def no_score(data_source: str, solution_str: str, ground_truth: object, extra_info: object = None) -> float:
    """The reward function of such a run: its fit has the rewards."""
    return 0.0


@dataclass(frozen=True)
class ScriptRows:
    """The datasets of a script, its function from rows to columns, and its order of the training rows. Without a dataset its
    agents make the rows of each step."""

    train: Dataset[Row] | None
    val: Dataset[Row] | None = None
    collate: Callable[[list[Row]], object] | None = None
    sampler: Sampler[int] | None = None

    def counted(self, loaded: LoadedConfig[Any]) -> LoadedConfig[Any]:
        """The config of a run over these rows."""
        if self.train is not None:
            return counted(loaded, len(cast("Sized", self.train)))
        if (number := loaded.config.actor_rollout_ref.rollout.n) > 1:
            raise ConfigError(
                f"Agents that make the rows of each turn get one sample of a row, and actor_rollout_ref.rollout.n={number} "
                "asks for more. Set it to 1, and repeat the rows of the first turn."
            )
        return of_steps(loaded, loaded.config.trainer.total_training_steps)


def of_steps(loaded: LoadedConfig[Any], steps: int | None) -> LoadedConfig[Any]:
    """The config of a run of `steps` whose script makes the rows of each. Raises ConfigError without a number."""
    if not steps or steps < 1:
        raise ConfigError("A script that makes its rows trains a number of steps: set trainer.total_training_steps.")
    trainer = replace(loaded.config.trainer, total_training_steps=steps, total_epochs=1)
    config = replace(loaded.config, trainer=trainer)
    return counted(replace(loaded, config=config), steps * prompts_per_generation(config))


def batches_of(rows: ScriptRows, dataset: Dataset[Row] | None, batch_size: int, *, sampled: bool) -> DataLoader[Row]:
    """A torch loader of a dataset, without an incomplete last batch; with `sampled` in the script's order. Raises ConfigError
    without a dataset."""
    from torch.utils.data import DataLoader

    if dataset is None:
        raise ConfigError("There are no rows for a loader: give the trainer class train_dataset.")

    sampler = rows.sampler if sampled else None
    return DataLoader(dataset, batch_size, sampler=sampler, collate_fn=rows.collate or collate_fn, drop_last=True)


def samples_of_rows(run: FitRun, batch: DataProto, step: int, numbers: Iterator[int]) -> DataProto:
    """Samples of a script's rows of tokens without scores: one of each row if a prompt has rollout.n, else rollout.n, next to
    one another. Rows of a validation have one, as its keys say. `numbers` key the random numbers of a step. Raises ConfigError
    for rows without tokens."""
    ids, validates = _prompts_of(batch), bool(batch.meta_info.get("validate"))
    params = sampling_params(run.config.actor_rollout_ref.rollout, validation=validates)
    if not batch.meta_info.get("do_sample", True):
        params = greedy(params, 1)
    repeats = [len(list(group)) for _, group in itertools.groupby(ids)]
    count = 1 if validates or all(number % params.n == 0 for number in repeats) else params.n
    ordinals = torch.tensor([next(numbers) for _ in ids])
    prompts = DataProto.from_dict({"ordinal": ordinals}, {"prompt_token_ids": object_array(ids)})
    samples = run.outside_samples(prompts, step, replace(params, n=count), UNSCORED).batch
    columns = {name: samples[name] for name in ("prompts", "responses", "rollout_log_probs")}
    columns |= {name: samples[name].long() for name in ("attention_mask", "response_mask")}
    columns["input_ids"] = torch.cat([columns["prompts"], columns["responses"]], dim=1)
    columns["position_ids"] = compute_position_id_with_mask(columns["attention_mask"])
    return DataProto.from_dict(columns, meta_info={"timing": {}})


def require_rows(batch: DataProto) -> None:
    """Raises ConfigError for a batch without rows."""
    if not len(batch):
        raise ConfigError("The batch has no rows. Give the call at least one, or leave it out in this step.")


def _prompts_of(batch: DataProto) -> Sequence[tuple[int, ...]]:
    columns = batch.batch
    if {"input_ids", "attention_mask"} <= set(columns.keys()):
        rows = zip(columns["input_ids"], columns["attention_mask"].bool(), strict=True)
        return [tuple(row[mask].tolist()) for row, mask in rows]
    if "raw_prompt_ids" not in batch.non_tensor_batch:
        raise ConfigError(
            "generate_sequences samples prompts of train_dataloader, or rows with input_ids and attention_mask. Agents with "
            "other rows reach the policy at async_rollout_manager.server_addresses."
        )
    return [tuple(map(int, ids)) for ids in batch.non_tensor_batch["raw_prompt_ids"]]


def outward(samples: DataProto, prompt_columns: set[str], seconds: float) -> DataProto:
    """Samples as the existing trainer's rollout returns them. `prompt_columns`: object columns that the script has already."""
    columns = dict(samples.batch.items())
    columns["rm_scores"] = columns.pop("token_level_scores")
    columns |= {name: columns[name].long() for name in MASKS if name in columns}
    columns["input_ids"] = columns["prompts"].new_zeros(columns["attention_mask"].shape)
    width = columns["prompts"].shape[1]
    columns["input_ids"][:, :width], columns["input_ids"][:, width:] = columns["prompts"], columns["responses"]
    columns["position_ids"] = compute_position_id_with_mask(columns["attention_mask"])
    objects = {name: values for name, values in samples.non_tensor_batch.items() if name not in prompt_columns}
    parts = list(samples.non_tensor_batch["reward_parts"])
    names = sorted({name for row in parts for name in row} - prompt_columns - set(objects))
    objects |= {name: object_array([row.get(name) for row in parts]) for name in names}
    meta: dict[str, object] = {"timing": {"generate_sequences": seconds}, "reward_extra_keys": names}
    return DataProto.from_dict(columns, objects, meta_info=meta)


class PromptIds(list[int]):
    """The tokens of a prompt, with its row of a batch."""

    def __init__(self, ids: Sequence[int], batch: DataProto, row: int):
        super().__init__(ids)
        self.batch, self.row = batch, row


def columns_of(batch: DataProto, width: int) -> Row:
    """Columns of prompts, and their tokens as datasets of earlier releases have them, padded on the left to `width`."""
    ids = [PromptIds(tokens, batch, row) for row, tokens in enumerate(batch.non_tensor_batch["prompt_token_ids"])]
    input_ids = torch.zeros(len(ids), width, dtype=torch.long)
    mask = torch.zeros_like(input_ids)
    for row, tokens in enumerate(ids):
        input_ids[row, width - len(tokens) :], mask[row, width - len(tokens) :] = torch.tensor(tokens), 1
    columns = {"input_ids": input_ids, "attention_mask": mask, "position_ids": compute_position_id_with_mask(mask)}
    return {**dict(batch.batch.items()), **batch.non_tensor_batch, **columns, "raw_prompt_ids": object_array(ids)}


def whole_rows(batch: DataProto) -> DataProto:
    """The prompts of a batch that a script has taken tokens out of, as fits of earlier releases do."""
    prompts: list[PromptIds] = list(batch.non_tensor_batch["raw_prompt_ids"])
    sources = {id(ids.batch): ids.batch for ids in prompts}
    starts = dict(zip(sources, itertools.accumulate(map(len, sources.values()), initial=0), strict=False))
    rows = DataProto.concat(list(sources.values())).select_idxs([starts[id(ids.batch)] + ids.row for ids in prompts])
    rows.meta_info = batch.meta_info
    return rows
