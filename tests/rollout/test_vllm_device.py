"""vLLM and memory of a GPU: new weights by buckets there, which the engine opens or refuses; who is asleep; whose GPU is meant.
With two workers that share the model, each reads every bucket, and what both hold is checked. The GPU, vLLM and its processes
are simulated; workers are threads."""

import contextlib
import json
import sys
import threading
from concurrent.futures import ThreadPoolExecutor
from types import SimpleNamespace

import pytest
import torch

from tests.reshard.simulated_device import DEVICE, simulate_driver
from tests.rollout.conftest import EOS, make_prompts
from tests.rollout.simulated import transfer_of_run
from tests.rollout.test_vllm_restart import PARAMS, SimulatedProcess, builder, lost, one_step
from verl.config import RolloutConfig, load_config
from verl.errors import ConfigError, ModelError
from verl.parallel.placement import Placement
from verl.parallel.serialize import to_bytes
from verl.programs.ppo_roles import ppo_roles
from verl.reshard.delivery import Delivery
from verl.reshard.device_memory import read_device_bucket
from verl.reshard.shared_memory import SharedBuckets, bucketed
from verl.rollout.vllm import weight_check as held
from verl.rollout.vllm.core import Core, Setup, undisturbed
from verl.rollout.vllm.settings import make_setup
from verl.rollout.vllm.weights import OWN_READERS, Manifest, OwnWeightReceiver, WeightReceiver
from verl.runtime.rank import RankContext
from verl.runtime.rank_workers import _with_device_names

BUCKET = 1 << 14


@pytest.fixture
def driver(monkeypatch):
    return simulate_driver(monkeypatch)


class SimulatedProcessOnDevice(SimulatedProcess):
    def try_bucket(self, bucket):
        self.processes.note("try")
        assert list(read_device_bucket(bucket))

    def update(self, bucket):
        self.processes.note("update")
        self.processes.ways.append(sorted({"devices", "segment"} & set(bucket)))
        self.weights |= {name: tensor.clone() for name, tensor in read_device_bucket(bucket)}
        self.manifest.add(bucket)


@pytest.fixture
def make(load, tokenizer, monkeypatch, driver):
    def sending():
        delivery = Delivery(None, DEVICE, (0,), ((0,),), torch.float32, BUCKET, keeps=True, on_device=True)
        return {"write_buckets": delivery, "probe": delivery.probe}

    return builder(load, tokenizer, monkeypatch, SimulatedProcessOnDevice, sending, DEVICE)


def test_weights_go_by_the_gpu_and_a_lost_process_gets_the_hosts_copy(make, load):
    """The process is lost at each call of two steps in turn."""
    module = load("llama")
    rollout, undisturbed_run = make()
    expected = [one_step(rollout, module, version) for version in (1, 2)]
    calls = undisturbed_run.calls
    assert calls[:3] == ["start", "try", "begin"]
    assert calls.count("try") == 1
    assert undisturbed_run.ways == [["devices", "segment"]] * calls.count("update")
    for number in range(2, len(calls) + 1, 3):
        rollout, processes = make()
        processes.script = {number: lost()}
        assert [one_step(rollout, module, version) for version in (1, 2)] == expected, calls[number - 1]
        assert all(torch.equal(processes.started[-1].weights[name], p) for name, p in module.named_parameters())
        sent_again = processes.ways.count(["segment"])
        assert sent_again == sum(way == ["segment"] for way in processes.ways)
        if calls[number - 1] in ("sample", "sleep"):
            assert sent_again, "what the process had is sent again from the host"


def test_an_engine_that_cannot_open_it_gets_the_hosts_memory(make, load, driver, caplog):
    rollout, processes = make()
    driver.refuses = {"open"}
    for version in (1, 2):
        one_step(rollout, load("llama"), version)
    assert processes.ways
    assert all(way == ["segment"] for way in processes.ways)
    assert len(caplog.records) == 1
    assert rollout.generate(make_prompts([3]), PARAMS, step=3)


def test_only_an_engine_of_our_own_opens_memory_of_a_gpu():
    """Its handles go to the driver as they come; any client of a service could invent them."""
    _, copy = transfer_of_run(
        "actor_rollout_ref.rollout.name=vllm", "actor_rollout_ref.actor.fsdp_config.dtype=float32", device="cuda:0"
    )
    assert set(OWN_READERS) - set(WeightReceiver.verl_readers) == {copy.reader}
    message = json.dumps({"reader": copy.reader, "bucket": {"entries": [], "number": 1, "devices": []}})
    with pytest.raises(ModelError, match="'verl.reshard.device_memory:read_device_bucket' is not a reader"):
        WeightReceiver.verl_load.__wrapped__(WeightReceiver(), message)
    with pytest.raises((RuntimeError, AssertionError)):  # it looks for the GPU of this process
        OwnWeightReceiver.verl_try.__wrapped__(OwnWeightReceiver(), message)


class SimulatedLLM:
    def __init__(self):
        self.calls = []

    def sleep(self, level):
        self.calls.append(("sleep", level))

    def wake_up(self, tags):
        self.calls.append(("wake", tags))

    def reset_prefix_cache(self):
        return True

    def collective_rpc(self, method, args):
        self.calls.append(method)
        return [{}]


def test_the_cache_sleeps_on_while_weights_come():
    core = object.__new__(Core)
    core.setup, core._asleep, core._llm = SimpleNamespace(sleeps=True, reader="module:function"), set(), SimulatedLLM()
    core.sleep()
    core.sleep()
    core.begin_update()
    core.finish_update("digest")
    core.wake()
    core.wake()
    assert core._llm.calls == [("sleep", 1), ("wake", ["weights"]), "verl_begin", "verl_finish", ("wake", ["kv_cache"])]
    core._llm.calls.clear()
    core.sleep()
    core.wake()
    assert core._llm.calls == [("sleep", 1), ("wake", ["kv_cache", "weights"])]
    core.sleep()
    core.begin_update()
    core._llm.calls.clear()
    core.sleep()  # an update that did not end well, or none was generated with
    assert core._llm.calls == [("wake", ["kv_cache"]), ("sleep", 1)]
    core.begin_update()
    core._llm.calls.clear()
    core.sleep(discards=True)
    assert core._llm.calls == [("wake", ["kv_cache"]), ("sleep", 2)]


@pytest.mark.parametrize(
    ("mode", "visible", "expected"),
    [("async", None, "1"), ("async", "4,6", "6"), ("async", "GPU-a,GPU-b", "GPU-b"), ("sync", "4,6", None)],
)
def test_the_engine_takes_the_gpu_of_its_rank(mode, visible, expected, load, monkeypatch):
    monkeypatch.delenv("CUDA_VISIBLE_DEVICES", raising=False)
    if visible is not None:
        monkeypatch.setenv("CUDA_VISIBLE_DEVICES", visible)
    keys = ["rollout.name=vllm", f"rollout.mode={mode}", "actor.fsdp_config.dtype=float32"]
    _, transfer = transfer_of_run(*(f"actor_rollout_ref.{key}" for key in keys), device="cuda:1")
    setup = make_setup(RolloutConfig(), transfer, load("llama"), eos_token_ids=(EOS,), vocab_size=300)
    assert setup.environment.get("CUDA_VISIBLE_DEVICES") == expected


def spanning(device, load, *names):
    """The environment of an engine process that spans two GPUs of its run."""
    keys = ["rollout.name=vllm", "rollout.tensor_model_parallel_size=2", "actor.fsdp_config.dtype=float32"]
    keys = (f"actor_rollout_ref.{key}" for key in keys)
    config, transfer = transfer_of_run(*keys, device=device, visible_devices=names)
    setup = make_setup(config.actor_rollout_ref.rollout, transfer, load("llama"), eos_token_ids=(EOS,), vocab_size=300)
    assert (setup.llm["tensor_parallel_size"], setup.llm["distributed_executor_backend"]) == (2, "mp")
    return setup.environment.get("CUDA_VISIBLE_DEVICES")


def test_an_engine_sees_the_gpus_of_all_its_ranks(load, monkeypatch):
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "4")  # as Ray leaves it to the process of a rank
    assert spanning(torch.device("cuda"), load, "4", "6") == "4,6"
    with pytest.raises(
        ConfigError, match=r"tensor_model_parallel_size=2 needs as many GPUs, .*trainer.n_gpus_per_node"
    ):
        spanning(torch.device("cuda"), load)
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "0,3,5")  # a run of one process
    assert spanning(torch.device("cuda", 1), load) == "3,5"


@pytest.mark.parametrize(
    ("size", "device", "expected"),
    [(2, "cuda", ("2", "7")), (1, "cuda", ()), (2, "cpu", ())],
    ids=["two GPUs to an engine", "each rank its own", "no GPUs"],
)
def test_ranks_tell_each_other_their_gpus(size, device, expected, monkeypatch):
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "2")
    keys = ["rollout.name=vllm", f"rollout.tensor_model_parallel_size={size}"]
    config = load_config([f"actor_rollout_ref.{key}" for key in keys], check=False).config
    placement = Placement.from_roles({}, 2)
    context = RankContext(ppo_roles(config), placement, 0, torch.device(device), 1, [])
    comm = SimpleNamespace(all_gather=lambda mine: [mine, to_bytes("7")])
    assert _with_device_names(context, comm).device_names == expected


def test_what_gpus_draw_is_not_changed_by_a_start(monkeypatch):
    states = [torch.arange(16, dtype=torch.uint8)]
    monkeypatch.setattr(torch.cuda, "is_initialized", lambda: True)
    monkeypatch.setattr(torch.cuda, "get_rng_state_all", lambda: list(states))
    monkeypatch.setattr(torch.cuda, "set_rng_state_all", lambda saved: states.__setitem__(slice(None), saved))
    with undisturbed({}):
        states[0] = torch.zeros(16, dtype=torch.uint8)
    assert torch.equal(states[0], torch.arange(16, dtype=torch.uint8))


SMALL_BUCKET = 1 << 8


class Group:
    """The collectives of torch.distributed that a worker calls, between two threads."""

    def __init__(self):
        self.meeting, self.parts = threading.Barrier(2), []

    def get_world_size(self, group):
        return 2

    def all_reduce(self, tensor, group):
        self.parts.append(tensor.clone())
        self.meeting.wait(10)
        total = sum(self.parts)
        if self.meeting.wait(10) == 0:
            self.parts.clear()
        self.meeting.wait(10)
        tensor.copy_(total)


class Half(torch.nn.Module):
    """Half of the rows of a projection, and a norm whole, as worker `rank` of two has them."""

    def __init__(self, rank):
        super().__init__()
        self.rank = rank
        self.up = torch.nn.Linear(4, 3, bias=False)
        self.norm = torch.nn.LayerNorm(4, bias=False)
        self.damage = lambda name, part: part
        self.requires_grad_(False)

    def load_weights(self, weights):
        for name, tensor in weights:
            part = tensor.chunk(2)[self.rank] if name == "up.weight" else tensor
            self.get_parameter(name).copy_(self.damage(name, part))
            yield name


class TwoWorkers:
    """vLLM's LLM, as far as Core calls it."""

    def __init__(self):
        self.models = [Half(rank) for rank in range(2)]
        self.workers = []
        for model in self.models:
            worker = WeightReceiver()
            worker.model_runner, worker.vllm_config, worker.model_config = SimpleNamespace(model=model), None, None
            self.workers.append(worker)

    def collective_rpc(self, method, args):
        with ThreadPoolExecutor(2) as pool:
            return list(pool.map(lambda worker: getattr(worker, method)(*args), self.workers))

    def reset_prefix_cache(self):
        return True


@pytest.fixture
def core(monkeypatch):
    group = Group()
    library = SimpleNamespace(
        set_current_vllm_config=lambda config: contextlib.nullcontext(),
        initialize_layerwise_reload=lambda model: None,
        finalize_layerwise_reload=lambda model, config: None,
        tensor_parallel_group=lambda: group,
        ParallelLMHead=type("Head", (torch.nn.Linear,), {}),
    )
    monkeypatch.setitem(sys.modules, "verl.rollout.vllm.library", library)
    monkeypatch.setattr(held, "dist", group)
    fake = Core.__new__(Core)
    fake.setup = Setup({}, {}, [], 300, "verl.reshard.shared_memory:read_shared_bucket", sleeps=False)
    fake._llm, fake._asleep = TwoWorkers(), set()
    return fake


def update(core, seed):
    """Sync random weights to `core`; returns the weights sent."""
    generator, buckets, manifest = torch.Generator().manual_seed(seed), SharedBuckets(SMALL_BUCKET), Manifest()
    sent = {"up.weight": torch.randn(6, 4, generator=generator), "norm.weight": torch.randn(4, generator=generator)}
    core.begin_update()
    for some in bucketed(sent.items(), SMALL_BUCKET):
        bucket = buckets.write(some)
        core.update(bucket)
        manifest.add(bucket)
    core.finish_update(manifest.digest)
    return sent


def test_each_worker_reads_the_buckets_and_keeps_its_part(core):
    for seed in range(2):
        sent = update(core, seed)
        parts = [model.up.weight for model in core._llm.models]
        assert torch.equal(torch.cat(parts), sent["up.weight"])
        assert all(torch.equal(model.norm.weight, sent["norm.weight"]) for model in core._llm.models)


@pytest.mark.parametrize("rank", [0, 1])
@pytest.mark.parametrize(
    "damage",
    [
        lambda name, part: torch.zeros_like(part) if name == "up.weight" else part,
        lambda name, part: part * (1 + 1e-6) if name == "norm.weight" else part,
    ],
    ids=["its part is lost", "a whole tensor changed"],
)
def test_one_worker_that_holds_other_weights_is_an_error(rank, damage, core):
    core._llm.models[rank].damage = damage
    with pytest.raises(ModelError, match="holds other values in"):
        update(core, 1)


def test_a_worker_that_does_not_get_all_buckets_is_an_error(core):
    second = core._llm.workers[1]
    second.verl_load = lambda message: {}
    with pytest.raises(ModelError, match="did not receive the tensors that were sent"):
        update(core, 1)
