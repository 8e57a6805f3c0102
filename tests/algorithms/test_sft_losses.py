"""The losses of supervised fine-tuning against loops over Python floats."""

import math
from functools import partial

import pytest
import torch

from tests.algorithms.batches import close, policy_inputs
from tests.algorithms.loss_references import aggregate
from verl.algorithms.reduce import LOSS_AGG_MODES, agg_loss
from verl.algorithms.sft_losses import SFT_LOSSES

TOKEN_LOSS = {  # (log p, log p without gradient) -> loss of a token
    "nll": lambda lp, frozen: -lp,
    "dft": lambda lp, frozen: -math.exp(frozen) * lp,
}


def reference(name, log_prob, frozen, mask, mode):
    rows = zip(log_prob.tolist(), frozen.tolist(), strict=True)
    matrix = [[TOKEN_LOSS[name](lp, f) for lp, f in zip(row, fixed, strict=True)] for row, fixed in rows]
    return aggregate(matrix, mask.tolist(), mode)


def loss_of(name, log_prob, mask, mode="token-mean"):
    return SFT_LOSSES[name](log_prob, mask, partial(agg_loss, loss_agg_mode=mode))


def test_every_loss_has_a_reference():
    assert set(TOKEN_LOSS) == set(SFT_LOSSES)


@pytest.mark.parametrize("mode", LOSS_AGG_MODES)
@pytest.mark.parametrize("name", sorted(SFT_LOSSES))
def test_values_and_gradients(name, mode):
    _, log_prob, _, mask, _ = policy_inputs(3)
    log_prob = log_prob.requires_grad_()
    loss = loss_of(name, log_prob, mask, mode)
    frozen = log_prob.detach()
    close(loss.detach(), reference(name, frozen, frozen, mask, mode))
    (gradient,) = torch.autograd.grad(loss, log_prob)
    step = 1e-6
    for index in torch.ones_like(mask).nonzero().tolist():
        moved = [frozen.clone(), frozen.clone()]
        moved[0][tuple(index)] += step
        moved[1][tuple(index)] -= step
        high, low = (reference(name, m, frozen, mask, mode) for m in moved)
        close(gradient[tuple(index)], (high - low) / (2 * step), 1e-8)


def test_worked_by_hand():
    log_prob = torch.tensor([[0.5, 0.25, 0.125]], dtype=torch.float64).log()
    mask = torch.tensor([[True, False, True]])
    close(loss_of("nll", log_prob, mask), 2 * math.log(2))  # (1 + 3) ln 2 / 2
    close(loss_of("dft", log_prob, mask), 0.4375 * math.log(2))  # (1/2 * 1 + 1/8 * 3) ln 2 / 2


@pytest.mark.parametrize("name", sorted(SFT_LOSSES))
def test_tokens_outside_the_mask_do_not_matter(name):
    _, log_prob, _, mask, _ = policy_inputs(4)
    spoiled = torch.where(mask, log_prob, math.nan).requires_grad_()
    loss = loss_of(name, spoiled, mask)
    close(loss.detach(), loss_of(name, log_prob, mask))
    assert bool(torch.isfinite(torch.autograd.grad(loss, spoiled)[0]).all())
