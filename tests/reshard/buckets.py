"""Assertions on buckets in memory of a host and of a GPU. `read` has (name, tensor) of a description of a bucket."""

import pytest
import torch

from verl.errors import ModelError
from verl.parallel.segments import as_values


def assert_overwritten_is_refused(buckets, read):
    descriptions = [buckets.write([("w", torch.full((10,), float(i)))]) for i in range(3)]
    for i in (1, 2):
        assert [float(tensor[0]) for _, tensor in read(descriptions[i])] == [i]
    with pytest.raises(ModelError, match="Bucket 1 of the new weights was overwritten before it was read"):
        list(read(descriptions[0]))
    late = read(descriptions[2])
    next(late)
    buckets.write([("w", torch.zeros(10))])
    buckets.write([("w", torch.zeros(10))])
    with pytest.raises(ModelError, match="overwritten"):  # a copy made meanwhile is invalid
        next(late)


def assert_damage_is_refused(buckets, description, memory, read):
    """Of the first bucket, with ten ones each of a and b, whose bytes are `memory`, and of a second one."""
    as_values(memory, description["entries"][1][3], 40, torch.int32)[3] ^= 1
    tensors = read(description)
    assert next(tensors)[0] == "a"
    with pytest.raises(ModelError, match="b in bucket 1 of the new weights does not match its digest"):
        next(tensors)
    swapped = buckets.write([("a", torch.ones(10)), ("b", torch.zeros(10))])
    first, second = swapped["entries"]
    first[3], second[3] = second[3], first[3]
    with pytest.raises(ModelError, match="a in bucket 2"):
        next(read(swapped))
