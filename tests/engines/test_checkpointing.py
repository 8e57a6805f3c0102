"""The peak memory of an optimizer step with activation checkpointing and without."""

import pytest
import torch

from tests.engines.memory import peak_bytes
from tests.engines.test_contract import make_batch, policy_loss
from verl.config import FSDPConfig, ModelConfig, OptimConfig
from verl.engines.api import MicroBatching
from verl.engines.local import LocalEngine
from verl.models.tiny import make_tiny_model

pytestmark = pytest.mark.seed("B8", "F4", "G7")


def test_checkpointing_saves_memory_and_changes_no_loss(tmp_path):
    """Beyond weights and optimizer: gradients, activations and logits of one micro-batch."""
    folder = make_tiny_model(tmp_path / "model", hidden_size=64, intermediate_size=256, num_hidden_layers=8)
    measured = {}
    for checkpointing in (False, True):
        engine = LocalEngine(
            model=ModelConfig(path=str(folder), enable_gradient_checkpointing=checkpointing), head="lm",
            engine=FSDPConfig(dtype="float32"), optim=OptimConfig(lr=1e-3), device=torch.device("cpu"), total_steps=10,
        )  # fmt: skip

        def step(engine=engine):
            batch = make_batch(0, (1,) * 256)
            return engine.train_batch(batch, policy_loss, ("log_probs", "entropy"), MicroBatching(max_tokens=100_000))

        step()  # which allocates what stays
        metrics, peak = peak_bytes(step)
        measured[checkpointing] = metrics["loss"].value, metrics["grad_norm"].value, peak
    assert measured[True][:2] == pytest.approx(measured[False][:2], rel=1e-5)
    assert measured[True][2] < 0.7 * measured[False][2], measured
