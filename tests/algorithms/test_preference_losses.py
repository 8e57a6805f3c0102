"""Preference losses against formulas over floats, at the start of a run, and by laws."""

import math
from types import SimpleNamespace

import pytest
import torch
from hypothesis import given
from hypothesis import settings as hypothesis_settings
from hypothesis import strategies as st

from tests.algorithms.preference_references import EACH, START, optimal_transport, score
from verl.algorithms.preference_losses import (
    PREFERENCE_LOSSES,
    alpha_reward,
    completion_sums,
    divergence_score,
    is_paired,
    log_odds,
    match_ranks,
    needs_reference,
    preference_loss,
    reads,
    shared_lengths,
    wpo_weights,
)
from verl.config.active_keys import DIVERGENCE_LOSSES
from verl.errors import ConfigError

SETTINGS = {
    "beta": 0.3,
    "label_smoothing": 0.1,
    "discopop_tau": 0.5,
    "simpo_gamma": 0.7,
    "cpo_alpha": 0.4,
    "alpha": 0.2,
    "desirable_weight": 1.3,
    "undesirable_weight": 0.6,
}
NUM = 6
WHOLE_BATCH = ("aot", "aot_unpaired")


def inputs(seed=0):
    """Policy and reference log-probs of NUM pairs, and lengths."""
    rng = torch.Generator().manual_seed(seed)
    logps = -torch.rand(4, NUM, generator=rng, dtype=torch.float64) * 6 - 0.5
    lengths = torch.randint(1, 6, (2, NUM), generator=rng).double()
    return logps, lengths


def terms_of(lp_w, lp_l, ref_w, ref_l, lengths, *, kind="reverse_kl", f_alpha=0.5, **changes):
    """The arguments of every loss; a labelled completion is chosen if its index is even."""
    c, r = lp_w - ref_w, lp_l - ref_l
    s_c, s_r = (divergence_score(x, kind, f_alpha) for x in (c, r))
    desirable = torch.arange(NUM) % 2 == 0
    return {
        **SETTINGS,
        "chosen_logp": lp_w,
        "rejected_logp": lp_l,
        "chosen_mean": lp_w / lengths[0],
        "rejected_mean": lp_l / lengths[1],
        "chosen_ratio": c,
        "rejected_ratio": r,
        "delta": s_c - s_r,
        "mean_delta": s_c / lengths[0] - s_r / lengths[1],
        "nll": -lp_w * NUM / lengths[0].sum(),
        "matched_margin": match_ranks((lp_w - lp_l).detach(), ref_w - ref_l),
        "matched_rejected": match_ranks(c.detach(), r.detach()),
        "matched_chosen": match_ranks(r.detach(), c.detach()),
        "ratio": torch.where(desirable, c, r),
        "desirable": desirable,
        "shift": torch.full_like(c, 0.25),
        **changes,
    }


def reference(name, lp_w, lp_l, ref_w, ref_l, lengths, *, kind="reverse_kl", f_alpha=0.5, **changes):
    """The mean of the loss over the batch, by tests/algorithms/preference_references.py."""
    rows = []
    for i, (win, lose, rw, rl, n_w, n_l) in enumerate(
        zip(*(x.tolist() for x in (lp_w, lp_l, ref_w, ref_l, *lengths)), strict=True)
    ):
        s_w, s_l = (score(math.exp(x), kind, f_alpha) for x in (win - rw, lose - rl))
        rows.append(
            SimpleNamespace(
                **SETTINGS | changes,
                **{"lp_w": win, "lp_l": lose, "ref_w": rw, "ref_l": rl, "c": win - rw, "r": lose - rl},
                delta=s_w - s_l,
                mean_delta=s_w / n_w - s_l / n_l,
                mean_w=win / n_w,
                mean_l=lose / n_l,
                nll=-win * NUM / float(lengths[0].sum()),
                desirable=i % 2 == 0,
                ratio=win - rw if i % 2 == 0 else lose - rl,
                shift=0.25,
            )
        )
    if name in WHOLE_BATCH:
        return optimal_transport(name, rows)
    return sum(EACH[name](row) for row in rows) / len(rows)


def loss_of(name, *args, **kwargs):
    return preference_loss(name, terms_of(*args, **kwargs)).mean()


def test_every_loss_has_a_float64_reference():
    assert set(EACH) | set(WHOLE_BATCH) == set(PREFERENCE_LOSSES)
    assert {name for name in PREFERENCE_LOSSES if not is_paired(name)} == {"kto", "apo_zero_unpaired", "bco"}
    free = {name for name in PREFERENCE_LOSSES if not needs_reference(name)}
    assert free == {"sft", "cpo", "cpo_hinge", "cpo_ipo", "simpo", "orpo"}


@pytest.mark.parametrize("name", sorted(PREFERENCE_LOSSES))
def test_values_and_gradients(name):
    logps, lengths = inputs()
    policy = logps[:2].clone().requires_grad_()
    loss = loss_of(name, *policy, *logps[2:], lengths)
    assert float(loss.detach()) == pytest.approx(reference(name, *logps, lengths), rel=1e-12)
    (gradient,) = torch.autograd.grad(loss, policy)
    step = 1e-6
    for index in [(side, pair) for side in range(2) for pair in range(NUM)]:
        moved = [logps.clone(), logps.clone()]
        moved[0][index] += step
        moved[1][index] -= step
        high, low = (reference(name, *m, lengths) for m in moved)
        assert float(gradient[index]) == pytest.approx((high - low) / (2 * step), rel=1e-6, abs=1e-8)


@pytest.mark.parametrize("name", DIVERGENCE_LOSSES)
@pytest.mark.parametrize("kind", ["forward_kl", "js_divergence", "alpha_divergence"])
def test_divergences(name, kind):
    logps, lengths = inputs(1)
    loss = loss_of(name, *logps, lengths, kind=kind, f_alpha=0.7)
    assert float(loss) == pytest.approx(reference(name, *logps, lengths, kind=kind, f_alpha=0.7), rel=1e-12)


def test_the_alpha_divergence_has_a_limit_and_no_overflow():
    x = torch.tensor([-3.0, 0.0, 2.0])
    assert torch.equal(divergence_score(x, "alpha_divergence", 1.0), x)
    assert divergence_score(x, "alpha_divergence", 1.001).tolist() == pytest.approx(x.tolist(), rel=2e-3)
    assert divergence_score(torch.tensor([1e4]), "alpha_divergence", 2.0).isfinite().all()


@pytest.mark.parametrize("name", sorted(START))
def test_start_values(name):
    logps, lengths = inputs(2)
    same = {"beta": 0.1, "label_smoothing": 1e-3 if name == "exo_pair" else 0.0, "discopop_tau": 0.05}
    weights = {"desirable_weight": 1.0, "undesirable_weight": 1.0, "shift": torch.zeros(NUM)}
    loss = loss_of(name, *logps[:2], *logps[:2], lengths, **same, **weights)
    assert float(loss) == pytest.approx(START[name], abs=5e-5)


def test_every_loss_with_a_reference_has_a_start_value():
    assert set(START) == {name for name in PREFERENCE_LOSSES if needs_reference(name)}


def test_an_argument_that_is_no_term_is_named(monkeypatch):
    monkeypatch.setitem(PREFERENCE_LOSSES._rows, "own", lambda delta, chosen_log_ratio, scale=1.0, **more: delta)
    with pytest.raises(ConfigError, match="'own' has the argument chosen_log_ratio, .* chosen_mean, chosen_ratio"):
        reads("own")


def test_extreme_probabilities_stay_finite():
    x = torch.tensor([-1e-9, -1e-4, -1.0, -80.0, -700.0], dtype=torch.float64, requires_grad=True)
    odds = log_odds(x)
    assert odds[1:4].tolist() == pytest.approx([math.log(math.exp(v) / -math.expm1(v)) for v in x[1:4].tolist()])
    assert odds.isfinite().all()
    odds.sum().backward()
    assert x.grad.isfinite().all()
    assert float(alpha_reward(torch.tensor(-700.0), 0.01)) == pytest.approx((1 - math.exp(7)) / 0.01)


class TestRows:
    def test_length_desensitization_weighs_what_lies_beyond_the_shorter_completion(self):
        log_probs = torch.tensor([[-1.0, -2.0, -4.0, 0.0], [0.0, -8.0, -16.0, -32.0]], dtype=torch.float64)
        mask = torch.tensor([[True, True, True, False], [False, True, True, False]])
        chosen = torch.tensor([True, False])
        shared = shared_lengths(mask, chosen)
        assert shared.tolist() == [2, 2]
        assert completion_sums(log_probs, mask).tolist() == [-7.0, -24.0]
        assert completion_sums(log_probs, mask, shared, 0.3).tolist() == pytest.approx([-3.0 - 0.3 * 4, -24.0])

    def test_wpo_weights_are_one_for_a_certain_policy(self):
        mask = torch.tensor([[True, True, False], [True, False, False]])
        log_probs = torch.tensor([[0.5, 0.25, 9.0], [0.125, 9.0, 9.0]], dtype=torch.float64).log()
        squares = torch.tensor([[0.5, 0.5, 1.0], [0.25, 1.0, 1.0]], dtype=torch.float64)
        # sqrt(1 * 1/2), 1/2
        assert wpo_weights(log_probs, squares, mask).tolist() == pytest.approx([0.5**0.5, 0.5])
        assert wpo_weights(torch.zeros(2, 3), torch.ones(2, 3), mask).tolist() == [1.0, 1.0]

    @given(st.lists(st.tuples(st.floats(-5, 5), st.floats(-5, 5)), min_size=1, max_size=9))
    @hypothesis_settings(max_examples=50, deadline=None)
    def test_matching_pairs_equal_ranks(self, pairs):
        values, references = torch.tensor(pairs, dtype=torch.float64).T
        matched = match_ranks(values, references)
        order = sorted(range(len(pairs)), key=lambda i: (pairs[i][0], i))
        assert matched[order].tolist() == sorted(references.tolist())

    @given(st.permutations(range(NUM)))
    @hypothesis_settings(max_examples=20, deadline=None)
    @pytest.mark.parametrize("name", sorted(n for n in PREFERENCE_LOSSES if is_paired(n)))
    def test_the_order_of_pairs_does_not_matter(self, name, order):
        logps, lengths = inputs(3)
        order = torch.tensor(order)
        one, other = loss_of(name, *logps, lengths), loss_of(name, *logps[:, order], lengths[:, order])
        assert float(one) == pytest.approx(float(other), rel=1e-12)
