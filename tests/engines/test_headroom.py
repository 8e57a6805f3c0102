"""Micro-batches that follow the memory: their limit, and the loss that they leave as it is."""

import mmap

import numpy as np
import pytest
import torch

from tests.engines.test_contract import folder, make_batch, policy_loss  # noqa: F401 - folder is a fixture
from tests.engines.tiny import make_engine
from tests.models.reference import widen_norms
from verl.engines.api import MicroBatching
from verl.engines.headroom import Headroom

pytestmark = pytest.mark.seed("G9")
CPU = torch.device("cpu")
KB = 1 << 10


def measured(headroom, num_tokens, bytes_per_token):
    with headroom.measuring(num_tokens):
        fill(num_tokens * bytes_per_token)


def fill(num_bytes):
    """Memory that the allocator has not kept of something else."""
    np.frombuffer(mmap.mmap(-1, num_bytes), dtype=np.uint8)[:] = 1


@pytest.fixture
def free(monkeypatch):
    monkeypatch.setattr("verl.parallel.memory.resident_bytes", lambda: 0)
    monkeypatch.setattr("verl.parallel.memory.peak_bytes", lambda: free.peak)
    monkeypatch.setattr("verl.parallel.memory.available_memory", lambda: free.bytes)

    class free:
        bytes = peak = 0

    return free


def test_the_limit_follows_what_is_free(free):
    headroom, micro = Headroom(CPU), MicroBatching(max_tokens=100)
    assert headroom.adapted(micro) == micro, "nothing was measured yet"
    free.peak = 100 * KB
    with headroom.measuring(100):
        pass
    for available, limit in ((10**9, 200), (10**9, 400), (500 * KB, 400), (50 * KB, 40), (0, 1), (10**9, 2)):
        free.bytes = available
        assert headroom.adapted(micro).max_tokens == headroom.limit == limit


def test_the_largest_token_counts(free):
    headroom, micro = Headroom(CPU), MicroBatching(max_tokens=100)
    headroom.adapted(micro)
    for tokens, peak in ((10, 10 * KB), (10, 40 * KB), (100, 100 * KB), (0, 10**9)):
        free.peak = peak
        with headroom.measuring(tokens):
            pass
    free.bytes = 400 * KB
    assert headroom.adapted(micro).max_tokens == 80


def test_rows_stay_rows():
    rows = MicroBatching(max_rows=2)
    assert Headroom(CPU).adapted(rows) is rows


def test_memory_is_measured():
    headroom, micro = Headroom(CPU), MicroBatching(max_tokens=1 << 30)
    headroom.adapted(micro)
    measured(headroom, 1000, 64 * KB)
    assert headroom._bytes_per_token == pytest.approx(64 * KB, rel=0.1)
    assert 0 < headroom.adapted(micro).max_tokens < 1 << 24


def test_no_system_that_tells(monkeypatch, tmp_path):
    monkeypatch.setattr("verl.parallel.memory.CLEAR_REFS", tmp_path / "none" / "clear_refs")
    headroom, micro = Headroom(CPU), MicroBatching(max_tokens=100)
    for _ in range(2):
        assert headroom.adapted(micro) == micro
        measured(headroom, 10, KB)


def test_losses_and_weights_match_any_split(folder, free):  # noqa: F811
    """The limit shrinks to a token and grows again; float64 shows no difference but rounding."""
    runs = []
    for adapts in (False, True):
        optim = {"lr": 0.05, "optimizer": "SGD"}
        engine = make_engine(folder, dtype="float64", engine={"adapt_micro_batches": adapts}, optim=optim)
        widen_norms(engine.module)  # they round to float32 and so show the order of sums
        losses, limits = [], []
        for step, available in enumerate((10**9, 2 * KB, 64 * KB, 10**9)):
            free.bytes, free.peak = available, 100 * KB
            batch = make_batch(seed=step, sizes=(3, 1, 2, 4))
            metrics = engine.train_batch(batch, policy_loss, ("log_probs", "entropy"), MicroBatching(max_tokens=64))
            losses.append(metrics["loss"].value)
            limits.append(metrics["micro_batch_tokens"].value if adapts else None)
        runs.append((losses, dict(engine.gather_weights()), limits))
    (losses, weights, _), (ours, our_weights, limits) = runs
    assert len(set(limits)) > 2
    assert ours == pytest.approx(losses, rel=1e-11)
    assert all(torch.allclose(our_weights[name], w, rtol=1e-9, atol=1e-12) for name, w in weights.items())
