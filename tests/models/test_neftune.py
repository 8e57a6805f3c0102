"""Noise on embeddings: its size, its keys, and the same through hand-written and module forwards."""

import math
from functools import partial

import pytest
import torch

from tests.models.reference import make_columns, random_rows, widen_norms
from verl.data_proto.extras import BatchExtras
from verl.models.decoder.weights import DenseDecoder
from verl.models.forward import packed_outputs
from verl.models.load import load_causal_lm
from verl.models.neftune import noise_of
from verl.models.packing import pack_rows


def packed_rows(alpha=None, hidden_size=0, seed=0):
    noise = None if alpha is None else partial(noise_of, alpha=alpha, hidden_size=hidden_size, seed=seed)
    return pack_rows(make_columns(*random_rows(0, [3, 2])), share_prompts=False, extras=BatchExtras(noise=noise))


def test_size():
    packed = packed_rows(5.0, 64, seed=1)
    assert packed.noise.shape == (packed.num_tokens, 64)
    for segment in packed.layout.segments:
        noise = packed.noise[segment.start : segment.start + segment.length]
        bound = 5.0 / math.sqrt(segment.length * 64)
        assert 0.9 * bound < noise.abs().max() <= bound
        assert noise.std().item() == pytest.approx(bound / math.sqrt(3), rel=0.25)


def test_equal_seeds_give_equal_noise():
    once, again, other = (packed_rows(5.0, 8, seed=seed).noise for seed in (1, 1, 2))
    assert torch.equal(once, again)
    assert not torch.equal(once, other)


@pytest.mark.parametrize("family", ["llama", "gemma2"])
def test_is_added_to_the_embeddings(tiny_folder, family):
    """As a hook on the embedding layer does in other trainers."""
    module = widen_norms(load_causal_lm(tiny_folder(family), dtype=torch.float64))
    packed = packed_rows(5.0, 64, seed=3)
    plain = packed_outputs(module, packed_rows(), ("log_probs",))["log_probs"]
    log_probs = packed_outputs(module, packed, ("log_probs",))["log_probs"]
    hook = module.get_input_embeddings().register_forward_hook(lambda _, __, output: output + packed.noise.to(output))
    try:
        expected = packed_outputs(module, packed_rows(), ("log_probs",))["log_probs"]
    finally:
        hook.remove()
    assert torch.allclose(log_probs, expected, atol=1e-12)
    assert not torch.allclose(log_probs, plain, atol=1e-6)


def test_the_hand_written_forward_adds_the_same(tiny_folder):
    module, packed = load_causal_lm(tiny_folder("llama")), packed_rows(5.0, 64, seed=3)
    assert DenseDecoder.of(module) is not None
    log_probs = packed_outputs(module, packed, ("log_probs",))["log_probs"]
    wide = packed_outputs(module.double(), packed, ("log_probs",))["log_probs"]
    assert torch.allclose(log_probs.double(), wide, atol=1e-4)
    assert not torch.allclose(wide, packed_outputs(module, packed_rows(), ("log_probs",))["log_probs"], atol=1e-3)
