"""Checks of `verl check`, one file per topic. Each check yields lines and may raise VerlError."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from verl.config import LoadedConfig, VerlConfig

if TYPE_CHECKING:
    from verl.cli.checklist.resources import ModelShape
    from verl.data.check import DataReport


@dataclass
class Subject:
    """The config, and results of earlier checks (None before them, or where they failed)."""

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
        """Steps of the run; None while the number of rows is unknown."""
        trainer = self.config.trainer
        if trainer.total_training_steps:
            return trainer.total_training_steps
        if self.data is None or self.data.train is None:
            return None
        usable = self.data.train.num_rows
        if self.config.data.filter_overlong_prompts:
            usable -= self.data.train.num_overlong
        return trainer.total_epochs * (usable // self.config.data.train_batch_size)
