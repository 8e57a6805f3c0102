"""The fused head against full float64 logits."""

import dataclasses

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from verl.models.grad_buffers import GradientBuffers
from verl.models.log_probs import OPTIONAL, TokenStats, token_log_probs

CASES = [
    pytest.param({}, id="plain"),
    pytest.param({"bias": True}, id="bias"),
    pytest.param({"softcap": 3.0}, id="softcap"),
    pytest.param({"logit_scale": 0.25, "bias": True, "softcap": 2.0}, id="all"),
]


def inputs(num_tokens, bias, dtype=torch.float64, seed=0):
    generator = torch.Generator().manual_seed(seed)

    def leaf(*shape):
        return torch.randn(*shape, generator=generator, dtype=torch.float64).to(dtype).requires_grad_()

    targets = torch.randint(0, 17, (num_tokens,), generator=generator)
    return leaf(num_tokens, 6), leaf(17, 6), leaf(17) if bias else None, targets


def reference(hidden, weight, bias, targets, temperature, softcap=None, logit_scale=1.0):
    logits = hidden.double() @ weight.double().t() + (0 if bias is None else bias.double())
    logits = logits * logit_scale
    if softcap is not None:
        logits = softcap * torch.tanh(logits / softcap)
    log_p = (logits / temperature).log_softmax(-1)
    p = log_p.exp()
    return log_p.gather(1, targets.unsqueeze(1)).squeeze(1), -(p * log_p).sum(-1), p.square().sum(-1)


def fused(hidden, weight, bias, targets, temperature, chunk, **options):
    stats = token_log_probs(
        hidden, weight, targets, temperature, bias=bias, chunk_tokens=chunk, optional=("entropy", "sum_pi_squared"),
        **options,
    )  # fmt: skip
    return stats.log_probs, stats.entropy, stats.sum_pi_squared


def assert_equal_with_gradients(ours, theirs, leaves):
    upstream = [torch.randn_like(x) for x in ours]
    for a, b in zip(ours, theirs, strict=True):
        assert torch.allclose(a, b, rtol=1e-12, atol=1e-13)
    expected = torch.autograd.grad(theirs, leaves, upstream)
    for a, b in zip(torch.autograd.grad(ours, leaves, upstream), expected, strict=True):
        assert torch.allclose(a, b, rtol=1e-10, atol=1e-12)


@pytest.fixture(params=[False, True], ids=["torch", "kernels"])
def by_kernels(request, monkeypatch):
    """Runs a test as on a CPU, and with the ops of a GPU, computed by torch."""
    monkeypatch.setattr("verl.models.log_probs.kernels_compute", lambda hidden: request.param)


@pytest.mark.parametrize(("chunk", "fused_head"), [(1, True), (4, True), (11, True), (50, True), (4, False)])
@pytest.mark.parametrize("options", CASES)
def test_equals_full_logits_with_gradients(options, chunk, fused_head, by_kernels):
    options = dict(options)
    hidden, weight, bias, targets = inputs(11, options.pop("bias", False))
    leaves = [x for x in (hidden, weight, bias) if x is not None]
    ours = fused(hidden, weight, bias, targets, 1.7, chunk, fused=fused_head, **options)
    theirs = reference(hidden, weight, bias, targets, 1.7, **options)
    assert_equal_with_gradients(ours, theirs, leaves)


@pytest.mark.parametrize("options", CASES)
def test_whole_logits_have_every_statistic_of_chunks(options):
    options = dict(options)
    hidden, weight, bias, targets = inputs(11, options.pop("bias", False))
    options |= {"candidates": torch.stack([targets, (targets + 1) % len(weight)], 1), "top": 3, "chunk_tokens": 4}
    unchunked, chunks = (
        token_log_probs(hidden, weight, targets, 1.7, bias=bias, fused=fused, optional=OPTIONAL, **options)
        for fused in (False, True)
    )
    for field in dataclasses.fields(TokenStats):
        torch.testing.assert_close(getattr(unchunked, field.name), getattr(chunks, field.name), msg=field.name)


@pytest.mark.parametrize("chunk", [1, 4, 50])
@pytest.mark.parametrize("options", CASES)
def test_correct_says_whether_the_target_is_the_likeliest(options, chunk, by_kernels):
    options = dict(options)
    hidden, weight, bias, _ = inputs(11, options.pop("bias", False))
    logits = hidden @ weight.t() + (0 if bias is None else bias)
    targets = logits.argmax(dim=1)
    targets[::3] = (targets[::3] + 1) % 17
    stats = token_log_probs(hidden, weight, targets, bias=bias, chunk_tokens=chunk, optional=["correct"], **options)
    assert stats.correct.tolist() == [float(i % 3 != 0) for i in range(11)]
    assert not stats.correct.requires_grad
    stats.log_probs.sum().backward()  # is not disturbed by it
    assert weight.grad is not None


@pytest.mark.parametrize("chunk", [1, 4, 50])
@pytest.mark.parametrize("options", CASES)
def test_candidates_and_most_probable_tokens(options, chunk):
    options = dict(options)
    hidden, weight, bias, targets = inputs(11, options.pop("bias", False))
    leaves = [x for x in (hidden, weight, bias) if x is not None]
    candidates = torch.stack([targets, (targets + 3) % 17, targets * 0], dim=1)
    stats = token_log_probs(
        hidden,
        weight,
        targets,
        1.3,
        bias=bias,
        chunk_tokens=chunk,
        candidates=candidates,
        top=5,
        optional=["entropy"],
        **options,
    )
    every = torch.stack(
        [reference(hidden, weight, bias, torch.full_like(targets, token), 1.3, **options)[0] for token in range(17)],
        dim=1,
    )
    assert torch.allclose(stats.candidate_log_probs, every.gather(1, candidates), rtol=1e-12)
    expected = every.topk(5, dim=1)
    assert torch.equal(stats.top_ids, expected.indices)
    assert torch.allclose(stats.top_log_probs, expected.values, rtol=1e-12)
    assert not stats.top_log_probs.requires_grad
    upstream = torch.randn_like(every.gather(1, candidates))
    theirs = (every.gather(1, candidates) * upstream).sum() + 0.5 * every[torch.arange(11), targets].sum()
    theirs = theirs - 0.1 * (every.exp() * every).sum()
    ours = (stats.candidate_log_probs * upstream).sum() + 0.5 * stats.log_probs.sum() + 0.1 * stats.entropy.sum()
    for a, b in zip(torch.autograd.grad(ours, leaves), torch.autograd.grad(theirs, leaves), strict=True):
        assert torch.allclose(a, b, rtol=1e-10, atol=1e-12)


def test_candidates_without_other_outputs_have_a_gradient():
    hidden, weight, _, targets = inputs(5, False)
    ours = token_log_probs(hidden, weight, targets, candidates=targets.unsqueeze(1), chunk_tokens=2).candidate_log_probs
    theirs = reference(hidden, weight, None, targets, 1.0)[0]
    gradients, expected = (torch.autograd.grad(x.sum(), (hidden, weight)) for x in (ours, theirs))
    assert all(torch.allclose(a, b, rtol=1e-10, atol=1e-12) for a, b in zip(gradients, expected, strict=True))


@pytest.mark.parametrize("chunk", [1, 4, 50])
@pytest.mark.parametrize("options", CASES)
def test_mean_logits_are_those_at_temperature_1(options, chunk):
    options = dict(options)
    hidden, weight, bias, targets = inputs(11, options.pop("bias", False))
    stats = token_log_probs(
        hidden, weight, targets, 1.7, bias=bias, chunk_tokens=chunk, optional=["mean_logit"], **options
    )
    assert not stats.mean_logit.requires_grad
    if "softcap" not in options:  # a mean of linear functions
        rows = weight.mean(dim=0) @ hidden.t() + (0 if bias is None else bias.mean())
        assert torch.allclose(stats.mean_logit, rows * options.get("logit_scale", 1.0), atol=1e-12)
    logits = (hidden @ weight.t() + (0 if bias is None else bias)) * options.get("logit_scale", 1.0)
    if "softcap" in options:
        logits = options["softcap"] * torch.tanh(logits / options["softcap"])
    assert torch.allclose(stats.mean_logit, logits.mean(dim=1), atol=1e-12)
    stats.log_probs.sum().backward()  # is not disturbed by it
    assert weight.grad is not None


def test_equal_logits_are_all_correct():
    """bfloat16 rounds the likeliest two to the same logit often enough."""
    hidden, weight = torch.ones(2, 1), torch.tensor([[1.0], [3.0], [3.0]])
    stats = token_log_probs(hidden, weight, torch.tensor([1, 2]), optional=["correct"])
    assert stats.correct.tolist() == [1, 1]


@pytest.mark.parametrize("options", CASES)
def test_gradcheck(options):
    options = dict(options)
    hidden, weight, bias, targets = inputs(7, options.pop("bias", False))
    leaves = tuple(x for x in (hidden, weight, bias) if x is not None)
    assert torch.autograd.gradcheck(
        lambda h, w, b=None: fused(h, w, b, targets, 0.8, 3, **options), leaves, atol=1e-6, rtol=1e-5
    )


@pytest.mark.parametrize("which", [0, 1, 2])
def test_each_single_output_has_its_own_gradient(which):
    hidden, weight, bias, targets = inputs(5, True)
    ours = fused(hidden, weight, bias, targets, 1.0, 2)[which].sum()
    theirs = reference(hidden, weight, bias, targets, 1.0)[which].sum()
    expected = torch.autograd.grad(theirs, (hidden, weight, bias))
    for a, b in zip(torch.autograd.grad(ours, (hidden, weight, bias)), expected, strict=True):
        assert torch.allclose(a, b, rtol=1e-10, atol=1e-12)


def test_forwards_in_flight_do_not_share_their_logits():
    hidden, weight = torch.randn(11, 8), torch.nn.Parameter(torch.randn(30, 8))
    (expected,) = torch.autograd.grad(token_log_probs(hidden, weight, torch.arange(11)).log_probs.sum(), weight)
    buffers = GradientBuffers({weight: weight})
    for _ in range(2):  # the second time in returned memory
        parts = [(hidden[part], weight, torch.arange(11)[part]) for part in (slice(7), slice(7, 11))]
        for loss in [token_log_probs(*part, gradients=buffers).log_probs.sum() for part in parts]:
            loss.backward()
    torch.testing.assert_close(weight.grad, 2 * expected)


def test_backward_twice_gives_the_same():
    """The logits kept from the forward serve one backward; a second one computes them again."""
    hidden, weight, _, targets = inputs(5, False)
    loss = fused(hidden, weight, None, targets, 1.0, 2)[0].sum()
    first = torch.autograd.grad(loss, (hidden, weight), retain_graph=True)
    second = torch.autograd.grad(loss, (hidden, weight))
    assert all(torch.equal(a, b) for a, b in zip(first, second, strict=True))


def test_a_frozen_head_gets_no_gradient():
    hidden, weight, _, targets = inputs(5, False)
    stats = token_log_probs(hidden, weight.detach(), targets, chunk_tokens=2)
    assert stats.entropy is None
    assert stats.sum_pi_squared is None
    expected = torch.autograd.grad(reference(hidden, weight, None, targets, 1.0)[0].sum(), hidden)[0]
    assert torch.allclose(torch.autograd.grad(stats.log_probs.sum(), hidden)[0], expected)


@pytest.mark.usefixtures("bf16_path")
def test_bfloat16_inputs_give_float32_statistics():
    hidden, weight, _, targets = inputs(9, False, torch.bfloat16)
    ours = fused(hidden, weight, None, targets, 1.0, 4)
    assert all(x.dtype == torch.float32 for x in ours)
    for a, b in zip(ours, reference(hidden, weight, None, targets, 1.0), strict=True):
        assert torch.allclose(a.double(), b, atol=0.03)  # logits are rounded to bfloat16 once
    ours[0].sum().backward()
    assert hidden.grad.dtype == weight.grad.dtype == torch.bfloat16


def test_huge_logits_stay_finite():
    hidden, weight, _, targets = inputs(6, False)
    ours = fused(hidden * 1e4, weight, None, targets, 1.0, 4)
    assert all(torch.isfinite(x).all() for x in ours)
    sum(x.sum() for x in ours).backward()
    assert torch.isfinite(weight.grad).all()


@settings(max_examples=25, deadline=None)
@given(st.integers(1, 30), st.integers(1, 30), st.floats(0.1, 5.0), st.integers(0, 10**6))
def test_chunks_do_not_matter(num_tokens, chunk, temperature, seed):
    hidden, weight, _, targets = inputs(num_tokens, False, seed=seed)
    chunked = fused(hidden, weight, None, targets, temperature, chunk)
    for a, b in zip(chunked, reference(hidden, weight, None, targets, temperature), strict=True):
        assert torch.allclose(a, b, rtol=1e-10, atol=1e-12)


@pytest.mark.parametrize("fused", [True, False])
def test_hidden_states_wider_than_the_head_are_projected_as_the_head_is_stored(fused):
    hidden, weight, targets = torch.randn(5, 16), torch.randn(11, 16).bfloat16(), torch.arange(5)
    log_probs = token_log_probs(hidden.requires_grad_(), weight, targets, fused=fused).log_probs
    assert torch.equal(log_probs, token_log_probs(hidden.bfloat16(), weight, targets, fused=fused).log_probs)
    log_probs.sum().backward()
    assert hidden.grad.dtype == torch.float32
