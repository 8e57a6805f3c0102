"""Shared memory of Ray, NCCL and engines: looked at before they take it."""

import errno
import logging
import os
from types import SimpleNamespace

import pytest

from verl.errors import ConfigError
from verl.parallel import dev_shm
from verl.parallel.serialize import to_bytes

pytestmark = pytest.mark.seed("F3")
DOCKER = 64 << 20  # the default size in a container


@pytest.fixture
def free(monkeypatch, tmp_path):
    monkeypatch.setattr(dev_shm, "FOLDER", tmp_path)
    return lambda size: monkeypatch.setattr(dev_shm.shutil, "disk_usage", lambda path: SimpleNamespace(free=size))


def test_too_little_is_named_with_its_fix(free, caplog):
    free(DOCKER)
    dev_shm.check_size({"Ray": dev_shm.RAY_BYTES, "NCCL": dev_shm.NCCL_BYTES})
    (record,) = caplog.records
    assert "has 64 MiB free, and Ray and NCCL may need 2048" in record.getMessage()
    assert "--shm-size=8g" in record.getMessage()
    assert "emptyDir" in record.getMessage()


def test_enough_and_nothing_needed_are_silent(free, caplog):
    free(4 << 30)
    dev_shm.check_size({"Ray": dev_shm.RAY_BYTES})
    free(0)
    dev_shm.check_size({})
    assert not caplog.records


def test_none_at_all_is_refused(monkeypatch, tmp_path):
    monkeypatch.setattr(dev_shm, "FOLDER", tmp_path / "none")
    with pytest.raises(
        ConfigError,
        match=f"Ray needs shared memory, and there is no .*{os.strerror(errno.ENOENT)}.*-v /dev/shm:/dev/shm",
    ):
        dev_shm.check_size({"Ray": 1})


def test_it_cannot_be_written(free, monkeypatch):
    free(1 << 40)
    monkeypatch.setattr(dev_shm.os, "access", lambda path, mode: False)
    with pytest.raises(ConfigError, match="cannot be written. Mount it with mode 1777"):
        dev_shm.check_size({"Ray": 1})


@pytest.mark.parametrize(
    ("cards", "apart"),
    [
        ([("a", 1), ("a", 1)], []), ([("a", 1), ("b", 2)], []), ([("", 1), ("", 2)], []),
        ([("a", 1), ("b", 1), ("b", 2), ("b", 2)], [1, 2]), ([("a", 1), ("a", 2), ("a", 3)], [0, 1, 2]),
    ],
)  # fmt: skip
def test_containers_of_one_machine(cards, apart):
    assert dev_shm.ranks_apart(cards) == apart


def test_ranks_of_a_run(free, monkeypatch, caplog):
    """The first rank of a container looks at its size, rank 0 at all."""
    caplog.set_level(logging.WARNING)
    free(DOCKER)
    mine = dev_shm.card()
    monkeypatch.setattr(dev_shm, "content_of", lambda path: f"{mine[0]}\n")
    for rank, neighbours, words in ((0, [(mine[0], 77)], "Ranks 0 and 2 run on one machine"), (1, [], "")):
        caplog.clear()
        comm = SimpleNamespace(rank=rank, all_gather=lambda row, more=neighbours: [row, row, *map(to_bytes, more)])
        dev_shm.check_ranks(comm, num_gpus_per_engine=2, on_gpu=True)
        texts = [record.getMessage() for record in caplog.records]
        assert [words in text for text in texts] == ([False, True] if words else [])
        assert not words or "NCCL and the rollout engine may need 1280" in texts[0]
