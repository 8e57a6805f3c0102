"""Base classes of a script's own order of rows: `verl.experimental.dataset.sampler`."""

from abc import ABC, abstractmethod
from collections.abc import Sized

from torch.utils.data import Sampler

from verl.data_proto.proto import DataProto


class AbstractSampler(Sampler[int], ABC):
    """Base of a sampler that `data.sampler.class_path` and `class_name` choose."""

    @abstractmethod
    def __init__(self, data_source: Sized, data_config: object): ...


class AbstractCurriculumSampler(AbstractSampler):
    """A sampler that learns from training: `update` gets each batch that has trained."""

    @abstractmethod
    def update(self, batch: DataProto) -> None: ...
