"""Frozen models compute with the weights of their run: masters of float32 are rounded to bfloat16 in the same way."""

import pytest
import torch
from transformers import AutoConfig, AutoModelForSequenceClassification

from verl.models.classifier import load_reward_model
from verl.models.frozen import load_frozen
from verl.models.load import load_model
from verl.models.rounding import Rounding


@pytest.fixture
def reward_folder(tiny_llama, tmp_path):
    """A reward model as `verl rm` saves it."""
    config = AutoConfig.from_pretrained(tiny_llama, num_labels=1)
    AutoModelForSequenceClassification.from_pretrained(tiny_llama, config=config, dtype=torch.float32).save_pretrained(
        tmp_path / "rm"
    )
    return tmp_path / "rm"


@pytest.mark.parametrize("kind", ["dithered", "nearest"])
def test_a_language_model_is_rounded_as_its_run_says(tiny_llama, kind):
    masters = dict(load_model(tiny_llama).named_parameters())
    module = load_frozen(tiny_llama, dtype=torch.bfloat16, rounding=Rounding(kind))
    for name, weight in module.named_parameters():
        assert torch.equal(weight, Rounding(kind).rounded(name, masters[name], torch.bfloat16)), name
    assert not any(weight.requires_grad for weight in module.parameters())


def test_a_reward_model_is_rounded_as_masters_are(reward_folder):
    wide, module = (
        dict(load_reward_model(reward_folder, dtype=d).named_parameters()) for d in (torch.float32, torch.bfloat16)
    )
    for name, weight in module.items():
        expected = wide[name] if name.startswith("score.") else Rounding().rounded(name, wide[name], torch.bfloat16)
        assert torch.equal(weight, expected), name
    assert any(not torch.equal(weight, wide[name].to(weight.dtype)) for name, weight in module.items())
