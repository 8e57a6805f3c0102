"""Rows of a script's own dataset object, as a trainer class of a project passes them: the script's fit makes samples of them.

The run knows only their number, through a file of as many rows in its folder.
"""

from __future__ import annotations

import json
from collections.abc import Callable
from dataclasses import dataclass, replace
from pathlib import Path
from typing import TYPE_CHECKING, Any, TypeAlias

from verl.config import LoadedConfig
from verl.data.dataset import collate_fn

if TYPE_CHECKING:
    from torch.utils.data import DataLoader, Dataset, Sampler

Row: TypeAlias = dict[str, object]


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
    """The datasets of a script, its function from rows to columns, and its order of the training rows."""

    train: Dataset[Row]
    val: Dataset[Row] | None = None
    collate: Callable[[list[Row]], object] | None = None
    sampler: Sampler[int] | None = None


def batches_of(rows: ScriptRows, dataset: Dataset[Row], batch_size: int, *, sampled: bool) -> DataLoader[Row]:
    """A torch loader of a dataset, without an incomplete last batch; with `sampled` in the script's order."""
    from torch.utils.data import DataLoader

    sampler = rows.sampler if sampled else None
    return DataLoader(dataset, batch_size, sampler=sampler, collate_fn=rows.collate or collate_fn, drop_last=True)
