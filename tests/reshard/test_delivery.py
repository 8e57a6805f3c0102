"""New weights between ranks and to engines: what crosses which link, whose memory is opened, how often anything is copied.
Ranks are threads, hosts are names, and GPUs are simulated (tests/reshard/simulated_device.py)."""

import json
import threading
from collections import Counter, defaultdict
from functools import partial
from types import SimpleNamespace

import pytest
import torch

from tests.reshard.simulated_device import simulate_driver
from tests.runtime.threaded import THREAD, Broadcasts, on_ranks
from verl.errors import ModelError
from verl.reshard import delivery as module
from verl.reshard import shared_memory
from verl.reshard.delivery import Delivery
from verl.reshard.delta import apply, changes
from verl.reshard.device_memory import read_device_bucket
from verl.reshard.route import Route

BUCKET = 1 << 10
SIZES = (300, 120, 100, 1, 40)  # the first tensor is larger than a bucket
MODEL_BYTES = 4 * sum(SIZES)
# name -> ranks that train, ranks of each engine, first rank of the host of each rank
PLACEMENTS = {
    "together": ((0, 1, 2, 3), ((0, 1), (2, 3)), (0, 0, 0, 0)),
    "apart": ((0, 1), ((2, 3), (4, 5)), (0, 0, 2, 2, 4, 4)),
    "apart on one host": ((0, 1), ((2, 3),), (0, 0, 0, 0)),
    "some train": ((0, 1), ((0, 1), (2, 3)), (0, 0, 0, 0)),
    "with other roles": ((1,), ((0,),), (0, 1, 1)),
}


@pytest.fixture
def driver(monkeypatch):
    return simulate_driver(monkeypatch)


@pytest.fixture
def links(monkeypatch):
    stub = Broadcasts()
    monkeypatch.setattr(module, "dist", stub)
    return stub


def new_weights(version):
    return [(f"w{i}", torch.full((size,), version + i / 8)) for i, size in enumerate(SIZES)]


def few_changes(version):
    """As `new_weights(0)`, with one value in fifty of a version."""
    weights = new_weights(0)
    for _, tensor in weights:
        tensor[::50] += version
    return weights


def equal(actual, version, weights=new_weights):
    expected = weights(version)
    return [name for name, _ in actual] == [name for name, _ in expected] and all(
        torch.equal(tensor, other) for (_, tensor), (_, other) in zip(actual, expected, strict=True)
    )


def sent(name, monkeypatch, *, on_device=False, num_updates=2, read=None, weights=new_weights, cuts=None, **settings):
    """Deliveries of the ranks of a placement after updates that each engine has read, with its workers in turn. In update
    `cuts` all ranks stop after a bucket."""
    trains, replicas, hosts = PLACEMENTS[name]
    monkeypatch.setattr(module, "hosts_of", lambda comm: dict(enumerate(hosts)))

    def rank(comm):
        device = torch.device("cuda", comm.rank) if on_device else torch.device("cpu")
        delivery = Delivery(
            comm, device, trains, replicas, torch.float32, BUCKET, timeout_s=9, on_device=on_device, **settings
        )
        delivery.connect()
        engine = next((ranks for ranks in replicas if ranks[0] == comm.rank), ())
        delivery.probe((lambda bucket: list(read_device_bucket(bucket))) if engine and not on_device else None)
        delivery.buckets, delivery.received = [], []
        for version in range(num_updates):
            held = {worker: [] for worker in engine}
            delivery.buckets.clear()
            update = delivery(weights(version) if comm.rank in trains else ())
            if version == cuts:
                next(update)
                update.close()
                continue
            for bucket in update:
                bucket = json.loads(json.dumps(bucket))
                for worker in engine:
                    held[worker] += (read or read_as)(worker, bucket)
                delivery.buckets.append({key: value for key, value in bucket.items() if key != "devices"})
            assert all(equal(tensors, version, weights) for tensors in held.values())
            delivery.received.append(delivery.num_received_bytes)
        return delivery

    return on_ranks(len(hosts), rank)


def check_told(deliveries, replicas):
    """The ranks that take weights tell of each copied byte once, whichever rank copies it."""
    takes = [delivery for ranks in replicas for delivery in (deliveries[rank] for rank in ranks)]
    told = sum(delivery.num_copied_bytes + delivery.num_other_bytes for delivery in takes)
    assert told == sum(delivery.num_copied_bytes for delivery in deliveries)


def read_as(worker, bucket):
    return [(name, tensor.clone()) for name, tensor in read_device_bucket(bucket)]


def read_on(driver, worker, bucket):
    driver.thread.device = torch.device("cuda", worker)
    return read_as(worker, bucket)


@pytest.mark.parametrize("name", PLACEMENTS)
def test_without_gpus_a_host_gets_each_byte_once_and_has_it_once(name, links, monkeypatch):
    trains, replicas, hosts = PLACEMENTS[name]
    deliveries = sent(name, monkeypatch)
    assert len(deliveries[0].buckets) > 2
    far = sorted({hosts[rank] for ranks in replicas for rank in ranks} - {hosts[rank] for rank in trains})
    once = pytest.approx(2 * MODEL_BYTES, abs=2 * 64 * len(SIZES))  # of two updates, with the gaps of alignment
    assert links.received == {(trains[0], rank): once for rank in far}, "to the first rank of a host"
    for rank, delivery in enumerate(deliveries):
        writes = rank == trains[0] and (bool(far) or any(hosts[r] == hosts[rank] for ranks in replicas for r in ranks))
        assert delivery.num_copied_bytes == (MODEL_BYTES if writes else 0)
        assert delivery.num_received_bytes == sum(n for (_, r), n in links.received.items() if r == rank) // 2
    check_told(deliveries, replicas)


@pytest.mark.parametrize("name", PLACEMENTS)
def test_each_gpu_gets_each_byte_once_and_a_worker_opens_memory_of_its_gpu(name, links, driver, monkeypatch):
    trains, replicas, hosts = PLACEMENTS[name]
    to_bytes = []
    monkeypatch.setattr(
        module, "to_bytes", lambda value, pack=module.to_bytes: to_bytes.append(pack(value)) or to_bytes[-1]
    )
    deliveries = sent(name, monkeypatch, on_device=True, read=partial(read_on, driver))
    assert len(driver.opened) > 3
    for rank, delivery in enumerate(deliveries):
        writes = rank in trains and any(rank in group for group in (*replicas, *(g[:1] for g in delivery.route.groups)))
        assert delivery.num_copied_bytes == (MODEL_BYTES if writes else 0), (
            "an engine opens what a broadcast has filled"
        )
    check_told(deliveries, replicas)
    assert all(place == worker for place, worker in driver.opened)
    receivers = [rank for ranks in replicas for rank in ranks if rank not in trains]
    assert max(links.received.values(), default=0) <= 2 * (MODEL_BYTES + 64 * len(SIZES))
    assert sorted(rank for _, rank in links.received) == sorted(receivers), "one sender for each"
    for sender, rank in links.received:
        assert sender == trains[0] or hosts[sender] == hosts[rank], "a host gets it once, and passes it on"
    assert max(map(len, to_bytes)) < 3000, "descriptions, no tensors"


@pytest.mark.parametrize("on_device", [False, True])
def test_an_update_is_kept_once_in_the_memory_of_a_host(on_device, links, driver, monkeypatch):
    name = "apart"
    _, replicas, hosts = PLACEMENTS[name]
    deliveries = sent(name, monkeypatch, on_device=on_device, keeps=True, read=partial(read_on, driver))
    for ranks in replicas:  # a new process of the engine reads it
        again = [pair for bucket in deliveries[ranks[0]].buckets for pair in read_as(ranks[0], bucket)]
        assert equal(again, 1)
    on_host = dict.fromkeys(hosts, 0)
    for rank, delivery in enumerate(deliveries):
        on_host[hosts[rank]] += sum(block.values.nbytes for block in delivery._on_host._blocks if block is not None)
    for ranks in replicas:
        assert MODEL_BYTES <= on_host[hosts[ranks[0]]] < 2 * MODEL_BYTES


@pytest.mark.parametrize("on_device", [False, True])
@pytest.mark.parametrize("name", PLACEMENTS)
def test_only_changes_travel_to_other_hosts(name, on_device, links, driver, monkeypatch):
    trains, replicas, hosts = PLACEMENTS[name]
    read, more = partial(read_on, driver), {"num_updates": 3, "weights": few_changes, "delta": True}
    deliveries = sent(name, monkeypatch, on_device=on_device, read=read, **more)
    far = {hosts[rank] for ranks in replicas for rank in ranks} - {hosts[rank] for rank in trains}
    assert all(delivery.delta == bool(far) for delivery in deliveries)
    assert ("only changes" in deliveries[0].describe()) == bool(far)
    for rank in far:
        first, *later = deliveries[rank].received
        assert first >= MODEL_BYTES
        assert max(later) < MODEL_BYTES / 5
        assert deliveries[rank]._on_host.num_bytes >= MODEL_BYTES, "what changes apply to"
        again = [pair for bucket in deliveries[rank].buckets for pair in read_as(rank, bucket)]
        assert equal(again, 2, few_changes) or on_device


@pytest.mark.parametrize("on_device", [False, True])
def test_after_an_update_that_was_cut_off_all_travels(on_device, links, driver, monkeypatch):
    read = partial(read_on, driver)
    more = {"num_updates": 4, "weights": few_changes, "delta": True, "cuts": 1}
    deliveries = sent("with other roles", monkeypatch, on_device=on_device, read=read, **more)
    first, second, third = deliveries[0].received
    assert first == second >= MODEL_BYTES
    assert third < MODEL_BYTES / 5


def test_a_receiver_with_other_values_than_the_sender_is_found_out(links, monkeypatch):
    """Changes to other values would make weights that no update has made."""

    def read(worker, bucket):
        tensors = read_as(worker, bucket)
        shared_memory.open_segment(bucket["segment"], bucket["num_bytes"], "it")[-1000:] += 1
        return tensors

    with pytest.raises(ModelError, match="does not match its digest"):
        sent("with other roles", monkeypatch, read=read, weights=few_changes, delta=True)


def test_changes_are_sent_where_they_are_fewer_bytes():
    torch.manual_seed(0)
    before = torch.randint(0, 256, (1 << 19,), dtype=torch.uint8)
    for num_changes, is_smaller in ((0, True), (1000, True), (80_000, True), (200_000, False)):
        words = before.view(torch.int16).clone()
        words[torch.randperm(len(words))[:num_changes]] ^= -1
        patch = changes(before, words.view(torch.uint8))
        assert (patch is not None) == is_smaller
        if patch is not None:
            assert patch.nbytes == 4 * 4 + 4 * num_changes, (
                "a count for each block, a place and a value for each change"
            )
            patched = before.clone()
            apply(patch, patched)
            assert torch.equal(patched.view(torch.int16), words)


def test_no_rank_gathers_while_an_engine_reads(links, monkeypatch):
    """A rank that waits for a gather in NCCL would hold the GPU of the engine's worker. The engine reads a bucket until the
    other rank has come to the meeting, or has gathered without it."""
    monkeypatch.setattr(module, "hosts_of", lambda comm: {0: 0, 1: 0})
    events, ahead = [], [threading.Event() for _ in range(9)]

    def rank(comm):
        def gather():
            for number, pair in enumerate(new_weights(0)):
                events.append("gather")
                if comm.rank == 1 and number > 2:
                    ahead[number - 3].set()
                yield pair

        def meet(flag, meet=comm.any):
            if comm.rank == 1:
                next(meetings).set()
            return meet(flag)

        meetings, comm.any = iter(ahead), meet
        delivery = Delivery(comm, torch.device("cpu"), (0, 1), ((0, 1),), torch.float32, BUCKET)
        delivery.connect()
        for number, bucket in enumerate(delivery(gather())):
            if comm.rank == 0:
                events.append("read")
                assert ahead[number].wait(60)
                assert list(read_device_bucket(bucket))
                events.append("has read")

    on_ranks(2, rank)
    assert events.count("read") > 1
    assert all(events[i + 1] == "has read" for i, event in enumerate(events) if event == "read")


@pytest.mark.parametrize("on_device", [False, True])
@pytest.mark.parametrize("name", ["apart", "apart on one host", "with other roles"])
def test_the_next_bucket_travels_while_an_engine_reads(name, on_device, links, driver, monkeypatch):
    if name == "apart on one host" and not on_device:
        pytest.skip("one memory")
    begun, num_read, broadcast = Counter(), Counter(), links.broadcast

    def count(values, source, *, group, async_op):
        begun[THREAD.rank] += 1
        return broadcast(values, source, group=group, async_op=async_op)

    def read(worker, bucket):
        num_read[worker] += 1
        if worker == THREAD.rank == first:
            ahead.append(begun[worker] - num_read[worker])
        return read_on(driver, worker, bucket)

    links.broadcast, ahead, first = count, [], PLACEMENTS[name][1][0][0]
    relays = name == "apart" and on_device  # it sends each bucket on, besides
    sent(name, monkeypatch, on_device=on_device, num_updates=1, read=read)
    assert len(ahead) > 2
    steps = [number * relays for number in range(1, len(ahead) + 1)]
    assert [more - step for more, step in zip(ahead, steps, strict=True)] == [1] * (len(ahead) - 1) + [0]


@pytest.mark.parametrize("name", PLACEMENTS)
def test_a_bucket_is_complete_on_each_gpu_before_an_engine_reads(name, links, driver, monkeypatch):
    """NCCL and copies work in streams of a GPU, and a worker's process knows nothing of them."""
    events, broadcast = defaultdict(list), links.broadcast

    def note(memory):
        events[THREAD.rank].append("complete")

    def noted(values, source, *, group, async_op):
        work = broadcast(values, source, group=group, async_op=async_op)

        def wait(rank=THREAD.rank):
            work.wait()
            events[rank].append("arrived")

        return SimpleNamespace(wait=wait)

    def read(worker, bucket):
        assert events[worker][-1] == "complete"
        tensors = read_on(driver, worker, bucket)
        events[worker] = ["read"]
        return tensors

    links.broadcast = noted
    monkeypatch.setattr(module, "synchronize", note)
    monkeypatch.setattr(shared_memory, "synchronize", note)
    sent(name, monkeypatch, on_device=True, num_updates=1, read=read)
    assert events


def test_tensors_for_engines_that_take_no_buckets(links, monkeypatch):
    for name in ("apart", "some train", "with other roles"):
        trains, replicas, hosts = PLACEMENTS[name]
        monkeypatch.setattr(module, "hosts_of", lambda comm, hosts=hosts: dict(enumerate(hosts)))

        def rank(comm, trains=trains, replicas=replicas):
            delivery = Delivery(comm, torch.device("cpu"), trains, replicas, torch.float32, BUCKET)
            delivery.connect()
            return [list(delivery.tensors(new_weights(v) if comm.rank in trains else ())) for v in range(2)]

        takes = [rank for ranks in replicas for rank in ranks]
        for number, updates in enumerate(on_ranks(len(hosts), rank)):
            assert all(equal(tensors, v) if number in takes else not tensors for v, tensors in enumerate(updates))


def test_one_gpu_that_cannot_share_its_memory_sends_all_by_their_hosts(links, driver, monkeypatch, caplog):
    allocate = driver.allocate

    def refuse(num_bytes, device):
        driver.refuses = {"allocate"} if device.index == 3 else set()
        return allocate(num_bytes, device)

    monkeypatch.setattr(module.DeviceBuckets.allocate.__globals__["cuda_ipc"], "allocate", refuse)
    monkeypatch.setattr(torch, "empty", lambda *size, empty=torch.empty, device=None, **more: empty(*size, **more))
    deliveries = sent("together", monkeypatch, on_device=True)
    assert not any(delivery.on_device for delivery in deliveries)
    (record,) = caplog.records
    assert "cannot open memory of cuda:3 (CUDA_ERROR_OUT_OF_MEMORY)" in record.message


def test_routes_are_named():
    by_host = Route.of((0, 1), (2, 3, 4, 5), {0: 0, 1: 0, 2: 2, 3: 2, 4: 2, 5: 5}, by_device=True)
    assert by_host.link == (0, 2, 5)
    assert by_host.nodes == ((2, 3, 4),)
    assert by_host.roots == {2: 2, 3: 2, 4: 2, 5: 5}
    beside = Route.of((0,), (0, 1), {0: 0, 1: 0}, by_device=True)
    assert (beside.link, beside.nodes, beside.groups) == ((0,), ((0, 1),), [(0, 1)])
