"""Dropout on the inputs of adapters: masks by step and tokens, and the same training in every layout."""

import pytest
import torch

from tests.models.reference import make_columns, random_rows, widen_norms
from verl.errors import ConfigError
from verl.models.adapter_dropout import DroppedLinear, add_dropout, dropout_keys, dropping, words
from verl.models.forward import packed_outputs
from verl.models.load import load_causal_lm
from verl.models.lora import LoRASpec, add_adapters
from verl.models.packing import pack_rows

RATE = 0.3


@pytest.fixture
def module(tiny_llama):
    """With adapters in float64 whose B is not zero."""
    module = widen_norms(load_causal_lm(tiny_llama, dtype=torch.float64))
    add_dropout(module, add_adapters(module, LoRASpec(4, 8.0, "all-linear"), torch.float64), RATE)
    generator = torch.Generator().manual_seed(1)
    with torch.no_grad():
        for name, parameter in module.named_parameters():
            if name.endswith("lora_B"):
                parameter.normal_(0, 0.1, generator=generator)
    return module


def trained(module, packed, step=0):
    """The sum of log-probs, and the gradients of the adapters."""
    module.zero_grad()
    with dropping(module, packed, step):
        log_probs = packed_outputs(module, packed, ("log_probs",))["log_probs"]
        log_probs.sum().backward()
    return log_probs.detach(), {name: p.grad.clone() for name, p in module.named_parameters() if p.grad is not None}


def columns(seed=0, sizes=(3, 1, 2)):
    return make_columns(*random_rows(seed, list(sizes)))


def test_a_mask_keeps_the_asked_share_and_no_two_are_alike():
    drawn = words(torch.randint(-(2**62), 2**62, (400, 1)), torch.arange(500))
    assert drawn.min() >= 0
    assert drawn.max() < 2**32
    retained = (drawn >= round(RATE * 2**32)).double()
    assert retained.mean().item() == pytest.approx(1 - RATE, abs=5e-3)  # five standard deviations
    for correlated in (torch.corrcoef(retained), torch.corrcoef(retained.T)):
        assert correlated.fill_diagonal_(0).abs().max() < 0.35


def test_keys_are_of_the_tokens_up_to_each_and_of_the_step():
    shared, apart = (pack_rows(columns(), share_prompts=share) for share in (True, False))
    once, each = (dropout_keys(packed, 3) for packed in (shared, apart))
    assert set(once.tolist()) == set(each.tolist())
    assert not set(once.tolist()) & set(dropout_keys(shared, 4).tolist())
    # a token's key depends on those before it and on its place
    same = make_columns([[1, 2, 3], [1, 2, 3], [2, 1, 3]], [[4, 5], [4, 6], [4, 5]])
    keys = dropout_keys(pack_rows(same, share_prompts=False), 0).view(3, -1)
    assert torch.equal(keys[0], keys[1])
    assert not set(keys[0].tolist()) & set(keys[2].tolist())


def test_training_is_the_same_in_every_layout(module):
    expected, gradients = trained(module, pack_rows(columns()))
    for share in (True, False):
        for parts in ([[0, 1, 2, 3, 4, 5]], [[5, 0], [3, 1], [2, 4]], [[i] for i in range(6)]):
            log_probs, total = torch.zeros_like(expected), {}
            for rows in parts:
                part = {name: column[rows] for name, column in columns().items()}
                values, grads = trained(module, pack_rows(part, share_prompts=share))
                log_probs[rows] = values
                total = {name: total.get(name, 0) + grad for name, grad in grads.items()}
            assert torch.allclose(log_probs, expected, atol=1e-12)
            assert all(torch.allclose(total[name], gradient, atol=1e-10) for name, gradient in gradients.items())


def test_layers_that_are_computed_again_have_the_same_masks(module):
    packed = pack_rows(columns())
    expected, gradients = trained(module, packed)
    module.gradient_checkpointing_enable({"use_reentrant": False})
    module.train()
    again, grads = trained(module, packed)
    assert torch.equal(again, expected)
    assert all(torch.allclose(grads[name], gradient, atol=1e-12) for name, gradient in gradients.items())


def test_the_forward_is_the_formula(module):
    layer = next(part for part in module.modules() if isinstance(part, DroppedLinear))
    packed = pack_rows(columns())
    x = torch.randn(1, packed.num_tokens, layer.in_features, dtype=torch.float64)
    with dropping(module, packed, 2):
        mask, out = layer.masks.of(layer, x), layer(x)
    plain = x @ layer.weight.T
    expected = plain + layer.scale * (mask * x / (1 - RATE)) @ layer.lora_A.T @ layer.lora_B.T
    assert torch.allclose(out, expected, atol=1e-12)
    assert torch.allclose(layer(x), plain + layer.scale * x @ layer.lora_A.T @ layer.lora_B.T, atol=1e-12)  # outside


def test_other_inputs_than_tokens_are_refused(module):
    packed = pack_rows(columns())
    layer = next(part for part in module.modules() if isinstance(part, DroppedLinear))
    with (
        dropping(module, packed, 0),
        pytest.raises(ConfigError, match=r"proj gets other inputs .* model.exclude_modules"),
    ):
        layer(torch.zeros(packed.num_tokens + 1, layer.in_features, dtype=torch.float64))
