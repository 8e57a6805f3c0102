"""Batches for dispatch tests, and a group that is only a shape."""

from dataclasses import dataclass, field

import numpy as np
import torch

from verl.data_proto.proto import DataProto
from verl.parallel.balance import TokenCost
from verl.parallel.mesh import Mesh


@dataclass
class Shape:
    mesh: Mesh
    cost: TokenCost = field(default_factory=lambda: TokenCost(96))
    schedule: object = None
    beside_rollout: bool = True
    reads_records: bool = False

    @property
    def world_size(self):
        return self.mesh.size


def make_batch(num_rows, n=1, seed=0, **meta):
    """Rows of prompts and responses of unequal length, `n` neighbouring rows of one prompt."""
    rng = np.random.default_rng(seed)
    names = np.arange(num_rows) // n
    prompts, responses = rng.integers(1, 9, size=num_rows)[names], rng.integers(1, 13, size=num_rows)
    prompt_mask = torch.from_numpy(np.arange(8)[None, ::-1] < prompts[:, None])
    response_mask = torch.from_numpy(np.arange(12)[None] < responses[:, None])
    return DataProto.from_dict(
        {
            "row": torch.arange(num_rows),
            "ordinal": torch.from_numpy(names + 100),
            "prompt_mask": prompt_mask,
            "response_mask": response_mask,
            "attention_mask": torch.cat([prompt_mask, response_mask], dim=1),
            "rollout_rank": torch.from_numpy(rng.integers(0, 2, size=num_rows)),
        },
        {"uid": [str(name) for name in names], "note": [{"row": i} for i in range(num_rows)]},
        meta,
    )


def rows_of(batch):
    return batch.batch["row"].tolist()
