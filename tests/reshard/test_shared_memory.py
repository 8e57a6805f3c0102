"""Tensors handed to another process through memory that both have."""

import json
import os
import signal
import subprocess
import sys

import pytest
import torch

from tests.reshard.buckets import assert_damage_is_refused, assert_overwritten_is_refused
from verl.errors import ModelError, WorkerLostError
from verl.parallel.segments import SharedSegment, open_segment
from verl.reshard.shared_memory import SharedBuckets, bucketed, read_shared_bucket

# what an engine does, without the time that torch takes to start
READER = """
import mmap, os, sys
file = os.open(sys.argv[1], os.O_RDWR)
memory = mmap.mmap(file, int(sys.argv[2]))
print(memory[:5].decode(), flush=True)
sys.stdin.read()
"""


@pytest.fixture
def buckets():
    shared = SharedBuckets(1000)
    yield shared
    shared.close()


def weights():
    generator = torch.Generator().manual_seed(0)
    shapes = {"a": (7, 9), "b": (), "c": (3, 2, 5), "none": (0, 4), "large": (50, 30)}
    tensors = {name: torch.randn(shape, generator=generator) for name, shape in shapes.items()}
    return {**tensors, "narrow": tensors["a"].bfloat16(), "columns": tensors["large"][:, 3:8], "whole": torch.arange(5)}


def test_what_is_read_is_what_was_written(buckets):
    sent, received = weights(), {}
    for some in bucketed(sent.items(), 1000):
        description = json.loads(json.dumps(buckets.write(some)))
        received |= {name: tensor.clone() for name, tensor in read_shared_bucket(description)}
    assert received.keys() == sent.keys()
    for name, tensor in sent.items():
        assert received[name].dtype == tensor.dtype
        assert torch.equal(received[name], tensor), name


def test_memory_is_bounded_by_the_bucket_or_the_largest_tensor(buckets):
    small = {f"w{i}": torch.zeros(50) for i in range(40)}
    for some in bucketed(small.items(), 1000):
        assert sum(tensor.nbytes for _, tensor in some) <= 1000
        buckets.write(some)
    assert buckets.num_bytes <= 2 * 2000
    buckets.write([("large", torch.zeros(5000))])
    assert buckets.num_bytes <= 20_000 + 3000
    with pytest.raises(ModelError, match="2 tensors starting at a exceed a bucket of 1000 bytes"):
        buckets.write([("a", torch.zeros(200)), ("b", torch.zeros(200))])


def test_a_bucket_lasts_until_its_segment_is_used_again(buckets):
    assert_overwritten_is_refused(buckets, read_shared_bucket)


def test_numbers_that_are_not_what_was_written(buckets):
    description = buckets.write([("a", torch.ones(10)), ("b", torch.ones(10))])
    memory = open_segment(description["segment"], description["num_bytes"], "it")
    assert_damage_is_refused(buckets, description, memory, read_shared_bucket)


def test_a_writer_that_is_gone(buckets):
    description = buckets.write([("a", torch.ones(10))])
    buckets.close()
    with pytest.raises(WorkerLostError, match="Bucket 1 of the new weights cannot be opened .* has ended"):
        list(read_shared_bucket(description))


def test_a_reader_that_is_killed_leaves_nothing():
    segment = SharedSegment(4096)
    segment.values[:5] = torch.frombuffer(bytearray(b"hello"), dtype=torch.uint8)
    command = [sys.executable, "-c", READER, segment.path, "4096"]
    with subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True) as reader:
        assert reader.stdout.readline() == "hello\n"
        os.kill(reader.pid, signal.SIGKILL)
        assert reader.wait(timeout=120) == -signal.SIGKILL
    path = segment.path
    segment.close()
    del segment.values
    assert not os.path.exists(path)


def test_less_memory_than_was_announced():
    segment = SharedSegment(100)
    with pytest.raises(ModelError, match="it has 100 bytes where 200 were announced"):
        open_segment(segment.path, 200, "it")
    segment.close()
