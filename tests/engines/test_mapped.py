"""A reference policy with weights in a mapped file: the same numbers, and no second copy in memory."""

from dataclasses import replace

import pytest
import torch

from tests.engines.memory import peak_bytes
from tests.engines.test_contract import folder, make_batch  # noqa: F401 - folder is a fixture
from tests.engines.tiny import make_engine
from tests.forked import Forked
from tests.letters_task import overrides, write_task
from tests.slow import slow
from verl.config import load_config
from verl.engines.api import MicroBatching
from verl.engines.streamed import StreamedWeights
from verl.errors import ConfigError
from verl.models.tiny import make_tiny_model
from verl.programs.ppo_roles import ppo_roles
from verl.run.host import train
from verl.runtime.build import _engine
from verl.runtime.rank import RankContext
from verl.tracking.files import read_metrics

pytestmark = pytest.mark.seed("C8")

MEMORY = """
import ctypes
import gc
import sys
from pathlib import Path

import torch
import torch.distributed as dist

from tests.engines.test_contract import make_batch
from verl.config import FSDPConfig, ModelConfig
from verl.engines.api import ENGINES, MicroBatching

model, folder, rank, num_ranks, on_host = sys.argv[1:]
if int(num_ranks) > 1:
    dist.init_process_group("gloo", init_method=f"file://{folder}/store", rank=int(rank), world_size=int(num_ranks))


def resident(kind):
    gc.collect()
    ctypes.CDLL(None).malloc_trim(0)  # freed blocks of the allocator are not what is measured
    lines = Path("/proc/self/status").read_text().splitlines()
    return int(next(line for line in lines if line.startswith(kind)).split()[1]) / 1e3


engine = ENGINES.get("fsdp" if int(num_ranks) > 1 else "local")(
    model=ModelConfig(path=model), engine=FSDPConfig(dtype="float32", offload_policy=on_host == "True"), optim=None,
    head="lm", device=torch.device("cpu"), total_steps=1, memory_map=True,
)


def log_probs():
    return engine.forward(make_batch(1), ("log_probs",), MicroBatching(max_tokens=100))["log_probs"]


before = [log_probs() for _ in range(3)][-1]
anonymous, mapped = resident("RssAnon"), resident("RssFile")
engine.map_weights(Path(folder), "ext4")
for _ in range(2):
    assert torch.equal(log_probs(), before)
print(engine._mapped.num_bytes / 1e6, anonymous - resident("RssAnon"), resident("RssFile") - mapped)
if int(num_ranks) > 1:
    dist.destroy_process_group()
"""


def engine_of(folder, dtype, device="cpu"):  # noqa: F811
    return make_engine(folder, dtype=dtype, trainable=False, device=torch.device(device), memory_map=True)


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_the_numbers_match_a_copy(folder, tmp_path, dtype):  # noqa: F811
    computed = []
    for maps in (False, True):
        engine = engine_of(folder, dtype)
        if maps:
            engine.map_weights(tmp_path, "ext4")
        outputs = [
            engine.forward(make_batch(seed), ("log_probs",), MicroBatching(max_tokens=30))["log_probs"]
            for seed in (1, 2)
        ]
        computed.append(outputs)
    assert all(torch.equal(a, b) for a, b in zip(*computed, strict=True))
    assert list(tmp_path.iterdir()) == [], "the file has no name, and goes with the process"


@pytest.mark.parametrize(("num_ranks", "on_host"), [(1, False), slow(2, False), slow(2, True)])
def test_memory_is_returned(tmp_path, num_ranks, on_host):
    """Two ranks have half of the weights each, and a gathered layer that FSDP keeps for its next gather. `offload_policy`, with
    which a GPU gathers from the host, leaves the shards in the file."""
    sizes = {"hidden_size": 256, "intermediate_size": 1024, "num_hidden_layers": 12 * num_ranks}
    model = make_tiny_model(tmp_path / "model", **sizes)
    (tmp_path / "memory.py").write_text(MEMORY)
    environment = {"OMP_NUM_THREADS": "1", "PATH": ""}
    ranks = [
        Forked(tmp_path / "memory.py", model, tmp_path, rank, num_ranks, on_host, env=environment)
        for rank in range(num_ranks)
    ]
    try:
        outputs = [rank.communicate(timeout=120)[0] for rank in ranks]
    finally:
        for rank in ranks:
            if rank.poll() is None:
                rank.kill()
    assert [rank.returncode for rank in ranks] == [0] * num_ranks, outputs[0][-2000:]
    for output in outputs:
        weights, anonymous, mapped = map(float, output.splitlines()[-1].split())
        assert weights > 40
        assert mapped < 0.2 * weights, "pages of the file are not resident between two calls"
        assert anonymous - mapped > 0.8 * weights, "of the loaded weights some are pages of the model's file already"
        assert anonymous > 0.4 * weights


def test_a_device_holds_one_layer_at_a_time(tmp_path, monkeypatch):
    """The device is simulated: copies to it are allocated on the CPU, and its forward computes."""
    monkeypatch.setattr("verl.models.forward._FUSED_DEVICES", ())
    model = make_tiny_model(tmp_path / "model", hidden_size=256, intermediate_size=1024, num_hidden_layers=12)
    engine, batch = engine_of(model, "float32"), make_batch(1)

    def log_probs():
        return engine.forward(batch, ("log_probs",), MicroBatching(max_tokens=30))["log_probs"]

    expected, activations = peak_bytes(log_probs)
    engine.map_weights(tmp_path, "ext4")
    engine._streamed = StreamedWeights(engine.module, torch.device("cpu"))
    addresses = [p.data_ptr() for p in engine.module.parameters()]
    computed, peak = peak_bytes(log_probs)
    assert torch.equal(computed, expected)
    assert [p.data_ptr() for p in engine.module.parameters()] == addresses, "nothing stays on the device"
    layer, *_ = (sum(p.nbytes for p in part.parameters()) for part in engine.module.model.layers)
    total = sum(p.nbytes for p in engine.module.parameters())
    outside = total - 12 * layer
    assert layer + outside <= peak <= activations + layer + outside < 0.2 * total


def test_a_failed_forward_leaves_nothing_on_the_device(folder, monkeypatch):  # noqa: F811
    module = engine_of(folder, "float32").module
    streamed = StreamedWeights(module, torch.device("cpu"))
    addresses = [p.data_ptr() for p in module.parameters()]
    with pytest.raises(IndexError), streamed.ready():
        module(torch.tensor([[10**6]]))
    assert [p.data_ptr() for p in module.parameters()] == addresses


def test_a_gpu_gets_no_weights_from_building(folder, tmp_path, monkeypatch):  # noqa: F811
    devices = []
    monkeypatch.setattr("verl.engines.local.StreamedWeights", lambda module, device: devices.append(device))
    engine = engine_of(folder, "float32", "cuda")
    assert {p.device.type for p in engine.module.parameters()} == {"cpu"}
    engine.map_weights(tmp_path, "ext4")
    assert devices == [torch.device("cuda")]


def test_folders_that_cannot(folder, tmp_path):  # noqa: F811
    engine = engine_of(folder, "float32")
    with pytest.raises(ConfigError, match="which is tmpfs: in memory too"):
        engine.map_weights(tmp_path, "tmpfs")


def test_a_run_with_a_mapped_reference(tiny_llama, tmp_path):
    task, measured = write_task(tmp_path), []
    for maps in (False, True):
        settings = overrides(
            tiny_llama, task, "data.val_files=[]", "data.max_response_length=4", "actor_rollout_ref.rollout.n=2",
            "actor_rollout_ref.actor.use_kl_loss=True", "actor_rollout_ref.actor.optim.lr=0.01",
            f"trainer.default_local_dir={tmp_path}/{maps}", f"actor_rollout_ref.ref.memory_map={maps}",
        )  # fmt: skip
        assert train(load_config(settings)) == 0
        rows = read_metrics(tmp_path / str(maps) / "metrics.jsonl")
        measured.append([(row["actor/kl_loss"], row["actor/grad_norm"]) for row in rows])
    assert measured[0] == measured[1]
    assert measured[0][1][0] != 0


def test_other_engines_of_several_devices_are_refused():
    keys = [
        "actor_rollout_ref.ref.memory_map=True",
        "actor_rollout_ref.ref.strategy=deepspeed",
        "actor_rollout_ref.actor.use_kl_loss=True",
        "trainer.n_gpus_per_node=2",
    ]
    config = load_config(keys, check=False).config
    specs = ppo_roles(config)
    context = RankContext(specs, specs.place(None), 0, torch.device("cpu"), 1, [])
    assert replace(context.spec("reference"), memory_map=False) != context.spec("reference")
    with pytest.raises(
        ConfigError,
        match="memory_map=True works with strategy=fsdp2 on several devices, and the reference on 2 has deepspeed",
    ):
        _engine(context, context.spec("reference"))
