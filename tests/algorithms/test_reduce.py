"""agg_loss by hand, and its laws."""

import math

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from tests.algorithms.batches import close, policy_inputs
from verl.algorithms.losses import compute_entropy_loss, entropy_from_logits
from verl.algorithms.masked import masked_mean, masked_var, masked_whiten
from verl.algorithms.reduce import LOSS_AGG_MODES, agg_loss
from verl.errors import ConfigError

MATRIX = torch.tensor([[1.0, 2.0, 3.0], [4.0, 9.0, 9.0], [9.0, 9.0, 9.0]], dtype=torch.float64)
MASK = torch.tensor([[1, 1, 1], [1, 0, 0], [0, 0, 0]])


@pytest.mark.parametrize(
    ("mode", "local", "given_totals"),
    [
        ("token-mean", 10 / 4, 10 / 20),
        ("token-sum", 10, 10),
        ("seq-mean-token-sum", 10 / 2, 10 / 5),
        ("seq-mean-token-sum-norm", 10 / 2 / 3, 10 / 5 / 3),
        ("seq-mean-token-mean", (2 + 4) / 2, (2 + 4) / 5),
    ],
)
def test_by_hand(mode, local, given_totals):
    close(agg_loss(MATRIX, MASK, mode), local, 1e-8)
    close(agg_loss(MATRIX, MASK, mode, batch_num_tokens=20, global_batch_size=5), given_totals, 1e-8)
    close(agg_loss(MATRIX, MASK, mode, 4, batch_num_tokens=20, global_batch_size=5), 4 * given_totals, 1e-8)


def test_the_norm_takes_its_factor():
    close(agg_loss(MATRIX, MASK, "seq-mean-token-sum-norm", loss_scale_factor=100), 10 / 2 / 100)


def test_what_is_masked_out_may_be_nan():
    broken = torch.where(MASK.bool(), MATRIX, float("nan"))
    for mode in LOSS_AGG_MODES:
        close(agg_loss(broken, MASK, mode), agg_loss(MATRIX, MASK, mode))


def test_bad_arguments():
    with pytest.raises(ConfigError, match="did you mean 'token-mean'"):
        agg_loss(MATRIX, MASK, "token_mean")
    with pytest.raises(ValueError, match="batch_num_tokens"):
        agg_loss(MATRIX, MASK, "token-mean", dp_size=2)
    with pytest.raises(ValueError, match="global_batch_size"):
        agg_loss(MATRIX, MASK, "seq-mean-token-sum", dp_size=2, batch_num_tokens=4)


@settings(max_examples=10, deadline=None, derandomize=True)
@given(seed=st.integers(0, 2**31), mode=st.sampled_from(LOSS_AGG_MODES), cut=st.integers(1, 4))
def test_parts_add_up(seed, mode, cut):
    _, matrix, _, mask, _ = policy_inputs(seed)
    totals = {"batch_num_tokens": mask.sum(), "global_batch_size": len(mask), "loss_scale_factor": 7.0}
    parts = [agg_loss(matrix[s], mask[s], mode, **totals) for s in (slice(0, cut), slice(cut, None))]
    close(sum(parts), agg_loss(matrix, mask, mode, **totals))


def test_masked_moments():
    close(masked_mean(MATRIX, MASK), 2.5, 1e-8)
    close(masked_mean(MATRIX, MASK, 1), [2, 4, 0], 1e-8)
    close(masked_var(MATRIX, MASK), 5 / 3, 1e-7)
    whitened = masked_whiten(MATRIX, MASK)
    close(whitened[0, 0], -1.5 / math.sqrt(5 / 3), 1e-7)
    assert not whitened[~MASK.bool()].any()
    assert not masked_whiten(MATRIX, torch.zeros_like(MASK)).any()
    alone = torch.zeros_like(MASK)
    alone[0, 1] = 1
    close(masked_whiten(MATRIX, alone), torch.zeros(3, 3), 1e-3)


def test_entropy():
    close(entropy_from_logits(torch.zeros(2, 8, dtype=torch.float64)), [math.log(8)] * 2)
    logits = torch.randn(3, 3, 5, dtype=torch.float64, generator=torch.Generator().manual_seed(0))
    p = logits.softmax(-1)
    expected = -(p * p.log()).sum(-1)
    close(entropy_from_logits(logits), expected)
    close(compute_entropy_loss(logits, MASK), expected[MASK.bool()].mean())
