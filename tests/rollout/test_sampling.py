"""Sampling against its definition in float64, with loops."""

import math

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from verl.data_proto.samples import SamplingParams
from verl.rollout.sampling import _bisected_threshold, _ranked_threshold, draw, keep_threshold, sample

FILTERS = [
    {},
    {"top_k": 1},
    {"top_k": 5},
    {"top_p": 0.7},
    {"top_p": 1e-6},
    {"min_p": 0.2},
    {"min_p": 1.0},
    {"top_k": 20, "top_p": 0.5},
    {"top_k": 20, "top_p": 0.9, "min_p": 0.1},
]


def reference_probs(logits, params):
    """(softmax before filters, renormalised distribution after them) of one row, float64 lists; logits without ties."""
    exps = [math.exp(float(x) / params.temperature) for x in logits]
    full = [e / sum(exps) for e in exps]
    order = sorted(range(len(full)), key=lambda t: (-full[t], t))
    tokens = order[: params.top_k] if params.top_k > 0 else order
    mass, total, by_p = 0.0, sum(full[t] for t in tokens), []
    for t in tokens:
        if by_p and mass >= params.top_p * total:
            break
        by_p.append(t)
        mass += full[t]
    final = [t for t in by_p if full[t] >= params.min_p * full[order[0]]]
    norm = sum(full[t] for t in final)
    return full, [full[t] / norm if t in final else 0.0 for t in range(len(full))]


def logits_of(rows, vocab, seed=0, scale=2.0):
    return torch.randn(rows, vocab, generator=torch.Generator().manual_seed(seed)) * scale


@pytest.mark.parametrize("filters", FILTERS)
@pytest.mark.parametrize("temperature", [1.0, 0.6, 1.7])
@pytest.mark.parametrize("vocab", [7, 256, 300, 1111])
def test_kept_set_token_and_log_prob(filters, temperature, vocab):
    params = SamplingParams(temperature=temperature, **filters)
    logits = logits_of(6, vocab, seed=vocab)
    u = torch.rand(6, dtype=torch.float64, generator=torch.Generator().manual_seed(1))
    tokens, log_probs = sample(logits, params, u)
    assert log_probs.dtype == torch.float32
    probs = torch.softmax(logits / temperature, -1)
    threshold = keep_threshold(probs, params)
    for row in range(6):
        full, final = reference_probs(logits[row], params)
        nucleus = (
            set(range(vocab)) if threshold is None else set((probs[row] >= threshold[row]).nonzero().flatten().tolist())
        )
        assert nucleus == {t for t, p in enumerate(final) if p > 0}
        cdf, expected = 0.0, None
        for t, p in enumerate(final):
            cdf += p
            if cdf > float(u[row]):
                expected = t
                break
        assert int(tokens[row]) == expected
        assert float(log_probs[row]) == pytest.approx(math.log(full[expected]), abs=2e-5)


@pytest.mark.parametrize("filters", FILTERS)
def test_frequencies(filters):
    params = SamplingParams(temperature=0.9, **filters)
    logits = logits_of(1, 40, seed=3, scale=1.5)
    n = 20_000
    u = torch.rand(n, dtype=torch.float64, generator=torch.Generator().manual_seed(5))
    tokens, _ = sample(logits.expand(n, -1), params, u)
    stratified, _ = sample(logits.expand(n, -1), params, (torch.arange(n, dtype=torch.float64) + u) / n)
    _, final = reference_probs(logits[0], params)
    expected = torch.tensor(final, dtype=torch.float64) * n
    counts = torch.bincount(tokens, minlength=40).double()
    assert (counts[expected == 0] == 0).all()
    possible = expected > 0
    freedom = int(possible.sum()) - 1
    chi = float(((counts - expected)[possible] ** 2 / expected[possible]).sum())
    assert chi < freedom + 5 * math.sqrt(2 * max(freedom, 1)) + 5
    assert (torch.bincount(stratified, minlength=40).double() - expected).abs().max() <= 3  # exact inverse of the cdf


def test_greedy_is_argmax_at_temperature_one():
    logits = logits_of(5, 700)
    tokens, log_probs = sample(
        logits, SamplingParams(temperature=0, top_k=3, top_p=0.5), torch.full((5,), 0.99).double()
    )
    assert torch.equal(tokens, logits.argmax(-1))
    assert torch.allclose(log_probs, logits.log_softmax(-1).max(-1).values, atol=1e-6)


def test_ties_stay_together():
    logits = torch.tensor([[0.0, 3.0, 3.0, 3.0, -2.0]])
    for params in (SamplingParams(top_k=1), SamplingParams(top_p=0.3), SamplingParams(min_p=0.9)):
        drawn = {int(sample(logits, params, torch.tensor([u], dtype=torch.float64))[0]) for u in (0.01, 0.5, 0.99)}
        assert drawn == {1, 2, 3}


def test_logits_are_unchanged_and_bfloat16_is_read_in_float32():
    logits = logits_of(3, 50).bfloat16()
    before = logits.clone()
    u = torch.rand(3, dtype=torch.float64)
    params = SamplingParams(temperature=0.5)
    assert torch.equal(sample(logits, params, u)[0], sample(before.float(), params, u)[0])
    assert torch.equal(logits, before)


def test_whole_sort_when_the_mass_is_flat():
    logits = logits_of(2, 5000, scale=0.01)
    params = SamplingParams(top_p=0.95)
    counts = (torch.softmax(logits, -1) >= keep_threshold(torch.softmax(logits, -1), params)).sum(-1)
    for row in range(2):
        assert int(counts[row]) == sum(p > 0 for p in reference_probs(logits[row], params)[1])


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
@pytest.mark.parametrize("scale", [0.0, 0.01, 3.0, 60.0])
def test_bisection_and_ranks_have_one_threshold(scale, dtype):
    """Of flat, mild and peaked rows, and of rows with zeros; sums in another order move a threshold to a neighbour."""
    for top_p in (1e-6, 0.3, 0.9, 0.999):
        probs = torch.softmax(logits_of(9, 1500, scale=scale).to(dtype), -1)
        probs[::2, :700] = 0.0
        needed = top_p * probs.sum(-1, keepdim=True).double()
        ranked, bisected = _ranked_threshold(probs, needed), _bisected_threshold(probs, needed)
        masses = [(probs.double() * (probs >= bound)).sum(-1, keepdim=True) for bound in (ranked, bisected)]
        assert torch.equal(ranked, bisected) or torch.allclose(masses[0], masses[1], atol=1e-3)
        assert (ranked == bisected).float().mean() > 0.8
        assert torch.isin(bisected, probs).all()


def test_rows_do_not_see_each_other():
    logits, u = logits_of(9, 1000, seed=8), torch.rand(9, dtype=torch.float64)
    for filters in FILTERS:
        params = SamplingParams(temperature=0.8, **filters)
        together = sample(logits, params, u)
        for row in range(9):
            alone = sample(logits[row : row + 1], params, u[row : row + 1])
            assert torch.equal(alone[0][0], together[0][row])
            assert torch.equal(alone[1][0], together[1][row])


@settings(max_examples=40, deadline=None)
@given(data=st.data(), vocab=st.sampled_from([1, 2, 255, 256, 257, 600]))
def test_draw_never_takes_weight_zero(data, vocab):
    alive = data.draw(st.sets(st.integers(0, vocab - 1), min_size=1, max_size=4))
    u = data.draw(st.floats(2.0**-53, 1 - 2.0**-53))
    weights = torch.zeros(1, vocab)
    weights[0, sorted(alive)] = data.draw(st.sampled_from([1.0, 1e-30, 0.1, 3e-8]))
    assert int(draw(weights, torch.tensor([u], dtype=torch.float64))) in alive


def test_extreme_uniforms_take_first_and_last():
    weights = torch.zeros(2, 600)
    weights[:, [3, 256, 511, 520]] = torch.tensor([0.1, 0.2, 0.3, 0.4])
    u = torch.tensor([2.0**-53, 1 - 2.0**-53], dtype=torch.float64)
    assert draw(weights, u).tolist() == [3, 520]
