"""KL estimators, controllers, the KL term of the reward, the value loss."""

import math

import pytest
import torch

from tests.algorithms.batches import close, policy_inputs
from verl.algorithms.kl import (
    KL_ESTIMATORS,
    AdaptiveKLController,
    FixedKLController,
    apply_kl_penalty,
    kl_penalty,
    make_kl_controller,
)
from verl.algorithms.losses import compute_value_loss
from verl.algorithms.reduce import agg_loss
from verl.data_proto.metrics import merge_metrics, metric_values
from verl.errors import ConfigError

FORMULAS = {
    "kl": lambda d: d,
    "k1": lambda d: d,
    "abs": abs,
    "mse": lambda d: d * d / 2,
    "k2": lambda d: d * d / 2,
    "low_var_kl": lambda d: max(-10.0, min(10.0, math.exp(-max(-20, min(20, d))) + max(-20, min(20, d)) - 1)),
    "k3": lambda d: max(-10.0, min(10.0, math.exp(-max(-20, min(20, d))) + max(-20, min(20, d)) - 1)),
}


def test_every_estimator_has_a_formula_here():
    assert set(FORMULAS) == set(KL_ESTIMATORS)


@pytest.mark.parametrize("kind", sorted(FORMULAS))
def test_values_and_gradients(kind):
    differences = [-30.0, -3.0, -0.5, -1e-3, 0.0, 0.2, 1.5, 8.0, 30.0]
    reference = torch.linspace(-2, -1, len(differences), dtype=torch.float64)
    log_prob = (reference + torch.tensor(differences, dtype=torch.float64)).requires_grad_()
    d = (log_prob - reference).tolist()
    close(kl_penalty(log_prob, reference, kind).detach(), [FORMULAS[kind](x) for x in d])
    (gradient,) = torch.autograd.grad(kl_penalty(log_prob, reference, kind).sum(), log_prob)
    step = 1e-6
    quotients = [(FORMULAS[kind](x + step) - FORMULAS[kind](x - step)) / (2 * step) for x in d]
    smooth = [i for i, x in enumerate(d) if x != 0 or kind != "abs"]
    close(gradient[smooth], [quotients[i] for i in smooth], 1e-6)
    straight = kl_penalty(log_prob, reference, kind + "+")
    close(straight.detach(), [FORMULAS[kind](x) for x in d])
    close(torch.autograd.grad(straight.sum(), log_prob)[0], d)


def test_unbiased_on_samples_of_the_policy():
    generator = torch.Generator().manual_seed(0)
    # near enough that k3 never reaches its bound of 10 (the bound would bias it)
    logits = 0.5 * torch.randn(2, 16, dtype=torch.float64, generator=generator)
    policy, reference = logits.log_softmax(-1)
    exact = float((policy.exp() * (policy - reference)).sum())
    means = {k: float((policy.exp() * kl_penalty(policy, reference, k)).sum()) for k in ("k1", "k3")}
    close(list(means.values()), [exact, exact])
    tokens = torch.multinomial(policy.exp(), 200_000, replacement=True, generator=generator)
    spread = {k: kl_penalty(policy, reference, k)[tokens].std() for k in means}
    assert spread["k3"] < spread["k1"]
    for k in means:
        sampled = kl_penalty(policy, reference, k)[tokens]
        assert abs(float(sampled.mean()) - exact) < 5 * float(sampled.std()) / math.sqrt(200_000)


def test_the_straight_through_gradient_matches_the_kl():
    logits = torch.randn(12, dtype=torch.float64, generator=torch.Generator().manual_seed(1)).requires_grad_()
    reference = torch.randn(12, dtype=torch.float64, generator=torch.Generator().manual_seed(2)).log_softmax(-1)
    policy = logits.log_softmax(-1)
    (exact,) = torch.autograd.grad((policy.exp() * (policy - reference)).sum(), logits, retain_graph=True)
    for kind in ("k1+", "k3+", "abs+"):
        expectation = (policy.detach().exp() * kl_penalty(policy, reference, kind)).sum()
        close(torch.autograd.grad(expectation, logits, retain_graph=True)[0], exact)


def test_unknown_estimators():
    zero = torch.zeros(1)
    for kind in ("full", "k4", "low_var_kl++"):
        with pytest.raises(ConfigError, match="no KL estimator"):
            kl_penalty(zero, zero, kind)


def test_adaptive_controller():
    controller = AdaptiveKLController(init_kl_coef=0.1, target_kl=2.0, horizon=1000)
    controller.update(current_kl=2.2, n_steps=100)  # error 0.1
    assert controller.value == pytest.approx(0.1 * (1 + 0.1 * 100 / 1000))
    before = controller.value
    controller.update(current_kl=100.0, n_steps=100)  # clipped at 0.2
    assert controller.value == pytest.approx(before * 1.02)
    resumed = AdaptiveKLController(0.5, 2.0, 1000)
    resumed.load_state_dict(controller.state_dict())
    for c in (controller, resumed):
        c.update(0.0, 50)
    assert resumed.value == controller.value == pytest.approx(before * 1.02 * (1 - 0.2 * 50 / 1000))


def test_controllers_by_config():
    fixed = make_kl_controller(type="fixed", kl_coef=0.3)
    fixed.update(100.0, 100)
    assert isinstance(fixed, FixedKLController)
    assert fixed.value == 0.3
    assert isinstance(make_kl_controller(type="adaptive", kl_coef=0.1, target_kl=0.2, horizon=10), AdaptiveKLController)
    with pytest.raises(ConfigError, match=r"kl_ctrl\.type"):
        make_kl_controller(type="pid")
    with pytest.raises(ConfigError, match="horizon"):
        AdaptiveKLController(0.1, 0.1, 0)


def test_kl_in_the_reward():
    old, ref, scores, mask, _ = policy_inputs(1)
    rewards, mean = apply_kl_penalty(scores, old, ref, mask, beta=0.5, kind="kl")
    close(rewards, scores - 0.5 * (old - ref) * mask)
    close(mean, sum((old - ref)[i][mask[i]].mean() for i in range(len(mask))) / len(mask), 1e-7)


def test_value_loss():
    vpreds = torch.tensor([[1.0, 3.0, 0.0, 9.0]], dtype=torch.float64, requires_grad=True)
    returns = torch.tensor([[2.0, 1.0, 0.2, 0.0]], dtype=torch.float64)
    values = torch.tensor([[1.2, 1.0, 2.0, 0.0]], dtype=torch.float64)
    mask = torch.tensor([[True, True, True, False]])
    loss, metrics = compute_value_loss(
        vpreds, returns, values, mask, 0.5, lambda m, k, mode=None: agg_loss(m, k, mode or "token-mean")
    )
    # (1-2)^2; max((3-1)^2, (1.5-1)^2); max((0-.2)^2, (1.5-.2)^2)
    close(loss.detach(), 0.5 * (1 + 4 + 1.69) / 3)
    assert metric_values(metrics) == pytest.approx({"vf_clipfrac": 1 / 3, "vpred_mean": 4 / 3}, rel=1e-6)
    (gradient,) = torch.autograd.grad(loss, vpreds)
    close(gradient, [[-1 / 3, 2 / 3, 0, 0]])  # beyond the clip only the clipped error is left, without gradient


def test_value_loss_adds_up():
    vpreds, returns, values, mask, _ = policy_inputs(3)

    def run(s):
        agg = lambda m, k, mode=None: agg_loss(m, k, "token-mean", batch_num_tokens=int(mask.sum()))  # noqa: E731
        return compute_value_loss(vpreds[s], returns[s], values[s], mask[s], 0.2, agg)

    undivided, metrics = run(slice(None))
    parts = [run(slice(0, 2)), run(slice(2, None))]
    close(sum(p[0] for p in parts), undivided)
    assert metric_values(merge_metrics([p[1] for p in parts])) == pytest.approx(metric_values(metrics))
