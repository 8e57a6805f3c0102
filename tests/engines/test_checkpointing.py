"""The peak memory of an optimizer step with activation checkpointing and without."""

import pytest

from tests.engines.memory import peak_bytes
from tests.engines.test_contract import make_batch, policy_loss
from tests.engines.tiny import make_engine
from verl.engines.api import MicroBatching
from verl.models.tiny import make_tiny_model

pytestmark = pytest.mark.seed("B8", "F4", "G7")


def test_checkpointing_saves_memory_and_changes_no_loss(tmp_path):
    """Beyond weights and optimizer: gradients, activations and logits of one micro-batch."""
    folder = make_tiny_model(tmp_path / "model", hidden_size=64, intermediate_size=256, num_hidden_layers=8)
    measured = {}
    for checkpointing in (False, True):
        engine = make_engine(folder, model={"enable_gradient_checkpointing": checkpointing}, optim={"lr": 1e-3})

        def step(engine=engine):
            batch = make_batch(0, (1,) * 256)
            return engine.train_batch(batch, policy_loss, ("log_probs", "entropy"), MicroBatching(max_tokens=100_000))

        step()  # it allocates the memory that stays
        metrics, peak = peak_bytes(step)
        measured[checkpointing] = metrics["loss"].value, metrics["grad_norm"].value, peak
    assert measured[True][:2] == pytest.approx(measured[False][:2], rel=1e-5)
    assert measured[True][2] < 0.7 * measured[False][2], measured
