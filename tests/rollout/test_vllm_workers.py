"""A vLLM of two workers that share the model: each reads every bucket, and what both hold is checked. vLLM is simulated; its
workers are threads."""

import contextlib
import sys
import threading
from concurrent.futures import ThreadPoolExecutor
from types import SimpleNamespace

import pytest
import torch

from verl.errors import ModelError
from verl.reshard.shared_memory import SharedBuckets, bucketed
from verl.rollout.vllm import weight_check as held
from verl.rollout.vllm.core import Core, Setup
from verl.rollout.vllm.weights import Manifest, WeightReceiver

BUCKET = 1 << 8


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
    generator, buckets, manifest = torch.Generator().manual_seed(seed), SharedBuckets(BUCKET), Manifest()
    sent = {"up.weight": torch.randn(6, 4, generator=generator), "norm.weight": torch.randn(4, generator=generator)}
    core.begin_update()
    for some in bucketed(sent.items(), BUCKET):
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
