"""The plain-sum losses against loops over Python floats."""

import math

import pytest
import torch

from verl.tinker.sum_losses import FROM_CONFIG, SUM_LOSSES

LOW, HIGH, BETA = 0.7, 1.1, 0.3


def clamped(ratio):
    return min(max(ratio, LOW), HIGH)


def reference_ppo(lp, q, advantage):
    ratio = math.exp(lp - q)
    return -min(ratio * advantage, clamped(ratio) * advantage)


# name -> (value, derivative by lp) of one token, without automatic differentiation
REFERENCES = {
    "importance_sampling": lambda lp, q, a: (-math.exp(lp - q) * a, -math.exp(lp - q) * a),
    "ppo": lambda lp, q, a: (
        reference_ppo(lp, q, a),
        -math.exp(lp - q) * a if math.exp(lp - q) * a <= clamped(math.exp(lp - q)) * a else 0.0,
    ),
    "cispo": lambda lp, q, a: (-clamped(math.exp(lp - q)) * lp * a, -clamped(math.exp(lp - q)) * a),
    "dro": lambda lp, q, a: (-(lp * a - BETA / 2 * (lp - q) ** 2), -a + BETA * (lp - q)),
}
SETTINGS = {"beta": BETA, "clip_low_threshold": LOW, "clip_high_threshold": HIGH}


@pytest.mark.parametrize("name", REFERENCES)
def test_policy_losses_match_a_loop_in_float64(name):
    generator = torch.Generator().manual_seed(3)
    lp, q = (-torch.rand(4, 6, generator=generator, dtype=torch.float64) * 3 for _ in range(2))
    advantages = torch.randn(4, 6, generator=generator, dtype=torch.float64)
    lp.requires_grad_(True)
    loss = SUM_LOSSES[name]
    settings = {key: SETTINGS[key] for key in loss.settings}
    value = loss.function(lp, logprobs=q, advantages=advantages, **settings)
    value.backward()
    tokens = zip(lp.flatten().tolist(), q.flatten().tolist(), advantages.flatten().tolist(), strict=True)
    expected = [REFERENCES[name](*token) for token in tokens]
    assert value.item() == pytest.approx(math.fsum(v for v, _ in expected), rel=1e-12)
    assert lp.grad.flatten().tolist() == pytest.approx([d for _, d in expected], rel=1e-12)


def test_cross_entropy_is_the_weighted_sum():
    lp = torch.tensor([[-1.0, -2.0], [-0.5, -4.0]], dtype=torch.float64)
    weights = torch.tensor([[1.0, 0.0], [0.25, 2.0]], dtype=torch.float64)
    assert SUM_LOSSES["cross_entropy"].function(lp, weights=weights).item() == 1.0 + 0.125 + 8.0


def test_every_loss_has_a_reference():
    assert set(REFERENCES) | {"cross_entropy", FROM_CONFIG} == set(SUM_LOSSES)  # test_workbench.py has the last
