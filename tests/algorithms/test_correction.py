"""Rollout correction against loops over Python floats."""

import math

import pytest
import torch
from hypothesis import assume, given, settings
from hypothesis import strategies as st

from tests.algorithms.batches import close, policy_inputs, widen
from verl.algorithms.correction import PRESETS, importance_weights, preset, rollout_correction, rollout_gap_metrics
from verl.algorithms.correction.weights import parse_is_threshold
from verl.config.rejection import parse_rejection
from verl.data_proto.metrics import metric_values
from verl.errors import ConfigError
from verl.families import ROLLOUT_RS


def inputs(seed=0, **kw):
    rollout, old, _, mask, _ = policy_inputs(seed, **kw)
    return old, rollout, mask


def kept_ratios(old, rollout, mask):
    """One list of log ratios per row."""
    return [[o - r for o, r, k in zip(*row) if k] for row in zip(old.tolist(), rollout.tolist(), mask.tolist())]


def scatter(rows, mask):
    out = torch.zeros(mask.shape, dtype=torch.float64)
    for i, row in enumerate(rows):
        out[i][mask[i]] = torch.tensor(row, dtype=torch.float64)
    return out


@pytest.mark.parametrize("level", ["token", "sequence"])
@pytest.mark.parametrize("threshold", [1.1, "1.1", "0.8_1.2"])
@pytest.mark.parametrize("normalize", [False, True])
def test_weights(level, threshold, normalize):
    old, rollout, mask = inputs(1)
    low, high = parse_is_threshold(threshold)
    rows = []
    for row in kept_ratios(old, rollout, mask):
        raw = [math.exp(x) for x in row] if level == "token" else [math.exp(sum(row))]
        bounded = [min(w, high) if low is None else (w if low <= w <= high else 0.0) for w in raw]
        rows.append(bounded if level == "token" else bounded * len(row))
    if normalize:
        flat = [w for r in rows for w in r] if level == "token" else [r[0] for r in rows]
        mean = sum(flat) / len(flat)
        rows = [[w / mean for w in r] for r in rows]
    correction = rollout_correction(
        old, rollout, mask, rollout_is=level, rollout_is_threshold=threshold, rollout_is_batch_normalize=normalize
    )
    close(correction.weights, scatter(rows, mask), 1e-7)
    assert correction.response_mask.equal(mask)
    assert not correction.weights.requires_grad


def test_a_wild_ratio_stays_finite():
    log_ratio = torch.tensor([[500.0, -500.0]])
    for level in ("token", "sequence"):
        weights = importance_weights(log_ratio, torch.ones(1, 2), level, 1e12)
        assert torch.isfinite(weights).all()


ESTIMATORS = {"k1": lambda r: r, "k2": lambda r: math.log(r) ** 2 / 2, "k3": lambda r: r - 1 - math.log(r)}
REDUCE = {"seq_sum": math.fsum, "seq_mean": lambda xs: math.fsum(xs) / len(xs)}
REDUCE_RATIOS = {"seq_sum": math.prod, "seq_mean": lambda rs: math.exp(math.fsum(map(math.log, rs)) / len(rs))}


def compared_values(ratios, option):
    """The value of each token of a row that the bounds of `option` apply to: of k1 the ratio, the row's product or its
    geometric mean."""
    scope, _, estimator = option.rpartition("_")
    values = [ESTIMATORS[estimator](ratio) for ratio in ratios]
    if scope in ("token", "seq_max"):
        return values
    return [(REDUCE_RATIOS if estimator == "k1" else REDUCE)[scope](values)] * len(values)


def passing(values, option, low, high):
    within = [low <= value <= high for value in values]
    return [all(within)] * len(within) if option.startswith("seq_max") else within


@pytest.mark.parametrize("option", ROLLOUT_RS)
def test_rejection(option):
    old, rollout, mask = inputs(2, batch=12)
    low, high, threshold = (0.75, 1.25, "0.75_1.25") if option.endswith("k1") else (0.0, 0.05, 0.05)
    rows = [
        passing(compared_values([math.exp(x) for x in row], option), option, low, high)
        for row in kept_ratios(old, rollout, mask)
    ]
    correction = rollout_correction(old, rollout, mask, rollout_rs=option, rollout_rs_threshold=threshold)
    expected = scatter([[float(k) for k in r] for r in rows], mask).bool()
    assert 0 < int(expected.sum()) < int(mask.sum()), "the case decides nothing"
    assert correction.response_mask.equal(expected)
    assert correction.weights is None
    metrics = metric_values(correction.metrics)
    lost = (mask & ~expected).sum() / mask.sum()
    assert metrics[f"rollout_corr/rollout_rs_{option}_masked_fraction"] == pytest.approx(float(lost))
    assert metrics["rollout_corr/rollout_rs_masked_fraction"] == pytest.approx(float(lost))
    lost_rows = (mask & ~expected).any(1).double().mean()
    assert metrics["rollout_corr/rollout_rs_seq_masked_fraction"] == pytest.approx(float(lost_rows))


LOG_RATIOS = st.lists(st.floats(-25, 25), min_size=1, max_size=5)
BOUND = st.floats(-27, 27).map(math.exp)


@given(st.sampled_from(ROLLOUT_RS), LOG_RATIOS, BOUND, BOUND)
@settings(max_examples=200, deadline=None)
def test_rejection_keeps_exactly_the_ratios_within_its_bounds(option, log_ratios, one, other):
    bounds = sorted((one, other)) if option.endswith("k1") else [0.0, one]
    values = compared_values([math.exp(x) for x in log_ratios], option)
    assume(all(abs(value / bound - 1) > 1e-6 for value in values for bound in bounds if bound > 0))
    log_ratio = torch.tensor([log_ratios], dtype=torch.float64)
    threshold = "_".join(map(repr, bounds)) if option.endswith("k1") else repr(one)
    correction = rollout_correction(
        log_ratio, torch.zeros_like(log_ratio), torch.ones_like(log_ratio).bool(), rollout_rs=option,
        rollout_rs_threshold=threshold,
    )  # fmt: skip
    assert correction.response_mask[0].tolist() == passing(values, option, *bounds)


@given(st.sampled_from(["token", "sequence"]), st.lists(st.floats(-4, 4), min_size=1, max_size=5), BOUND, BOUND)
@settings(max_examples=100, deadline=None)
def test_weights_are_the_ratios_within_their_bounds(level, log_ratios, one, other):
    low, high = sorted((one, other))
    ratios = [math.exp(x) for x in log_ratios] if level == "token" else [math.exp(math.fsum(log_ratios))]
    assume(all(abs(ratio / bound - 1) > 1e-6 for ratio in ratios for bound in (low, high)))
    assume(max(ratios) < math.exp(20) and min(ratios) > math.exp(-20))
    log_ratio = torch.tensor([log_ratios], dtype=torch.float64)
    weights = importance_weights(log_ratio, torch.ones_like(log_ratio), level, f"{low!r}_{high!r}")[0].tolist()
    expected = [ratio if low <= ratio <= high else 0.0 for ratio in ratios] * (
        1 if level == "token" else len(log_ratios)
    )
    assert weights == pytest.approx(expected, rel=1e-9)


def test_a_row_with_a_token_of_a_small_ratio_is_left_out():
    """The veto of earlier releases, over a rule that keeps the row."""
    log_ratio = torch.log(torch.tensor([[1.0, 1e-5, 2.0], [1.0, 2e-4, 1e9]], dtype=torch.float64))
    rejected = rollout_correction(
        log_ratio, torch.zeros_like(log_ratio), torch.ones(2, 3), rollout_rs="seq_max_k1,token_k1",
        rollout_rs_threshold="1e-4_inf,1e-9_1e8",
    )  # fmt: skip
    assert rejected.response_mask.tolist() == [[0, 0, 0], [1, 1, 0]]


def test_options_must_all_keep_a_token():
    old, rollout, mask = inputs(3, batch=12)
    options = {"token_k1": "0.8_1.3", "seq_mean_k3": "0.05"}
    singles = [
        rollout_correction(old, rollout, mask, rollout_rs=o, rollout_rs_threshold=t).response_mask
        for o, t in options.items()
    ]
    both = rollout_correction(
        old, rollout, mask, rollout_rs=",".join(options), rollout_rs_threshold=",".join(options.values())
    )
    assert both.response_mask.equal(singles[0] & singles[1])


def test_thresholds():
    assert parse_is_threshold(2) == (None, 2.0)
    assert parse_is_threshold("0.5_5.0") == (0.5, 5.0)
    (single,) = parse_rejection("token_k1", 2.0)
    assert (single.low, single.high) == pytest.approx((-math.log(2), math.log(2)))
    shared = parse_rejection("seq_sum_k2, seq_max_k3", "0.3")
    assert [r.high for r in shared] == [0.3, 0.3]
    for bad in ("a", "2_1", "-1", "1_2_3", 0):
        with pytest.raises(ConfigError, match="rollout_is_threshold"):
            parse_is_threshold(bad)
    for options, threshold, match in (
        ("token_k9", 1, "unknown rule"),
        ("token_k1", None, "needs .*rollout_rs_threshold"),
        ("token_k1,token_k2", "1,2,3", "3 entries for 2"),
        ("token_k2", "0.1_0.2", "upper bound"),
        ("token_k1", "2_1", "low_high"),
    ):
        with pytest.raises(ConfigError, match=match):
            parse_rejection(options, threshold)
    with pytest.raises(ConfigError, match="rollout_is="):
        rollout_correction(*inputs(), rollout_is="tokens")


def test_diagnostics():
    old, rollout, mask = inputs(4)
    correction = rollout_correction(old, rollout, mask, rollout_is="token", rollout_is_threshold=1.2)
    metrics = {k.removeprefix("rollout_corr/"): v for k, v in metric_values(correction.metrics).items()}
    rows = kept_ratios(old, rollout, mask)
    flat = [x for r in rows for x in r]
    mean = lambda xs: sum(xs) / len(xs)  # noqa: E731
    train = [-float(o[k].mean()) for o, k in zip(old, mask)]
    roll = [-float(o[k].mean()) for o, k in zip(rollout, mask)]
    gaps = [a - b for a, b in zip(train, roll)]
    weights = [min(math.exp(x), 1.2) for x in flat]
    expected = {
        "kl": mean([-x for x in flat]),
        "k3_kl": mean([math.exp(x) - 1 - x for x in flat]),
        "training_ppl": mean([math.exp(x) for x in train]),
        "training_log_ppl": mean(train),
        "rollout_ppl": mean([math.exp(x) for x in roll]),
        "rollout_log_ppl": mean(roll),
        "log_ppl_diff": mean(gaps),
        "log_ppl_abs_diff": mean([abs(x) for x in gaps]),
        "log_ppl_diff_max": max(gaps),
        "log_ppl_diff_min": min(gaps),
        "ppl_ratio": mean([math.exp(x) for x in gaps]),
        "chi2_token": mean([math.exp(2 * x) - 1 for x in flat]),
        "chi2_seq": mean([math.exp(2 * sum(r)) - 1 for r in rows]),
        "rollout_is_mean": mean([math.exp(x) for x in flat]),
        "rollout_is_max": math.exp(max(flat)),
        "rollout_is_min": math.exp(min(flat)),
        "rollout_is_eff_sample_size": mean(weights) ** 2 / mean([w * w for w in weights]),
        "rollout_is_std": math.sqrt(mean([(w - mean(weights)) ** 2 for w in weights])),
        "rollout_is_ratio_fraction_high": mean([float(math.exp(x) > 1.2) for x in flat]),
        "rollout_is_ratio_fraction_low": mean([float(math.exp(x) < 1 / 1.2) for x in flat]),
        "rollout_is_seq_mean": mean([mean([math.exp(x) for x in r]) for r in rows]),
    }
    for key, value in expected.items():
        assert metrics[key] == pytest.approx(value, rel=1e-6, abs=1e-8), key


@pytest.mark.parametrize(
    ("level", "rule", "bounds"),
    [
        ("sequence", "seq_sum_k1", "0.5_2.0"),
        ("token", "seq_mean_k1", "0.999_1.001"),
        ("sequence", "seq_mean_k3", "0.01"),
    ],
)
def test_padding_does_not_matter(level, rule, bounds):
    old, rollout, mask = inputs(5)
    settings = {"rollout_is": level, "rollout_rs": rule, "rollout_rs_threshold": bounds}
    plain = rollout_correction(old, rollout, mask, **settings)
    wide = rollout_correction(widen(old, -3.0), widen(rollout, -9.0), widen(mask, False), **settings)
    close(wide.weights[:, :6], plain.weights)
    assert wide.response_mask[:, :6].equal(plain.response_mask)
    a, b = metric_values(plain.metrics), metric_values(wide.metrics)
    assert a == pytest.approx(b, rel=1e-9)


def test_an_empty_batch_of_tokens_has_no_extremes():
    old, rollout, mask = inputs(6)
    correction = rollout_correction(
        old, rollout, torch.zeros_like(mask), rollout_is="sequence", rollout_rs="seq_max_k2", rollout_rs_threshold=1.0
    )
    assert not correction.weights.any()
    assert not any(k.endswith(("_max", "_min")) for k in correction.metrics)


def test_gap_metrics():
    old, rollout, mask = inputs(8)
    metrics = metric_values(rollout_gap_metrics(old, rollout, mask))
    p, q = old[mask].exp(), rollout[mask].exp()
    assert metrics["training/rollout_probs_diff_max"] == pytest.approx(float((p - q).abs().max()))
    assert metrics["training/rollout_probs_diff_mean"] == pytest.approx(float((p - q).abs().mean()))
    assert metrics["training/rollout_probs_diff_std"] == pytest.approx(float((p - q).abs().std()))
    correlation = torch.corrcoef(torch.stack([p, q]))[0, 1]
    assert metrics["training/rollout_actor_probs_pearson_corr"] == pytest.approx(float(correlation))
    assert metrics["training/rollout_probs_diff_valid"] == 1
    assert metric_values(rollout_gap_metrics(old[mask], rollout[mask])) == metrics
    nothing = torch.zeros(0)
    assert metric_values(rollout_gap_metrics(nothing, nothing)) == {"training/rollout_probs_diff_valid": 0}


def test_presets_are_valid():
    assert len(PRESETS) == 20
    old, rollout, mask = inputs(7)
    for name in PRESETS:
        settings = {k: v for k, v in preset(name).items() if k not in ("bypass_mode", "loss_type")}
        rollout_correction(old, rollout, mask, **settings)
        assert ("bypass_mode" in preset(name)) == name.startswith("bypass")
    assert preset("decoupled_token_is", rollout_is_threshold=3.0)["rollout_is_threshold"] == 3.0
    assert PRESETS["decoupled_token_is"]["rollout_is_threshold"] == 2.0
    with pytest.raises(ConfigError, match="did you mean"):
        preset("decoupled_tokn_is")
