"""Datasets and samplers of scripts, from the section `data`. torch is imported on the first call."""

from collections.abc import Sized
from typing import Any

from verl.data.dataset import DEFAULT_SEED, open_dataset, whole_section
from verl.data_proto.tokenizer import Tokenizer
from verl.errors import ConfigError
from verl.registry import load_object


def create_rl_dataset(
    data_paths: object,
    data_config: Any,
    tokenizer: Tokenizer,
    processor: object = None,
    is_train: bool = True,
    max_samples: int = -1,
) -> Any:
    """The rows of files as RLHFDataset, or as `data.custom_cls`. Raises DataError or ConfigError."""
    config = whole_section(data_config)
    return open_dataset(
        config, data_files=data_paths, tokenizer=tokenizer, processor=processor, config=config, max_samples=max_samples
    )


def create_rl_sampler(data_config: Any, dataset: Sized) -> Any:
    """The sampler of a script's own loop over `dataset`: `data.sampler`, else with `data.shuffle` a random one seeded by
    `data.seed`, else a sequential one. Raises ConfigError for a class that is no sampler, and for a curriculum with
    loader workers: they read ahead of it."""
    import torch
    from torch.utils.data import RandomSampler, SequentialSampler

    from verl.compat.samplers import AbstractCurriculumSampler, AbstractSampler

    config = whole_section(data_config)
    custom = config.get("sampler") or {}
    if custom.get("class_path"):
        sampler_class = load_object(f"{custom['class_path']}:{custom['class_name']}")
        if not (isinstance(sampler_class, type) and issubclass(sampler_class, AbstractSampler)):
            raise ConfigError(f"data.sampler.class_name={custom['class_name']} is not a subclass of AbstractSampler.")
        if issubclass(sampler_class, AbstractCurriculumSampler) and config.get("dataloader_num_workers", 0):
            raise ConfigError(
                "A curriculum sampler needs data.dataloader_num_workers=0: workers would read rows before it is updated."
            )
        return sampler_class(data_source=dataset, data_config=data_config)
    if not config.shuffle:
        return SequentialSampler(dataset)
    generator = torch.Generator().manual_seed(DEFAULT_SEED if config.seed is None else config.seed)
    return RandomSampler(dataset, generator=generator)
