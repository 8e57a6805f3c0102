"""The losses of distillation against loops over Python floats, and the laws of a divergence."""

import math

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from tests.algorithms.batches import close
from verl.algorithms.distillation import forward_kl, generalized_jsd, overlap_ratio, with_remainder

BETAS = (0.0, 0.1, 0.5, 0.9, 1.0)


def distributions(seed, tokens=7, shape=(3, 4), spread=2.0):
    """Log-probs of student and teacher over a whole vocabulary, float64."""
    generator = torch.Generator().manual_seed(seed)
    logits = spread * torch.randn(2, *shape, tokens, generator=generator, dtype=torch.float64)
    return logits.log_softmax(-1).unbind()


def kl(p, q):
    return sum(math.exp(a) * (a - b) for a, b in zip(p, q, strict=True))


def jsd_of_token(student, teacher, beta):
    """Eq. 1 of GKD on probabilities."""
    if beta in (0, 1):
        return kl(teacher, student) if beta == 0 else kl(student, teacher)
    mixture = [math.log(beta * math.exp(t) + (1 - beta) * math.exp(s)) for s, t in zip(student, teacher, strict=True)]
    return beta * kl(teacher, mixture) + (1 - beta) * kl(student, mixture)


def each_token(reference, *tensors):
    flat = [reference(*rows) for rows in zip(*(t.flatten(0, 1).tolist() for t in tensors), strict=True)]
    return torch.tensor(flat, dtype=torch.float64).view(tensors[0].shape[:2])


def check_gradient(loss, reference, student):
    """Against difference quotients of the reference."""
    leaf = student.clone().requires_grad_()
    (gradient,) = torch.autograd.grad(loss(leaf).sum(), leaf)
    step = 1e-6
    for index in ((0, 0, 0), (1, 2, 3), (2, 3, 1)):
        moved = [student.clone(), student.clone()]
        moved[0][index] += step
        moved[1][index] -= step
        high, low = (reference(m).sum() for m in moved)
        close(gradient[index], (high - low) / (2 * step), 1e-7)


@pytest.mark.parametrize("beta", BETAS)
def test_jsd_is_the_formula_of_the_paper(beta):
    student, teacher = distributions(1)
    reference = lambda s: each_token(lambda a, b: jsd_of_token(a, b, beta), s, teacher)  # noqa: E731
    close(generalized_jsd(student, teacher, beta), reference(student))
    check_gradient(lambda s: generalized_jsd(s, teacher, beta), reference, student)


@pytest.mark.parametrize("least", [None, -2.0])
def test_forward_kl_over_listed_tokens(least):
    student, teacher = (log_probs[..., :4] for log_probs in distributions(2))

    def token(a, b):
        cut = [x if least is None else max(x, least) for x in (*a, *b)]
        return kl(cut[4:], cut[:4])

    reference = lambda s: each_token(token, s, teacher)  # noqa: E731
    close(forward_kl(student, teacher, least), reference(student))
    check_gradient(lambda s: forward_kl(s, teacher, least), reference, student)


def test_worked_by_hand():
    student, teacher = torch.tensor([[[0.5, 0.5]]]).double().log(), torch.tensor([[[0.25, 0.75]]]).double().log()
    close(forward_kl(student, teacher), [[0.25 * math.log(0.5) + 0.75 * math.log(1.5)]])
    close(generalized_jsd(student, teacher, 1.0), [[0.5 * math.log(2) + 0.5 * math.log(2 / 3)]])
    close(with_remainder(teacher[..., :1]), teacher)
    assert overlap_ratio(torch.tensor([[[3, 1, 2]]]), torch.tensor([[[1, 2, 9]]])).item() == pytest.approx(2 / 3)


@given(
    seed=st.integers(0, 10**6), beta=st.sampled_from(BETAS), num_listed=st.integers(1, 6), spread=st.floats(0.1, 5.0)
)
@settings(max_examples=60, deadline=None)
def test_laws(seed, beta, num_listed, spread):
    """Zero for equal distributions, never negative, bounded by log 2 between them, symmetric, smaller with merged tokens."""
    student, teacher = distributions(seed, spread=spread)
    divergence = generalized_jsd(student, teacher, beta)
    assert (divergence >= -1e-12).all()
    assert generalized_jsd(teacher, teacher, beta).abs().max() < 1e-12
    close(divergence, generalized_jsd(teacher, student, 1 - beta))
    if 0 < beta < 1:
        assert (divergence <= math.log(2) + 1e-12).all()
    listed = teacher.topk(num_listed, dim=-1).indices
    merged = [with_remainder(log_probs.gather(-1, listed)) for log_probs in (student, teacher)]
    assert all((p.exp().sum(-1) - 1).abs().max() < 2e-6 for p in merged)
    assert (generalized_jsd(*merged, beta) <= divergence + 1e-4).all()  # the remainder is at least 1e-6


def test_a_remainder_of_nothing_has_a_finite_gradient():
    student, teacher = (torch.tensor([[[1.0, 1e-12]]]).log().requires_grad_() for _ in range(2))
    generalized_jsd(with_remainder(student), with_remainder(teacher), 0.5).sum().backward()
    assert torch.isfinite(student.grad).all()
