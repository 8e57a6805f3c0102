"""Contract of the policy losses: one row each; float64 loop references for value and gradient, and the laws."""

from functools import partial, wraps

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from tests.algorithms.batches import close, policy_inputs, widen
from tests.algorithms.loss_references import TABLE, Case
from verl.algorithms.policy_losses import POLICY_LOSSES, policy_loss, register_policy_loss
from verl.algorithms.policy_losses.clipped import vanilla
from verl.algorithms.policy_losses.terms import is_zero_without_advantage, zero_without_advantage
from verl.algorithms.reduce import LOSS_AGG_MODES, agg_loss
from verl.data_proto.metrics import merge_metrics, metric_values
from verl.errors import ConfigError
from verl.trainer.ppo import core_algos

SCALE = 8.0


losses = pytest.mark.parametrize("name", sorted(TABLE))
# the others select tokens by statistics of the micro-batch (see the module)
splitting_losses = pytest.mark.parametrize("name", sorted(name for name, row in TABLE.items() if row.splits))


def binder(mode, **totals):
    return lambda matrix, mask, override=None: agg_loss(
        matrix, mask, override or mode, loss_scale_factor=SCALE, **totals
    )


def totals_of(mask, dp_size=1):
    return {"batch_num_tokens": int(mask.sum()), "global_batch_size": len(mask), "dp_size": dp_size}


def run(name, inputs, agg, weighted=False, generator=None):
    weights, params = inputs[4] if weighted else None, TABLE[name].params
    kind = name.partition("/")[0]
    return policy_loss(kind, **named(inputs), agg=agg, rollout_is_weights=weights, params=params, generator=generator)


def value_and_gradient(name, inputs, agg, weighted=False):
    leaf = inputs[1].clone().requires_grad_()
    loss, _ = run(name, (inputs[0], leaf, *inputs[2:]), agg, weighted)
    (gradient,) = torch.autograd.grad(loss, leaf)
    return loss.detach(), gradient


def difference_quotients(function, lp, step=1e-6):
    quotients = torch.zeros(len(lp), len(lp[0]), dtype=torch.float64)
    for i, row in enumerate(lp):
        for t in range(len(row)):
            moved = [
                [x + s * step * (i == j and t == u) for u, x in enumerate(r)] for s in (1, -1) for j, r in enumerate(lp)
            ]
            quotients[i, t] = (function(moved[: len(lp)]) - function(moved[len(lp) :])) / (2 * step)
    return quotients


def rows(inputs, index):
    return tuple(x[index] for x in inputs)


def test_the_table_has_every_loss():
    assert {n.partition("/")[0] for n in TABLE} == set(POLICY_LOSSES.built_in), "give the loss a row of TABLE"


@losses
@pytest.mark.parametrize("weighted", [False, True])
@settings(max_examples=4, deadline=None, derandomize=True)
@given(seed=st.integers(0, 2**31), mode=st.sampled_from(LOSS_AGG_MODES), use_totals=st.booleans())
def test_value_and_gradient_equal_the_loop_reference(name, weighted, seed, mode, use_totals):
    row = TABLE[name]
    weighted = weighted and row.takes_weights
    inputs = policy_inputs(seed, spread=row.spread)
    old, new, advantages, mask, weights = inputs
    use_totals = use_totals or name.startswith("bypass")  # rejection inside a loss does not change the totals
    agg = binder(mode, **(totals_of(mask) if use_totals else {}))
    totals = (int(mask.sum()), len(mask)) if use_totals else None
    loss, gradient = value_and_gradient(name, inputs, agg, weighted)

    def expected(lp):
        case = Case(
            old.tolist(), lp, new.tolist(), advantages.tolist(), mask.tolist(), weights.tolist() if weighted else None
        )
        return row.reference(case, mode, totals=totals, scale=SCALE, **row.params)

    close(loss, expected(new.tolist()), 1e-7)
    close(gradient, difference_quotients(expected, new.tolist()), 1e-6)
    assert not gradient[~mask].any()


def named(inputs):
    """Arguments of a loss without weights."""
    return dict(zip(("old_log_prob", "log_prob", "advantages", "response_mask"), inputs))


@losses
def test_padding_does_not_matter(name):
    inputs = policy_inputs(1)
    padded = tuple(widen(x, False if x.dtype == torch.bool else 0.0) for x in inputs)
    for mode in LOSS_AGG_MODES:
        close(run(name, padded, binder(mode))[0], run(name, inputs, binder(mode))[0])


@losses
def test_rows_may_come_in_any_order(name):
    inputs, order = policy_inputs(2), torch.tensor([3, 0, 4, 2, 1])
    loss, gradient = value_and_gradient(name, inputs, binder("token-mean"))
    moved, moved_gradient = value_and_gradient(name, rows(inputs, order), binder("token-mean"))
    close(moved, loss)
    close(moved_gradient, gradient[order])


@splitting_losses
@pytest.mark.parametrize("mode", LOSS_AGG_MODES)
def test_micro_batches_add_up(name, mode):
    inputs = policy_inputs(3)
    agg = binder(mode, **totals_of(inputs[3]))
    loss, gradient = value_and_gradient(name, inputs, agg)
    for split in ([[0, 1], [2, 3, 4]], [[4], [0], [3], [1], [2]]):
        parts = [value_and_gradient(name, rows(inputs, s), agg) for s in split]
        close(sum(p[0] for p in parts), loss)
        for index, (_, part) in zip(split, parts):
            close(part, gradient[index])


@splitting_losses
@pytest.mark.parametrize("mode", LOSS_AGG_MODES)
def test_the_mean_over_ranks_is_the_loss_of_one(name, mode):
    inputs = policy_inputs(4)
    loss, _ = run(name, inputs, binder(mode, **totals_of(inputs[3])))
    agg = binder(mode, **totals_of(inputs[3], dp_size=2))
    ranks = [run(name, rows(inputs, s), agg)[0] for s in ([0, 1], [2, 3, 4])]
    close(sum(ranks) / 2, loss)


@losses
def test_metrics_merge_to_the_mini_batchs(name):
    inputs = policy_inputs(5)
    agg = binder("token-mean", **totals_of(inputs[3]))
    undivided = metric_values(run(name, inputs, agg)[1])
    merged = metric_values(merge_metrics([run(name, rows(inputs, s), agg)[1] for s in ([0, 1], [2, 3, 4])]))
    assert set(merged) == set(undivided)
    if TABLE[name].splits:
        for key in set(undivided) - {k for k in undivided if k.endswith("_std") or k.endswith("eff_sample_size")}:
            assert merged[key] == pytest.approx(undivided[key], rel=1e-6, abs=1e-9), key
    if name != "gpg":
        assert "ppo_kl" in undivided, "add old_policy_kl (terms.py) to the loss's metrics"


def declared(name):
    return is_zero_without_advantage(POLICY_LOSSES.get(name.partition("/")[0]))


@losses
@pytest.mark.parametrize("mode", LOSS_AGG_MODES)
@settings(max_examples=5, deadline=None, derandomize=True)
@given(seed=st.integers(0, 2**31), silent=st.sets(st.integers(0, 4), max_size=4), weighted=st.booleans())
def test_rows_without_advantage_change_nothing_where_the_loss_declares_it(name, mode, seed, silent, weighted):
    assert declared(name) is TABLE[name].skips, "decorate it with @zero_without_advantage, or set skips=False"
    if not declared(name):
        return
    inputs = policy_inputs(seed, spread=2.0)
    inputs[2][sorted(silent)] = 0.0
    agg = binder(mode, **totals_of(inputs[3]))
    loss, gradient = value_and_gradient(name, inputs, agg, weighted)
    assert not gradient[sorted(silent)].any()
    remaining = [row for row in range(5) if row not in silent]
    alone, gradient_alone = value_and_gradient(name, rows(inputs, remaining), agg, weighted)
    close(alone, loss, 1e-14)
    # not bit for bit: an element's sigmoid depends on whether it is computed in a full vector
    close(gradient_alone, gradient[remaining], 1e-14)


@pytest.mark.parametrize("name", ["dro", "clip_cov", "kl_cov"])
def test_losses_that_need_rows_without_advantage_do_not_declare_it(name):
    """dro pulls such a row back to the old policy; the others choose tokens by means over all rows."""
    inputs = policy_inputs(1, spread=2.0)
    inputs[2][0] = 0.0
    agg = binder("token-mean", **totals_of(inputs[3]))
    gradient = value_and_gradient(name, inputs, agg)[1]
    alone = value_and_gradient(name, rows(inputs, [1, 2, 3, 4]), agg)[1]
    assert gradient[0].any() or not torch.equal(alone, gradient[1:])
    assert not declared(name)


def test_a_loss_around_a_declared_one_declares_it_itself():
    @wraps(vanilla)
    def penalised(old_log_prob, log_prob, advantages, response_mask, **rest):
        loss, metrics = vanilla(old_log_prob, log_prob, advantages, response_mask, **rest)
        return loss + log_prob.sum(), metrics

    assert is_zero_without_advantage(vanilla)
    assert not is_zero_without_advantage(penalised)
    assert not is_zero_without_advantage(partial(vanilla, clip_ratio_c=2.0))
    assert is_zero_without_advantage(zero_without_advantage(penalised))


@losses
def test_an_empty_micro_batch_is_zero(name):
    old, new, advantages, mask, weights = policy_inputs(6)
    leaf = new.clone().requires_grad_()
    loss, _ = run(name, (old, leaf, advantages, torch.zeros_like(mask), weights), binder("token-mean"))
    loss.backward()
    assert float(loss.detach()) == 0
    assert not leaf.grad.any()


def test_vanilla_metrics():
    old = torch.zeros(1, 4, dtype=torch.float64)
    ratios = torch.tensor([[1.5, 0.5, 4.0, 1.0]], dtype=torch.float64)
    advantages = torch.tensor([[1.0, -1.0, -1.0, 1.0]], dtype=torch.float64)
    loss, metrics = policy_loss(
        "vanilla",
        old_log_prob=old,
        log_prob=ratios.log(),
        advantages=advantages,
        response_mask=torch.ones(1, 4),
        agg=binder("token-sum"),
        params={"clip_ratio": 0.2, "clip_ratio_low": None, "clip_ratio_high": None, "clip_ratio_c": 3.0},
    )
    close(loss, -1.2 + 0.8 + 3.0 - 1.0)
    values = metric_values(metrics)
    assert values["pg_clipfrac"] == pytest.approx(0.5)
    assert values["pg_clipfrac_lower"] == pytest.approx(0.25)
    assert values["ppo_kl"] == pytest.approx(float(-ratios.log().mean()))


def test_clip_cov_draws_only_from_its_generator():
    inputs = policy_inputs(7, batch=40, width=20)
    params = {"clip_cov_ratio": 0.05, "clip_cov_lb": -10.0, "clip_cov_ub": 10.0}

    def dropped(seed):
        generator = torch.Generator().manual_seed(seed)
        loss, metrics = policy_loss(
            "clip_cov", **named(inputs), agg=binder("token-mean"), params=params, generator=generator
        )
        return float(loss), metrics["pg_clipfrac"].value * num_tokens

    num_tokens = int(inputs[3].sum())
    assert dropped(1) == dropped(1)
    assert dropped(1)[0] != dropped(2)[0]
    assert dropped(1)[1] == pytest.approx(int(0.05 * num_tokens))


@pytest.mark.parametrize(
    ("name", "params", "match"),
    [
        ("vanilla", {"clip_ratio_c": 1.0}, "clip_ratio_c"),
        ("dro", {}, "dro_beta > 0"),
        ("dro", {"dro_beta": -1.0}, "dro_beta > 0"),
        ("sapo", {"tau_pos": 0.0}, "tau_pos"),
        ("vanila", {}, "did you mean 'vanilla'"),
        ("bypass_mode", {"loss_type": "reinforcement"}, "did you mean 'reinforce'"),
    ],
)
def test_bad_settings_are_named(name, params, match):
    with pytest.raises(ConfigError, match=match):
        policy_loss(name, **named(policy_inputs(8)), agg=binder("token-mean"), params=params)


def test_weights_that_a_loss_cannot_take_are_refused():
    with pytest.raises(ConfigError, match="does not take importance weights"):
        run("bypass_mode", policy_inputs(9), binder("token-mean"), weighted=True)


class TestUsersLosses:
    """Functions of the older contract: (old_log_prob, ..., loss_agg_mode, config, rollout_is_weights)."""

    @staticmethod
    def define(name, with_info):
        @register_policy_loss(name)
        def loss_fn(
            old_log_prob,
            log_prob,
            advantages,
            response_mask,
            loss_agg_mode="token-mean",
            config=None,
            rollout_is_weights=None,
        ):
            ratio = torch.exp(log_prob - old_log_prob)
            matrix = -advantages * torch.clamp(ratio, 1 - config.clip_ratio, 1 + config.get("clip_ratio", 0.1))
            info = config.global_batch_info if with_info else {}
            loss = core_algos.agg_loss(loss_mat=matrix, loss_mask=response_mask, loss_agg_mode=loss_agg_mode, **info)
            return loss, {"actor/pg_clipfrac": 0.25, "mine": torch.tensor(2.0)}

        return loss_fn

    @pytest.mark.parametrize("with_info", [False, True])
    def test_micro_batches_add_up_for_them_too(self, with_info):
        name = f"test_user_loss_{with_info}"
        self.define(name, with_info)
        inputs = policy_inputs(10)
        for mode in LOSS_AGG_MODES:
            settings_ = {"params": {"loss_agg_mode": mode}, "config": {"clip_ratio": 0.2}}
            call = partial(policy_loss, name, agg=binder(mode, **totals_of(inputs[3])), **settings_)
            undivided, metrics = call(**named(inputs))
            parts = [call(**named(rows(inputs, s)))[0] for s in ([0, 1], [2, 3, 4])]
            close(sum(parts), undivided)
            old, new, advantages, mask, _ = inputs
            matrix = -advantages * (new - old).exp().clamp(0.8, 1.2)
            close(undivided, agg_loss(matrix, mask, mode, loss_scale_factor=SCALE, **totals_of(mask)))
            assert metric_values(metrics) == {"pg_clipfrac": 0.25, "mine": 2.0}

    def test_wrong_results_are_named(self):
        inputs = policy_inputs(11)
        call = partial(policy_loss, **named(inputs), agg=binder("token-mean"))

        @register_policy_loss("test_no_metrics")
        def no_metrics(old_log_prob, log_prob, advantages, response_mask, loss_agg_mode, config):
            return log_prob.sum()

        @register_policy_loss("test_no_scalar")
        def no_scalar(old_log_prob, log_prob, advantages, response_mask, loss_agg_mode, config):
            return log_prob, {}

        with pytest.raises(ConfigError, match=r"must return \(loss, metrics\)"):
            call("test_no_metrics")
        with pytest.raises(ConfigError, match="scalar tensor"):
            call("test_no_scalar")
        with pytest.raises(ConfigError, match="no argument rollout_is_weights"):
            call("test_no_scalar", rollout_is_weights=inputs[4])
