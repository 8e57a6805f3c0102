"""What a check is given and what it finds out for those after it."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from verl.cli.report import Line
from verl.config import LoadedConfig, VerlConfig

if TYPE_CHECKING:
    from verl.cli.checklist.estimate import ModelShape
    from verl.data.check import DataReport


@dataclass
class Subject:
    """The configuration, and what earlier checks learnt (None until then, or where they failed)."""

    loaded: LoadedConfig
    tokenizer: Any = None
    policy: ModelShape | None = None
    critic: ModelShape | None = None
    data: DataReport | None = None

    @property
    def config(self) -> VerlConfig:
        return self.loaded.config

    @property
    def num_steps(self) -> int | None:
        """Steps of the run, or None while the number of rows is not known."""
        trainer = self.config.trainer
        if trainer.total_training_steps:
            return trainer.total_training_steps
        if self.data is None or self.data.train is None:
            return None
        usable = self.data.train.num_rows
        if self.config.data.filter_overlong_prompts:
            usable -= self.data.train.num_overlong
        return trainer.total_epochs * (usable // self.config.data.train_batch_size)


Check = Callable[[Subject], Iterator[Line]]
