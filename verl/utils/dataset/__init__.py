"""Door: the dataset that recipes subclass, under its shorter name."""

from verl.data.dataset import RLHFDataset, collate_fn

__all__ = ["RLHFDataset", "collate_fn"]
