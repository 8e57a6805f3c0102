"""The data of a PPO run: tokenizer, training prompts and held-out prompts."""

from __future__ import annotations

from dataclasses import dataclass
from functools import partial
from typing import Any

from verl.agents.agents import known_loops
from verl.config import PPOConfig
from verl.config.active_keys import uses_rewards
from verl.data.dataset import load_dataset
from verl.data.loader import PromptLoader, ValidationLoader
from verl.data.order import PromptOrder
from verl.data.prompts import PromptEncoder
from verl.data.sampler_order import SamplerOrder, load_sampler
from verl.errors import ConfigError
from verl.models.load import load_tokenizer
from verl.programs.distillation import check_teachers


@dataclass
class PPOData:
    """See ProgramData. `train` is None in an evaluation, `validation` without data.val_files."""

    tokenizer: Any
    train: PromptLoader | None
    validation: ValidationLoader | None
    data_sources: list[str]
    num_steps: int = 1
    num_steps_per_epoch: int = 1

    @property
    def has_validation(self) -> bool:
        return self.validation is not None


def load_data(config: PPOConfig, *, train: bool = True) -> PPOData:
    """Read and check the data files; raises DataError or ConfigError before any model is loaded.

    A run takes trainer.total_training_steps, else total_epochs times the whole batches of an epoch.
    """
    data = config.data
    tokenizer = load_tokenizer(config.actor_rollout_ref.model)
    encoder = PromptEncoder(tokenizer, data)
    checks: Any = {"agents": known_loops(config), "scored": uses_rewards(config)}
    found = PPOData(tokenizer, None, None, [])
    sources: set[str] = set()
    if train:
        rows = load_dataset(data.train_files, tokenizer, data, max_samples=data.train_max_samples, **checks)
        if len(rows) < data.train_batch_size:
            raise ConfigError(
                f"data.train_batch_size={data.train_batch_size} is more than the {len(rows)} usable rows of "
                f"{data.train_files}. Lower it or give more data."
            )
        order: PromptOrder | SamplerOrder
        if data.sampler.class_path:
            make = partial(load_sampler, data.sampler.class_path, data.sampler.class_name, rows, data)
            order = SamplerOrder(make, len(rows), data.train_batch_size)
        else:
            order = PromptOrder(len(rows), data.seed if data.seed is not None else 42, data.shuffle)
        loader = found.train = PromptLoader(rows, encoder, order, data.train_batch_size)
        found.num_steps_per_epoch = loader.num_steps_per_epoch
        found.num_steps = (
            config.trainer.total_training_steps or config.trainer.total_epochs * loader.num_steps_per_epoch
        )
        sources |= set(rows.data_sources)
        if config.distillation.enabled:
            check_teachers(config, tokenizer, rows)
    if data.val_files:
        rows = load_dataset(data.val_files, tokenizer, data, max_samples=data.val_max_samples, **checks)
        found.validation = ValidationLoader(rows, encoder, data.val_batch_size or len(rows))
        sources |= set(rows.data_sources)
    found.data_sources = sorted(sources)
    return found
