"""Bases of a recipe's own order of rows."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Sized
from typing import Any

from torch.utils.data import Sampler

from verl.data_proto.proto import DataProto


class AbstractSampler(Sampler[int], ABC):
    """Base of a recipe's own order of rows (`data.sampler.class_path`, `class_name`)."""

    @abstractmethod
    def __init__(self, data_source: Sized, data_config: Any): ...


class AbstractCurriculumSampler(AbstractSampler):
    """An order that depends on what was learnt: `update` is told each batch that has trained."""

    @abstractmethod
    def update(self, batch: DataProto) -> None: ...
