"""Buckets that a worker on another host fetches: what arrives, who gets nothing, and the errors."""

import json
import resource
import socket
import threading
import time

import pytest
import torch

from verl.errors import ModelError
from verl.reshard import link as module
from verl.reshard.link import Link, address_towards, read_link
from verl.reshard.shared_memory import SharedBuckets

HERE = "127.0.0.1"


@pytest.fixture
def link():
    link = Link(HERE)
    yield link
    link.close()


@pytest.fixture
def buckets():
    return SharedBuckets(1 << 20)


def weights(value):
    return [
        ("a", torch.full((300, 70), value)),
        ("b", torch.arange(9, dtype=torch.bfloat16) * value),
        ("c", torch.empty(0)),
    ]


def offered(link, buckets, value):
    return json.loads(json.dumps(link.offered(buckets.write(weights(value)))))


def test_workers_fetch_each_bucket(link, buckets):
    for value in (1.0, 2.0):
        description, arrived = offered(link, buckets, value), [None, None]

        def worker(rank, description=description, arrived=arrived):
            arrived[rank] = list(read_link(description))

        workers = [threading.Thread(target=worker, args=(rank,)) for rank in range(2)]
        for thread in workers:
            thread.start()
        for thread in workers:
            thread.join(60)
        for tensors in arrived:
            assert [name for name, _ in tensors] == ["a", "b", "c"]
            assert all(torch.equal(new, old) for (_, new), (_, old) in zip(tensors, weights(value), strict=True))


def test_only_who_knows_the_token_of_the_bucket_gets_it(link, buckets):
    first = offered(link, buckets, 1.0)
    offered(link, buckets, 2.0)
    for description in (first, first | {"token": "00" * 32}, first | {"token": ""}):
        with pytest.raises(ModelError, match="Bucket 1 of the new weights cannot be fetched from 127.0.0.1:"):
            list(read_link(description))


def test_other_values_than_were_offered_are_refused(link, buckets):
    description = offered(link, buckets, 1.0)
    link._content = memoryview(bytearray(link._content))
    link._content[0] ^= 1
    with pytest.raises(ModelError, match="does not match its digest"):
        list(read_link(description))
    description["num_bytes"] = 1 << 40
    with pytest.raises(ModelError, match="which no bucket has"):
        list(read_link(description))


def test_a_link_that_is_closed_or_silent_ends_in_a_sentence(buckets, monkeypatch):
    monkeypatch.setattr(module, "_SILENCE_S", 0.2)
    link = Link(HERE)
    description = offered(link, buckets, 1.0)
    link.close()
    with socket.create_server((HERE, 0)) as silent:
        for place in (description["link"], silent.getsockname()):
            with pytest.raises(ModelError, match="set a folder that both hosts see"):
                list(read_link(description | {"link": list(place)}))


def test_clients_that_say_nothing_keep_no_worker_out(link, buckets, monkeypatch):
    """The longest silent one goes, and a process without a free file serves again once it has one."""
    monkeypatch.setattr(module, "_MOST_SILENT", 2)
    description = offered(link, buckets, 1.0)
    place = description["link"]
    silent = [socket.create_connection(place, 30) for _ in range(3)]
    assert silent[0].recv(1) == b""
    with socket.socket() as late:
        limits = resource.getrlimit(resource.RLIMIT_NOFILE)
        resource.setrlimit(resource.RLIMIT_NOFILE, (late.fileno() + 1, limits[1]))
        try:
            late.connect(tuple(place))
            time.sleep(0.2)  # connections cannot be accepted
        finally:
            resource.setrlimit(resource.RLIMIT_NOFILE, limits)
        assert [name for name, _ in read_link(description)] == ["a", "b", "c"]
    for connection in silent:
        connection.close()


def test_the_address_is_that_of_the_way_to_the_engine():
    with socket.create_server((HERE, 0)) as server:
        assert address_towards(*server.getsockname()) == HERE
