"""Samples of other weights do not train."""

import pytest
import torch

from verl.algorithms.correction import require_fresh
from verl.errors import ModelError

name = "abc".__getitem__


@pytest.mark.parametrize(
    ("versions", "max_age"), [([4, 4, 4], 0), ([4, 3, 2], 2), ([2, 2, 2], 5)], ids=["sync", "async", "few"]
)
def test_fresh(versions, max_age):
    require_fresh(torch.tensor(versions), 4, max_age, name)


@pytest.mark.parametrize(
    ("versions", "max_age", "words"),
    [
        ([4, 3, 4], 0, "Sample b and 0 others of 3 were made by weights of version 3, but only version 4 may"),
        ([4, 5, 5], 0, "Sample b and 1 others of 3 were made by weights of version 5"),
        ([4, 2, 1], 2, "Sample c and 0 others of 3 were made by weights of version 1, but only versions 2 to 4 may"),
    ],
)
def test_stale(versions, max_age, words):
    with pytest.raises(ModelError, match=words):
        require_fresh(torch.tensor(versions), 4, max_age, name)
