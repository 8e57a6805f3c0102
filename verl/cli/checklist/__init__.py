"""Checks of `verl check`, one file per topic. Each check yields lines and may raise VerlError."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from verl.config import FSDPConfig, LoadedConfig, ModelConfig

if TYPE_CHECKING:
    from verl.data.check import DataReport
    from verl.planner.shapes import ModelShape


@dataclass
class Subject:
    """The config, and results of earlier checks (None before them, or where they failed)."""

    loaded: LoadedConfig[Any]
    tokenizer: Any = None
    policy: ModelShape | None = None
    critic: ModelShape | None = None
    data: DataReport | None = None
    num_rows: int | None = None  # rows that train

    @property
    def config(self) -> Any:
        """The root section of the program's config."""
        return self.loaded.config

    @property
    def model(self) -> ModelConfig:
        """The section of the trained model."""
        return self.config.actor_rollout_ref.model if self.loaded.schema.name == "ppo" else self.config.model

    @property
    def engine(self) -> FSDPConfig:
        """The section of the training engine."""
        config = self.config
        return config.actor_rollout_ref.actor.fsdp_config if self.loaded.schema.name == "ppo" else config.engine

    @property
    def num_steps(self) -> int | None:
        """Steps of the run; None while the number of rows is unknown."""
        trainer = self.config.trainer
        if trainer.total_training_steps or self.num_rows is None:
            return trainer.total_training_steps
        return trainer.total_epochs * (self.num_rows // self.config.data.train_batch_size)
