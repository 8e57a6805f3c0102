"""Door: the dataset that recipes subclass; it lives in verl.data.dataset."""

from verl.data.dataset import RLHFDataset, collate_fn

__all__ = ["RLHFDataset", "collate_fn"]
