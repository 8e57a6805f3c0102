"""Devices and dtypes."""

from types import SimpleNamespace

import pytest
import torch
import torch.distributed as dist
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor import DTensor

from verl.config import load_config
from verl.errors import ConfigError
from verl.models.ops.linear import Matmul
from verl.parallel import device as device_module
from verl.parallel.collectives import Collectives, Peer
from verl.parallel.device import (
    compute_dtype,
    has_only_float16,
    make_current,
    move_module,
    moved,
    native_bf16,
    parse_dtype,
    prefers_onednn,
    resolve_device,
)
from verl.programs.api import ProgramSpecs
from verl.programs.ppo import PPO
from verl.reshard.shared_memory import SharedBuckets
from verl.runtime import local, rank_workers

pytestmark = pytest.mark.seed("E1")

CPU = torch.device("cpu")


def test_auto_is_the_cpu_without_cuda(monkeypatch):
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    assert resolve_device("auto") == resolve_device("cpu") == CPU
    with pytest.raises(ConfigError, match="auto or cpu"):
        resolve_device("cuda")


def test_auto_is_cuda_where_there_is_one(monkeypatch):
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    assert resolve_device("auto") == torch.device("cuda")
    assert resolve_device("cuda:1") == torch.device("cuda:1")


def test_a_ranks_own_gpu_is_made_the_current_one(monkeypatch):
    """FSDP, NCCL and vLLM's workers take that one: on GPU 0 all ranks of a host would meet."""
    calls = []
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(torch.cuda, "set_device", lambda device: calls.append(device))
    monkeypatch.setattr(Collectives, "start", lambda *args, **kwargs: calls.append("meet"))
    config = load_config(["trainer.n_gpus_per_node=2"], check=False).config
    local.SpmdRuntime(ProgramSpecs(PPO, config), Peer(1, 2, "127.0.0.1", 1, local_rank=1))
    assert calls == [torch.device("cuda", 1), "meet"]
    make_current(CPU)
    assert len(calls) == 2


@pytest.mark.parametrize(("name", "made_current"), [("cuda:1", [torch.device("cuda:1")]), ("cuda", []), ("cpu", [])])
def test_the_device_of_any_runtime_is_made_the_current_one(monkeypatch, name, made_current):
    """Events and graphs belong to the current GPU, which must be the GPU of the kernels."""
    calls = []
    monkeypatch.setattr(torch.cuda, "set_device", calls.append)
    monkeypatch.setattr(rank_workers, "_with_device_names", lambda context, comm: context)
    monkeypatch.setattr(rank_workers.RankWorkers, "_build", lambda self, context: None)
    monkeypatch.setattr(rank_workers, "set_queues", lambda specs, num_devices: None)
    context = SimpleNamespace(device=torch.device(name), specs=None, placement=SimpleNamespace(num_devices=1))
    rank_workers.RankWorkers(context, None)
    assert calls == made_current


@pytest.mark.parametrize("name", ["cdua", "npu", "cuda:x", ""])
def test_unknown_devices(name):
    with pytest.raises(ConfigError, match="is not a device"):
        resolve_device(name)


@pytest.mark.parametrize(
    ("maker", "flags", "native"),
    [
        ("AuthenticAMD", "fma avx2", False),
        ("AuthenticAMD", "avx512f avx512_bf16", True),
        ("GenuineIntel", "avx512f avx512_bf16", False),
        ("GenuineIntel", "avx512_bf16 amx_bf16 amx_tile", True),
        ("0x41", "asimd bf16 i8mm", True),
    ],
)
def test_bf16_follows_the_instructions_of_the_cpu(tmp_path, monkeypatch, maker, flags, native):
    info = tmp_path / "cpuinfo"
    info.write_text(f"processor\t: 0\nvendor_id\t: {maker}\nflags\t\t: {flags}\n\nprocessor\t: 1\n")
    monkeypatch.setattr(device_module, "Path", lambda _: info)
    monkeypatch.setattr(device_module, "_cpu_flags", device_module._cpu_flags.__wrapped__)  # without the cache
    monkeypatch.delenv(device_module.CPU_BF16, raising=False)
    assert native_bf16(CPU) is native
    assert compute_dtype("auto", CPU) == (torch.bfloat16 if native else torch.float32)


@pytest.mark.parametrize(
    ("flags", "prefers"),
    [({"AuthenticAMD", "avx512f"}, True), ({"AuthenticAMD", "avx2"}, False), ({"GenuineIntel", "avx512f"}, False)],
)
def test_float32_matmuls_follow_the_maker_of_the_cpu(monkeypatch, flags, prefers):
    monkeypatch.setattr(device_module, "_cpu_flags", lambda: flags)
    monkeypatch.setattr(torch.backends.mkldnn, "is_available", lambda: True)
    assert prefers_onednn(CPU) is prefers
    assert Matmul(torch.float32, CPU).by_onednn is prefers
    assert not Matmul(torch.float64, CPU).by_onednn
    assert not prefers_onednn(torch.device("cuda"))


@pytest.mark.parametrize(("forced", "native"), [("native", True), ("widened", False)])
def test_the_bf16_path_of_a_cpu_can_be_forced(monkeypatch, forced, native):
    monkeypatch.setenv(device_module.CPU_BF16, forced)
    assert native_bf16(CPU) is native
    assert Matmul(torch.bfloat16, CPU).widens is not native
    assert not Matmul(torch.float32, CPU).widens
    monkeypatch.setenv(device_module.CPU_BF16, "natve")
    with pytest.raises(ConfigError, match="VERL_CPU_BF16=natve"):
        native_bf16(CPU)


@pytest.mark.parametrize(
    ("capability", "native", "only_float16"),
    [((6, 1), False, False), ((7, 5), False, True), ((8, 0), True, False), ((9, 0), True, False)],
)
def test_dtypes_follow_the_generation_of_the_gpu(monkeypatch, capability, native, only_float16):
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda _: capability)
    assert native_bf16(torch.device("cuda")) is native
    assert has_only_float16(torch.device("cuda")) is only_float16
    assert not has_only_float16(CPU)


def test_names_of_number_formats():
    assert compute_dtype("bf16", CPU) == parse_dtype("bfloat16") == torch.bfloat16
    assert compute_dtype("fp32", CPU) == parse_dtype("float32") == torch.float32
    assert compute_dtype("fp16", CPU) == parse_dtype("float16") == torch.float16
    with pytest.raises(ConfigError, match="int8"):
        compute_dtype("int8", CPU)


def test_the_most_memory_outlives_a_new_record(monkeypatch):
    """The measurement of a switch or a micro-batch begins at 0, and perf/max_memory_allocated_gb does not."""
    record = {"most": 0}
    monkeypatch.setattr(torch.cuda, "current_device", lambda: 0)
    monkeypatch.setattr(torch.cuda, "max_memory_allocated", lambda device: record["most"])
    monkeypatch.setattr(torch.cuda, "reset_peak_memory_stats", lambda device: record.update(most=3))
    monkeypatch.setattr(device_module, "_PEAKS", {})
    device = torch.device("cuda", 0)
    record["most"] = 70
    device_module.reset_peak_memory(device)
    assert record["most"] == 3
    record["most"] = 20
    assert device_module.most_memory_allocated(device) == 70
    record["most"] = 90
    assert device_module.most_memory_allocated(0) == 90


class Recorded:
    """A tensor of a simulated GPU or host, whose copies note how they were made."""

    requires_grad = False

    def __init__(self, kind, notes, pinned=False):
        self.device, self.notes, self.pinned = torch.device(kind), notes, pinned

    def detach(self):
        return self

    def numel(self):
        return 1

    def pin_memory(self):
        assert self.device == CPU, "only dense CPU tensors can be pinned"
        return Recorded("cpu", self.notes, pinned=True)

    def to(self, device, non_blocking=False):
        if torch.device(device) == self.device:
            return self
        assert not non_blocking or self.pinned
        self.notes.append(f"{'pinned' if self.pinned else 'pageable'} to {torch.device(device).type}")
        return Recorded(device, self.notes)

    def copy_(self, other):
        self.notes.append(f"{other.device.type} to {'pinned' if self.pinned else 'pageable'}")
        return self


def test_copies_between_host_and_gpu_go_through_pinned_memory(monkeypatch):
    notes = []
    monkeypatch.setattr(device_module, "pinned_like", lambda tensor: Recorded("cpu", tensor.notes, pinned=True))
    on_gpu = moved(Recorded("cpu", notes), "cuda:1")
    assert moved(on_gpu, "cuda:1") is on_gpu, "as a tied weight, which a module moves once for each of its names"
    on_host = moved(on_gpu, CPU)
    assert (on_gpu.device, on_host.device) == (torch.device("cuda:1"), CPU)
    assert moved(on_host, "cuda").device.type == "cuda"
    assert notes == ["pinned to cuda", "cuda to pinned", "pinned to cuda"]


def test_parts_of_a_sharded_module_move_by_themselves(monkeypatch, tmp_path):
    """As FSDP's do between calls; on a CPU a copy stands for the move."""
    dist.init_process_group("gloo", init_method=f"file://{tmp_path}/store", rank=0, world_size=1)
    try:
        module = fully_shard(torch.nn.Linear(3, 5), mesh=init_device_mesh("cpu", (1,)))
        before, placements = {name: p.full_tensor().clone() for name, p in module.named_parameters()}, []

        def move(tensor, device):
            placements.append((type(tensor), device))
            return tensor.clone()

        monkeypatch.setattr(device_module, "to_device", move)
        move_module(module, "cpu")
        assert placements == [(torch.Tensor, "cpu")] * 2
        for name, p in module.named_parameters():
            assert isinstance(p, DTensor)
            assert isinstance(p, torch.nn.Parameter)
            assert torch.equal(p.full_tensor(), before[name])
        x = torch.randn(2, 3)
        torch.testing.assert_close(module(x), torch.nn.functional.linear(x, before["weight"], before["bias"]))
    finally:
        dist.destroy_process_group()


class Runtime:
    """CUDA's runtime as far as it pins memory."""

    def __init__(self, code=0):
        self.code, self.calls = code, []

    def cudaHostRegister(self, address, num_bytes, flags):  # noqa: N802
        self.calls.append(("pin", address, num_bytes))
        return self.code

    def cudaHostUnregister(self, address):  # noqa: N802
        self.calls.append(("unpin", address))
        return 0


def test_shared_memory_is_pinned_in_a_process_that_uses_a_gpu(monkeypatch, caplog):
    runtime = Runtime()
    monkeypatch.setattr(torch.cuda, "cudart", lambda: runtime)
    SharedBuckets(4096).write([("w", torch.ones(8))])
    assert not runtime.calls
    monkeypatch.setattr(torch.cuda, "is_initialized", lambda: True)
    buckets = SharedBuckets(4096, keeps=True)
    for num_elements in (8, 4096):  # the second update needs a larger segment
        buckets.begin()
        buckets.write([("w", torch.ones(num_elements))])
    buckets.close()
    assert [call[0] for call in runtime.calls] == ["pin", "unpin"] * 2
    assert [call[1] for call in runtime.calls[::2]] == [call[1] for call in runtime.calls[1::2]]
    assert runtime.calls[2][2] > 4096 * 4
    runtime.code = 2
    buckets.write([("w", torch.ones(8))])
    buckets.close()
    assert "CUDA error 2" in caplog.text
    assert len(runtime.calls) == 5
