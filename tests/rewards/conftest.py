"""A reward function as users write it: one file; the reply chooses its behaviour."""

import pytest

from tests.rewards.attacks import ATTACKS, LIMITS
from verl.rewards.functions import RewardFunctionSpec
from verl.rewards.pool import RewardPool
from verl.rewards.sandbox import launch

HOSTILE = """
import asyncio, ctypes, math, os, subprocess, sys, time


class Number:  # stands for numpy and torch scalars
    def tolist(self):
        return 0.25


def compute_score(data_source, solution_str, ground_truth, extra_info=None, **kwargs):
    if solution_str == "hang":
        while True:
            pass
    if solution_str == "sleep":
        time.sleep(1000)
    if solution_str == "hang in c":
        return 9**9**9
    if solution_str == "segfault":
        ctypes.string_at(0)
    if solution_str == "os._exit":
        os._exit(3)
    if solution_str == "sys.exit":
        sys.exit(4)
    if solution_str == "memory":
        return len(bytearray(1 << 40))
    if solution_str == "raise":
        raise KeyError("no such key")
    if solution_str == "deep":
        return compute_score(data_source, solution_str, ground_truth, extra_info)
    if solution_str == "nan":
        return math.nan
    if solution_str == "inf":
        return {"score": math.inf, "acc": 1}
    if solution_str == "none":
        return None
    if solution_str == "text":
        return "1.0"
    if solution_str == "no score":
        return {"acc": 1.0}
    if solution_str == "odd part":
        return {"score": 1.0, "blob": object()}
    if solution_str == "huge":
        return 10**400
    if solution_str == "forge":
        for fd in range(3, 4096):  # the channel has the number that it has in the run
            try:
                os.write(fd, b"\\x00\\x00\\x00\\x02{}")
            except OSError:
                pass
        return 1.0
    if solution_str == "print":
        print("to stdout", "x" * 100000)
        os.write(1, b"raw\\n")
        os.write(2, b"raw\\n")
        subprocess.run(["echo", "child"])
        return 0.75
    if solution_str == "dict":
        return {"score": True, "acc": Number(), "pred": "x", "format": 0.5}
    if solution_str == "number":
        return Number()
    return float(solution_str) + kwargs.get("bonus", 0.0)


async def async_score(data_source, solution_str, ground_truth, extra_info=None):
    await asyncio.sleep(0.001)
    if solution_str == "hang":
        await asyncio.sleep(1000)
    return {"score": float(solution_str), "half": 0.5}


def batch_score(data_sources, solution_strs, ground_truths, extra_infos, **kwargs):
    if "hang" in solution_strs:
        time.sleep(1000)
    if "short" in solution_strs:
        return [1.0]
    best = max(len(s) for s in solution_strs)
    size = len(solution_strs)
    return [math.nan if s == "nan" else {"score": len(s) / best, "size": size} for s in solution_strs]
"""


@pytest.fixture
def hostile(tmp_path):
    """Path of a file with compute_score, async_score and batch_score."""
    path = tmp_path / "hostile.py"
    path.write_text(HOSTILE)
    return str(path)


@pytest.fixture
def make_pool(hostile):
    """make_pool(name="compute_score", kwargs={}, batched=False, **pool options): a pool, closed after the test."""
    pools = []

    def make(name="compute_score", *, path=hostile, kwargs=None, batched=False, **options):
        options = {"num_workers": 1, "timeout_s": 5.0, "memory_mb": 256, "default_score": -0.5, **options}
        pools.append(RewardPool(RewardFunctionSpec(path, name, kwargs or {}, batched), **options))
        return pools[-1]

    yield make
    for pool in pools:
        pool.close()


@pytest.fixture
def attacked(make_pool, tmp_path):
    """attacked(**pool options): a pool; its function attacks when the reply names an attack."""
    path = tmp_path / "attacks.py"
    path.write_text(ATTACKS)

    def make(**options):
        return make_pool(path=str(path), **{"timeout_s": 0.4, "limits": LIMITS, **options})

    return make


@pytest.fixture
def no_namespaces(monkeypatch):
    """As if the kernel granted none."""
    monkeypatch.setattr(launch, "namespace_command", lambda *_: ())
