"""Links between GPUs and machines, as their tools print them, and what follows for settings."""

import pytest

from verl.cli.machine import host
from verl.cli.machine.host import advice, described, fabric, islands, parse_topology

pytestmark = pytest.mark.seed("F5")

PAIRS = """
\t\x1b[4mGPU0\tGPU1\tGPU2\tGPU3\tNIC0\tCPU Affinity\tNUMA Affinity\tGPU NUMA ID\x1b[0m
GPU0\t X \tNV12\tSYS\tSYS\tPXB\t0-31\t0\t\tN/A
GPU1\tNV12\t X \tSYS\tSYS\tPXB\t0-31\t0\t\tN/A
GPU2\tSYS\tSYS\t X \tNV12\tSYS\t32-63\t1\t\tN/A
GPU3\tSYS\tSYS\tNV12\t X \tSYS\t32-63\t1\t\tN/A
NIC0\tPXB\tPXB\tSYS\tSYS\t X

Legend:

  X    = Self
  SYS  = Connection traversing PCIe as well as the SMP interconnect between NUMA nodes (e.g., QPI/UPI)
  NV#  = Connection traversing a bonded set of # NVLinks
"""
SWITCHED = "\tGPU0\tGPU1\tGPU2\nGPU0\t X \tNV18\tNV18\nGPU1\tNV18\t X \tNV18\nGPU2\tNV18\tNV18\t X \n"
PCIE = "\tGPU0\tGPU1\nGPU0\t X \tPHB\nGPU1\tPHB\t X \n"
PORT = {"name": "mlx5_0", "kind": "InfiniBand", "rate": "400 Gb/sec (4X NDR)"}


def of(topology="", fabric=(), interfaces=None, **settings):
    facts = {"gpu_links": parse_topology(topology), "fabric": list(fabric), "interfaces": interfaces or {}}
    return {**facts, "settings": settings}


@pytest.mark.parametrize(
    ("text", "expected"),
    [
        (PAIRS, [[0, 1], [2, 3]]), (SWITCHED, [[0, 1, 2]]), (PCIE, [[0], [1]]), ("", []),
        ("Failed to initialize NVML: Driver/library version mismatch", []), ("GPU0 X NV1\nGPU1", [[0]]),
    ],
)  # fmt: skip
def test_islands_of_nvlink(text, expected):
    assert islands(parse_topology(text)) == expected


def test_the_links_are_said():
    assert described(of(PAIRS, [PORT])) == (
        "GPUs connected by NVLink, two processors; between machines: mlx5_0 InfiniBand 400 Gb/sec (4X NDR)"
    )
    assert described(of(interfaces={"eth0": 10000, "eth1": 0})) == (
        "one GPU or none; between machines: sockets (eth0 10000 Mbit/s, eth1)"
    )
    assert described(of()) == "one GPU or none; between machines: nothing"


@pytest.mark.parametrize(
    ("facts", "level", "words"),
    [
        (of(SWITCHED, NCCL_P2P_DISABLE="1"), "warn", "keeps NCCL from NVLink"),
        (of(fabric=[PORT], NCCL_IB_DISABLE="1"), "warn", "mlx5_0 is an active InfiniBand port"),
        (of(PAIRS), "info", "GPUs 0,1 and 2,3 among themselves only: choose .* of at most 2"),
        (of(PCIE), "info", "no NVLink between the GPUs"),
        (of(CUDA_DEVICE_MAX_CONNECTIONS="1"), "warn", "Unset it for strategy=fsdp"),
        (of(NCCL_PROTO="Simple"), "info", "NCCL_PROTO=Simple"),
        (of(interfaces={"eth0": 1000, "eth1": 25000}), "info", "NCCL_SOCKET_IFNAME=eth1, the fastest"),
    ],
)
def test_advice(facts, level, words):
    (line,) = advice(facts)
    assert line.level == level
    with pytest.raises(AssertionError, match=words):
        raise AssertionError(line.text)


@pytest.mark.parametrize("facts", [of(), of(SWITCHED), of(SWITCHED, [PORT]), of(interfaces={"eth0": 0, "eth1": 0})])
def test_links_that_need_nothing(facts):
    assert list(advice(facts)) == []


def test_active_ports_of_the_fabric(tmp_path, monkeypatch):
    for name, state, layer in (("mlx5_0", "4: ACTIVE", "Ethernet"), ("mlx5_1", "1: DOWN", "InfiniBand")):
        port = tmp_path / name / "ports" / "1"
        port.mkdir(parents=True)
        for file, text in (("state", state), ("link_layer", layer), ("rate", "100 Gb/sec (4X EDR)")):
            (port / file).write_text(text + "\n")
    monkeypatch.setattr(host, "_FABRIC", tmp_path)
    assert fabric() == [{"name": "mlx5_0", "kind": "RoCE", "rate": "100 Gb/sec (4X EDR)"}]
