"""Preference losses as formulas over Python floats, written from the papers and not from the code."""

import math


def expit(x):
    return 1 / (1 + math.exp(-x))


def log_expit(x):
    return -math.log1p(math.exp(-x))


def cross_entropy(x, e):
    return -(1 - e) * log_expit(x) - e * log_expit(-x)


def score(t, kind, alpha):
    """f'(t) of an f-divergence."""
    return {
        "reverse_kl": lambda: math.log(t),
        "forward_kl": lambda: 1 - 1 / t,
        "js_divergence": lambda: math.log(2 * t / (1 + t)),
        "alpha_divergence": lambda: (t ** (alpha - 1) - 1) / (alpha - 1),
    }[kind]()


def reward(lp, alpha):
    return (1 - math.exp(lp) ** -alpha) / alpha if alpha else lp


# name -> (one pair or completion as a namespace with settings) -> loss
EACH = {
    "sigmoid": lambda p: cross_entropy(p.beta * p.delta, p.label_smoothing),
    "sigmoid_norm": lambda p: -log_expit(p.beta * p.mean_delta),
    "hinge": lambda p: max(0.0, 1 - p.beta * p.delta),
    "ipo": lambda p: (p.mean_delta - 1 / (2 * p.beta)) ** 2,
    "exo_pair": lambda p: sum(
        q * (math.log(q) - math.log(label))
        for q, label in zip(
            (expit(p.beta * p.delta), expit(-p.beta * p.delta)), (1 - p.label_smoothing, p.label_smoothing), strict=True
        )
    ),
    "nca_pair": lambda p: -log_expit(p.beta * p.c) - 0.5 * (log_expit(-p.beta * p.c) + log_expit(-p.beta * p.r)),
    "robust": lambda p: (
        ((1 - p.label_smoothing) * -log_expit(p.beta * p.delta) - p.label_smoothing * -log_expit(-p.beta * p.delta))
        / (1 - 2 * p.label_smoothing)
    ),
    "bco_pair": lambda p: -log_expit(p.beta * p.c) - log_expit(-p.beta * p.r),
    "sppo_hard": lambda p: (p.c - 0.5 / p.beta) ** 2 + (p.r + 0.5 / p.beta) ** 2,
    "apo_zero": lambda p: 1 - expit(p.beta * p.c) + expit(p.beta * p.r),
    "apo_down": lambda p: expit(p.beta * p.c) + 1 - expit(p.beta * (p.c - p.r)),
    "discopop": lambda p: (
        -log_expit(p.beta * p.delta) * (1 - expit(p.beta * p.delta / p.discopop_tau))
        + math.exp(-p.beta * p.delta) * expit(p.beta * p.delta / p.discopop_tau)
    ),
    "sft": lambda p: p.nll,
    "cpo": lambda p: (
        cross_entropy(p.beta * (reward(p.lp_w, p.alpha) - reward(p.lp_l, p.alpha)), p.label_smoothing)
        + p.cpo_alpha * p.nll
    ),
    "cpo_hinge": lambda p: (
        max(0.0, 1 - p.beta * (reward(p.lp_w, p.alpha) - reward(p.lp_l, p.alpha))) + p.cpo_alpha * p.nll
    ),
    "cpo_ipo": lambda p: (
        (reward(p.mean_w, p.alpha) - reward(p.mean_l, p.alpha) - 1 / (2 * p.beta)) ** 2 + p.cpo_alpha * p.nll
    ),
    "simpo": lambda p: cross_entropy(
        p.beta * (reward(p.mean_w, p.alpha) - reward(p.mean_l, p.alpha)) - p.simpo_gamma, p.label_smoothing
    ),
    "orpo": lambda p: (
        p.nll
        - p.beta
        * log_expit(
            math.log(math.exp(p.mean_w) / (1 - math.exp(p.mean_w)))
            - math.log(math.exp(p.mean_l) / (1 - math.exp(p.mean_l)))
        )
    ),
    "kto": lambda p: (
        p.desirable_weight * (1 - expit(p.beta * (p.ratio - p.shift)))
        if p.desirable
        else p.undesirable_weight * (1 - expit(p.beta * (p.shift - p.ratio)))
    ),
    "apo_zero_unpaired": lambda p: (
        p.desirable_weight * (1 - expit(p.beta * p.ratio))
        if p.desirable
        else p.undesirable_weight * expit(p.beta * p.ratio)
    ),
    "bco": lambda p: (
        -p.desirable_weight * log_expit(p.beta * p.ratio - p.shift)
        if p.desirable
        else -p.undesirable_weight * log_expit(-(p.beta * p.ratio - p.shift))
    ),
}


def optimal_transport(name, pairs):
    """The mean of AOT over a batch of pairs: sort, then compare equal ranks."""
    if name == "aot":
        ours = sorted(p.lp_w - p.lp_l for p in pairs)
        theirs = sorted(p.ref_w - p.ref_l for p in pairs)
    else:
        ours, theirs = sorted(p.c for p in pairs), sorted(p.r for p in pairs)
    beta, e = pairs[0].beta, pairs[0].label_smoothing
    return sum(cross_entropy(beta * (a - b), e) for a, b in zip(ours, theirs, strict=True)) / len(pairs)


# the loss of a policy equal to the reference: TRL's and the authors' formulas at c = r = 0, beta 0.1
LN2 = math.log(2)
START = {
    "sigmoid": LN2,
    "hinge": 1.0,
    "ipo": 25.0,
    "exo_pair": 2.7612,
    "nca_pair": 2 * LN2,
    "robust": LN2,
    "bco_pair": 2 * LN2,
    "sppo_hard": 50.0,
    "aot": LN2,
    "aot_unpaired": LN2,
    "apo_zero": 1.0,
    "apo_down": 1.0,
    "discopop": 0.8466,
    "sigmoid_norm": LN2,
    "kto": 0.5,
    "apo_zero_unpaired": 0.5,
    "bco": LN2,
}
