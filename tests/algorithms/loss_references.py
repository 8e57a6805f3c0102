"""The policy losses once more, as loops over Python floats.

The gradient flows through `lp`; `frozen` holds the same numbers where the formula stops the gradient. A difference quotient
in only `lp` is then the gradient that training uses.
"""

import math
from typing import NamedTuple


class Case(NamedTuple):
    old: list
    lp: list
    frozen: list
    adv: list
    mask: list
    w: list | None


def aggregate(matrix, mask, mode, totals=None, scale=None):
    """agg_loss as loops; `totals` are (tokens, sequences) of the whole batch."""
    lengths = [sum(m) for m in mask]
    num_tokens, num_sequences = totals or (sum(lengths), sum(1 for n in lengths if n))
    rows = [sum(x for x, k in zip(r, m) if k) for r, m in zip(matrix, mask)]
    if mode == "token-mean":
        return sum(rows) / num_tokens
    if mode == "token-sum":
        return sum(rows)
    if mode == "seq-mean-token-sum":
        return sum(rows) / num_sequences
    if mode == "seq-mean-token-sum-norm":
        return sum(rows) / num_sequences / (scale or len(mask[0]))
    assert mode == "seq-mean-token-mean"
    return sum(r / (n + 1e-8) for r, n in zip(rows, lengths)) / num_sequences


def _matrix(case, token_loss, weighted=True):
    out = []
    for i, row in enumerate(case.lp):
        out.append([])
        for t, lp in enumerate(row):
            w = case.w[i][t] if case.w is not None and weighted else 1.0
            trains = case.mask[i][t]
            out[-1].append(
                w * token_loss(lp, case.old[i][t], case.adv[i][t], case.frozen[i][t], i, t) if trains else 0.0
            )
    return out


def _clip(x, low, high):
    return min(max(x, low), high)


def _ratio(lp, old):
    return math.exp(_clip(lp - old, -20, 20))


def vanilla(case, mode, clip_ratio_low=0.2, clip_ratio_high=0.2, clip_ratio_c=3.0, **kw):
    def loss(lp, old, a, *_):
        r = _ratio(lp, old)
        worst = max(-a * r, -a * _clip(r, 1 - clip_ratio_low, 1 + clip_ratio_high))
        return worst if a >= 0 else min(worst, -a * clip_ratio_c)

    return aggregate(_matrix(case, loss), case.mask, mode, **kw)


def cispo(case, mode, clip_ratio_low=0.2, clip_ratio_high=0.2, **kw):
    def loss(lp, old, a, frozen, *_):
        return -_clip(_ratio(frozen, old), 1 - clip_ratio_low, 1 + clip_ratio_high) * a * lp

    return aggregate(_matrix(case, loss), case.mask, mode, **kw)


def dppo_tv(case, mode, clip_ratio_low=0.2, clip_ratio_high=0.2, clip_ratio_c=3.0, **kw):
    def loss(lp, old, a, frozen, *_):
        moved = math.exp(frozen) - math.exp(old)
        if (a > 0 and moved > clip_ratio_high) or (a <= 0 and moved < -clip_ratio_low):
            return 0.0
        return -a * min(_ratio(frozen, old), clip_ratio_c) * lp

    return aggregate(_matrix(case, loss), case.mask, mode, **kw)


def dppo_kl(case, mode, clip_ratio_low=0.2, clip_ratio_high=0.2, clip_ratio_c=3.0, **kw):
    def loss(lp, old, a, frozen, *_):
        p, q = math.exp(frozen), math.exp(old)
        kl = q * (old - frozen) + (1 - q) * math.log((1 - q + 1e-8) / (1 - p + 1e-8))
        if a > 0 and p > q and kl > clip_ratio_high:
            return 0.0
        if a <= 0 and p < q and kl > clip_ratio_low:
            return 0.0
        return -a * min(_ratio(frozen, old), clip_ratio_c) * lp

    return aggregate(_matrix(case, loss), case.mask, mode, **kw)


def gspo(case, mode, clip_ratio_low=0.2, clip_ratio_high=0.2, **kw):
    sequence = []
    for frozen, old, mask in zip(case.frozen, case.old, case.mask):
        sequence.append(sum(f - o for f, o, k in zip(frozen, old, mask) if k) / max(1, sum(mask)))

    def loss(lp, old, a, frozen, i, _):
        s = math.exp(min(lp - frozen + sequence[i], 10))
        return max(-a * s, -a * _clip(s, 1 - clip_ratio_low, 1 + clip_ratio_high))

    return aggregate(_matrix(case, loss), case.mask, mode, **kw)


def sapo(case, mode, tau_pos=1.0, tau_neg=1.05, **kw):
    def loss(lp, old, a, *_):
        tau = tau_pos if a > 0 else tau_neg
        return -a / (1 + math.exp(-tau * (_ratio(lp, old) - 1))) * 4 / tau

    return aggregate(_matrix(case, loss), case.mask, "seq-mean-token-mean", **kw)


def gpg(case, mode, **kw):
    return aggregate(_matrix(case, lambda lp, old, a, *_: -lp * a), case.mask, mode, **kw)


def dro(case, mode, dro_beta, **kw):
    def loss(lp, old, a, *_):
        return -(lp * a - dro_beta / 2 * (lp - old) ** 2)

    return aggregate(_matrix(case, loss), case.mask, mode, **kw)


def geo_mean(case, mode, clip_ratio_low=0.2, clip_ratio_high=0.2, totals=None, **_):
    total = 0.0
    for i, mask in enumerate(case.mask):
        positions, n = [t for t, k in enumerate(mask) if k], sum(mask) + 1e-8
        exponent, log_weight = 0.0, 0.0
        for t in positions:
            delta, a = case.lp[i][t] - case.old[i][t], case.adv[i][t]
            clipped = _clip(delta, -clip_ratio_low, clip_ratio_high)
            exponent += min(delta, clipped) if a > 0 else max(delta, clipped)
            log_weight += math.log(case.w[i][t] + 1e-10) if case.w is not None else 0.0
        total += -sum(case.adv[i][t] for t in positions) / n * math.exp(exponent / n) * math.exp(log_weight / n)
    return total / (totals[1] if totals else len(case.mask))


def _covariances(case):
    positions = [(i, t) for i, m in enumerate(case.mask) for t, k in enumerate(m) if k]
    mean_a = sum(case.adv[i][t] for i, t in positions) / (len(positions) + 1e-8)
    mean_lp = sum(case.frozen[i][t] for i, t in positions) / (len(positions) + 1e-8)
    return {(i, t): (case.adv[i][t] - mean_a) * (case.frozen[i][t] - mean_lp) for i, t in positions}


def clip_cov(
    case, mode, clip_ratio_low=0.2, clip_ratio_high=0.2, clip_cov_lb=1.0, clip_cov_ub=5.0, clip_cov_ratio=1.0, **kw
):
    """Only if the quota covers every candidate: nothing is random then."""
    assert clip_cov_ratio == 1.0
    cov = _covariances(case)

    def loss(lp, old, a, frozen, i, t):
        r = _ratio(lp, old)
        plain, clipped = -a * r, -a * _clip(r, 1 - clip_ratio_low, 1 + clip_ratio_high)
        if clipped <= plain and clip_cov_lb < cov[i, t] < clip_cov_ub:
            return 0.0
        return max(plain, clipped)

    return aggregate(_matrix(case, loss), case.mask, mode, **kw)


def kl_cov(case, mode, kl_cov_ratio=2e-4, ppo_kl_coef=0.1, **kw):
    cov = _covariances(case)
    top = sorted(cov, key=cov.get, reverse=True)[: max(1, int(kl_cov_ratio * len(cov)))]

    def loss(lp, old, a, frozen, i, t):
        return -a * _ratio(lp, old) + (ppo_kl_coef * abs(lp - old) if (i, t) in top else 0.0)

    return aggregate(_matrix(case, loss), case.mask, mode, **kw)


def bypass_mode(
    case,
    mode,
    loss_type="ppo_clip",
    rollout_is_threshold=2.0,
    rollout_rs_threshold="0.5_2.0",
    totals=None,
    scale=None,
    **kw,
):
    """rollout_is=token, rollout_rs=token_k1. With totals the rejected tokens stay in the denominators."""
    low, high = (float(x) for x in rollout_rs_threshold.split("_"))
    mask = [
        [k and low <= math.exp(o - f) <= high for k, o, f in zip(*x)] for x in zip(case.mask, case.old, case.frozen)
    ]
    case = case._replace(mask=mask, w=None)
    if loss_type == "ppo_clip":
        return vanilla(
            case, mode, totals=totals, scale=scale, **{k: v for k, v in kw.items() if not k.startswith("rollout")}
        )

    def loss(lp, old, a, frozen, *_):
        return -a * lp * min(_ratio(frozen, old), rollout_is_threshold)

    return aggregate(_matrix(case, loss), case.mask, mode, totals=totals, scale=scale)


class Row(NamedTuple):
    reference: object
    params: dict = {}
    takes_weights: bool = True
    splits: bool = True  # micro-batch losses add up to the loss of the mini-batch
    skips: bool = True  # rows without advantage add nothing
    spread: float = 0.4  # how far the new policy is from the old


CLIPS = {"clip_ratio_low": 0.2, "clip_ratio_high": 0.3}
BYPASS = {
    "rollout_is": "token",
    "rollout_is_threshold": 1.3,
    "rollout_rs": "token_k1",
    "rollout_rs_threshold": "0.5_2.0",
}
TABLE = {
    "vanilla": Row(vanilla, {**CLIPS, "clip_ratio_c": 1.5}),
    "cispo": Row(cispo, CLIPS),
    "dppo_tv": Row(dppo_tv, {"clip_ratio_low": 0.1, "clip_ratio_high": 0.12, "clip_ratio_c": 1.4}),
    "dppo_kl": Row(dppo_kl, {"clip_ratio_low": 0.05, "clip_ratio_high": 0.03, "clip_ratio_c": 1.4}),
    "gspo": Row(gspo, CLIPS),
    "sapo": Row(sapo, {"tau_pos": 0.9, "tau_neg": 1.3}),
    "gpg": Row(gpg),
    "dro": Row(dro, {"dro_beta": 0.7}, skips=False),
    "geo_mean": Row(geo_mean, CLIPS),
    "clip_cov": Row(
        clip_cov, {**CLIPS, "clip_cov_ratio": 1.0, "clip_cov_lb": 0.1, "clip_cov_ub": 1.0}, splits=False, skips=False
    ),
    "kl_cov": Row(kl_cov, {"kl_cov_ratio": 0.25, "ppo_kl_coef": 0.5}, splits=False, skips=False),
    "bypass_mode": Row(bypass_mode, {**CLIPS, **BYPASS, "clip_ratio_c": 1.5}, takes_weights=False, skips=False),
    "bypass_mode/reinforce": Row(bypass_mode, {**BYPASS, "loss_type": "reinforce"}, takes_weights=False, skips=False),
}
