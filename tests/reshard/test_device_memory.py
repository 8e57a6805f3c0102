"""Buckets in memory of a GPU, simulated by memory of the host that processes can share; on a GPU, the real calls."""

import json
import subprocess
import sys

import pytest
import torch

from tests.commands import python
from tests.reshard.buckets import assert_damage_is_refused, assert_overwritten_is_refused
from tests.reshard.simulated_device import DEVICE, simulate_driver
from verl.errors import ModelError, WorkerLostError
from verl.reshard import cuda_ipc, device_memory, shared_memory
from verl.reshard.cuda_ipc import Refused
from verl.reshard.delivery import Delivery
from verl.reshard.device_memory import DeviceBuckets, on_devices, read_device_bucket
from verl.reshard.shared_memory import SharedBuckets, bucketed

BUCKET = 1 << 10


@pytest.fixture
def driver(monkeypatch):
    return simulate_driver(monkeypatch)


@pytest.fixture
def buckets(driver):
    return DeviceBuckets(BUCKET, DEVICE)


def weights(value=1.0):
    return [
        ("a", torch.full((5, 7), value)),
        ("b", torch.arange(9, dtype=torch.bfloat16) * value),
        ("c", torch.empty(0, 3)),
        ("d", torch.tensor(value, dtype=torch.float64)),
        ("e", torch.full((4, 6), value).t()),
    ]


def read(bucket):
    return read_device_bucket(on_devices(bucket))


def same(actual, expected):
    assert [name for name, _ in actual] == [name for name, _ in expected]
    assert all(torch.equal(f, e) and f.dtype == e.dtype for (_, f), (_, e) in zip(actual, expected, strict=True))


def test_tensors_come_as_they_were_written(buckets, driver):
    description = json.loads(json.dumps(on_devices(buckets.write(weights()))))
    same([(name, tensor.clone()) for name, tensor in read_device_bucket(description)], weights())
    assert description["devices"][0]["uuid"] == "GPU-0"
    assert [entry[:3] for entry in description["entries"]][:2] == [["a", "float32", [5, 7]], ["b", "bfloat16", [9]]]
    assert len(driver.segments) == 1
    assert buckets.num_bytes == BUCKET + shared_memory.HEAD_BYTES
    buckets.close()
    assert buckets.num_bytes == 0


def test_a_process_reads_its_own_without_opening_it(buckets, driver, monkeypatch):
    monkeypatch.setattr(device_memory, "_OWN", {})
    description = on_devices(buckets.write(weights()))
    same(list(read_device_bucket(description)), weights())
    assert driver.opened == []


def test_two_blocks_in_turns_and_larger_ones_for_larger_tensors(buckets, driver):
    for value in (1.0, 2.0, 3.0):
        same(list(read(buckets.write(weights(value)))), weights(value))
    assert len(driver.segments) == 2
    large = [("large", torch.randn(BUCKET))]
    same(list(read(buckets.write(large))), large)
    assert len(driver.segments) == 3
    with pytest.raises(ModelError, match="2 tensors starting at x exceed a bucket"):
        buckets.write([("x", torch.empty(BUCKET)), ("y", torch.empty(1))])


def test_a_bucket_that_is_written_over(buckets):
    assert_overwritten_is_refused(buckets, read)


def test_copies_are_complete_before_a_reader_looks_whether_the_bucket_was_written_over(buckets, monkeypatch):
    """Copies to the engine's weights are in a stream of its GPU; the writer may continue once the reader has replied."""
    events, check = [], shared_memory._check_number
    description = buckets.write([("w", torch.ones(10))])
    monkeypatch.setattr(shared_memory, "synchronize", lambda memory: events.append("complete"))
    monkeypatch.setattr(shared_memory, "_check_number", lambda *about: events.append("number") or check(*about))
    for _ in read(description):
        events.append("copy")
    assert events == ["number", "copy", "complete", "number"]


def test_numbers_that_are_not_what_was_written(buckets, driver):
    description = buckets.write([("a", torch.ones(10)), ("b", torch.ones(10))])
    assert_damage_is_refused(buckets, description, driver.segments[0].values, read)
    past_the_end = buckets.write([("a", torch.ones(10))])
    past_the_end["entries"][0][3] = 1 << 20
    with pytest.raises(ModelError, match="a in bucket 3"):
        next(read(past_the_end))


def test_memory_that_cannot_be_opened(buckets, driver):
    description = on_devices(buckets.write(weights()))
    driver.refuses = {"open"}
    with pytest.raises(
        ModelError, match=r"Bucket 1 .* GPU GPU-0, which the engine on cpu cannot open: CUDA_ERROR_PEER"
    ):
        list(read_device_bucket(description))


def test_a_description_of_the_hosts_memory_is_read_there():
    on_host = SharedBuckets(BUCKET)
    same(list(read_device_bucket(on_host.write(weights()))), weights())


class TestDelivery:
    """The way of new weights in a run of one process: device or host."""

    @pytest.fixture(params=[True, False], ids=["kept on the host", "without a copy"])
    def delivery(self, driver, request):
        return alone(keeps=request.param)

    def taken(self, delivery, values=(1.0, 2.0)):
        """The tensors of an engine after an update, and the descriptions."""
        new = [(f"{value}.{name}", tensor) for value in values for name, tensor in weights(value)]
        new += [(f"large.{i}", torch.randn(200)) for i in range(3)]
        held, descriptions = {}, []
        for description in delivery((name, tensor.double()) for name, tensor in new):
            descriptions.append(json.loads(json.dumps(description)))
            held |= {name: tensor.clone() for name, tensor in read_device_bucket(descriptions[-1])}
        same(list(held.items()), [(name, tensor.float()) for name, tensor in new])
        return descriptions

    def test_by_the_device(self, delivery, driver):
        delivery.probe(lambda description: list(read_device_bucket(description)))
        assert delivery.describe().startswith("CUDA IPC")
        for _ in range(2):
            descriptions = self.taken(delivery)
            assert len(descriptions) > 2
            assert all("devices" in d and ("segment" in d) == delivery.keeps for d in descriptions)
            for d in descriptions if delivery.keeps else ():  # a restarted process reads the copy that is kept
                del d["devices"]
                assert list(read_device_bucket(d))
        assert delivery.num_copied_bytes == (2 if delivery.keeps else 1) * sum(
            entry[4] for d in descriptions for entry in d["entries"]
        )

    def test_where_the_engine_cannot_open_it_the_host_serves(self, delivery, driver, caplog):
        driver.refuses = {"open"}
        for _ in range(2):
            delivery.probe(lambda description: list(read_device_bucket(description)))
            assert all("devices" not in d for d in self.taken(delivery))
        (record,) = caplog.records
        assert "through host memory" in record.message
        assert "CUDA_ERROR_PEER_ACCESS_UNSUPPORTED" in record.message
        assert delivery.describe().startswith("shared memory")

    def test_a_device_without_room_in_the_middle_of_an_update(self, delivery, driver, caplog):
        def first_read(description):
            list(read_device_bucket(description))
            driver.refuses = {"allocate"}

        delivery.probe(first_read)
        for buckets in delivery._on_devices:
            buckets.close()
        assert all("devices" not in d for d in self.taken(delivery))
        assert len(caplog.records) == 1

    def test_a_process_that_is_lost_in_the_trial_is_no_fallback(self, delivery):
        def lost(description):
            raise WorkerLostError("The vLLM process (pid 1) was ended.")

        with pytest.raises(WorkerLostError):
            delivery.probe(lost)


def test_each_worker_of_a_process_opens_memory_of_its_gpu(driver):
    """A run of one process, whose engine has workers on three GPUs: memory of another GPU would take a context there."""
    gpus = [torch.device("cuda", index) for index in range(3)]
    delivery = Delivery(None, DEVICE, (0,), ((0,),), torch.float32, BUCKET, devices=gpus, on_device=True)
    for description in delivery(weights()):
        for driver.thread.device in gpus:
            assert list(read_device_bucket(description))
    assert driver.opened
    assert all(place == worker for place, worker in driver.opened)
    driver.thread.device = torch.device("cuda", 7)
    with pytest.raises(ModelError, match=r"in memory of 3 GPUs, and not of GPU-7 \(cuda:7\).*CUDA_VISIBLE_DEVICES"):
        read_device_bucket(description)


def alone(**more):
    """The delivery of a run of one process, to an engine that opens memory of its GPU."""
    return Delivery(None, DEVICE, (0,), ((0,),), torch.float32, BUCKET, on_device=True, **more)


def test_where_there_is_no_driver_it_is_refused(monkeypatch):
    monkeypatch.setattr(cuda_ipc, "_LIBRARY", "libnothing.so.0")
    cuda_ipc._driver.cache_clear()
    try:
        with pytest.raises(Refused, match="no CUDA driver"):
            cuda_ipc._driver()
        with pytest.raises(Refused, match="64 bytes, not 3"):
            cuda_ipc.open_handle(b"abc", 10, torch.device("cuda", 0))
    finally:
        cuda_ipc._driver.cache_clear()


READER = """
import json, sys
from verl.reshard.device_memory import read_device_bucket
for line in sys.stdin:
    held = {name: tensor.clone() for name, tensor in read_device_bucket(json.loads(line))}
    print(json.dumps({name: [str(t.device), float(t.double().sum())] for name, t in held.items()}), flush=True)
"""


def test_the_reading_process_starts():
    """Its imports, without a GPU."""
    python("-c", READER, input="")


@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs an NVIDIA GPU")
def test_two_processes_on_a_gpu():
    """The real calls: five buckets in two blocks, a tensor larger than a block, and memory that is given back."""
    device = torch.device("cuda", torch.cuda.device_count() - 1)
    new = [(f"w{i}", torch.randn(300, 300, device=device).to(torch.bfloat16)) for i in range(10)]
    new.append(("large", torch.randn(1 << 20, device=device)))
    free_bytes = []
    command = [sys.executable, "-c", READER]
    with subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True) as reader:

        def ask(description):
            print(json.dumps(description), file=reader.stdin, flush=True)
            return json.loads(reader.stdout.readline())

        for _ in range(3):
            buckets = DeviceBuckets(400 << 10, device)
            for some in bucketed(new, 400 << 10):
                sums = ask(on_devices(buckets.write(some)))
                assert sums == {name: [str(device), float(tensor.double().sum())] for name, tensor in some}
            buckets.close()
            free_bytes.append(torch.cuda.mem_get_info(device)[0])
        reader.stdin.close()
        assert reader.wait(120) == 0
    assert free_bytes[2] == free_bytes[1], "what an update takes is given back"
    with pytest.raises(Refused):
        cuda_ipc.open_handle(b"\0" * 64, 1024, device)
