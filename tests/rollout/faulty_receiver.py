"""A receiver of weights inside vLLM with a fault, named in the file VERL_TEST_FAULT. The fault occurs after the
received weights were verified, and before the model has them."""

import os
from pathlib import Path

import torch

from verl.rollout.vllm.weights import WeightReceiver

ONE = "model.layers.1.self_attn.k_proj.weight"
OTHER = "model.layers.0.self_attn.k_proj.weight"


def faulty(weights):
    file = Path(os.environ.get("VERL_TEST_FAULT", "none"))
    fault = file.read_text() if file.exists() else ""
    for name, tensor in weights:
        if fault == "drop" and name == ONE:
            continue
        if fault == "zero" and name == ONE:
            yield name, torch.zeros_like(tensor)
        elif fault == "change" and name == ONE:
            tensor[0, 0] += 1e-4
            yield name, tensor
        elif fault == "swap" and name in (ONE, OTHER):
            yield (ONE if name == OTHER else OTHER), tensor
        elif fault == "norm" and name == "model.norm.weight":
            yield name, tensor * 1.01
        else:
            yield name, tensor


class FaultyReceiver(WeightReceiver):
    def verl_load(self, message):
        model = self.model_runner.model
        honest = model.load_weights
        model.load_weights = lambda weights: honest(faulty(weights))
        try:
            return super().verl_load(message)
        finally:
            del model.load_weights
