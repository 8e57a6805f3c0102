"""The rules of `algorithm.rollout_correction.rollout_rs` that reject tokens and rows, read from their keys."""

import math
from dataclasses import dataclass

from verl.errors import ConfigError
from verl.families import ROLLOUT_RS

REJECTION_KEYS = ("rollout_rs", "rollout_rs_threshold", "rollout_rs_threshold_lower", "rollout_token_veto_threshold")
_RS = "algorithm.rollout_correction.rollout_rs"
_SCOPES = {"token": "token_k1", "sequence": "seq_sum_k1", "geometric": "seq_mean_k1"}


def rejection_rules(
    rollout_rs: str | None,
    rollout_rs_threshold: float | str | None = None,
    rollout_rs_threshold_lower: float | None = None,
    rollout_token_veto_threshold: float | None = None,
) -> tuple[str | None, float | str | None]:
    """(rules, bounds) of keys as releases up to 0.7 have them. These name a rule by its scope, have a key for its lower bound,
    and a veto of rows with a token of a smaller ratio."""
    rules, bounds = _SCOPES.get(str(rollout_rs), rollout_rs), rollout_rs_threshold
    if rollout_rs_threshold_lower is not None and bounds is not None and "_" not in str(bounds):
        bounds = f"{rollout_rs_threshold_lower}_{bounds}"
    limit = f"{rollout_token_veto_threshold}_inf"
    if rollout_token_veto_threshold is None or limit in str(bounds).split(","):
        return rules, bounds
    if not rules:
        return "seq_max_k1", limit
    shared = rules.count(",") if "," not in str(bounds) else 0
    return f"{rules},seq_max_k1", ",".join([str(bounds)] * (shared + 1) + [limit])


@dataclass(frozen=True)
class Rejection:
    """Rule that keeps low <= divergence <= high. `low` is -inf for k2 and k3."""

    option: str
    low: float
    high: float

    @property
    def scope(self) -> str:
        return self.option.rpartition("_")[0]  # token, seq_sum, seq_mean or seq_max

    @property
    def estimator(self) -> str:
        return self.option.rpartition("_")[2]


def parse_rejection(options: str, thresholds: float | str | None) -> list[Rejection]:
    """Parse options and thresholds, such as ("token_k1,seq_mean_k3", "0.5_2.0,0.01"); one threshold applies to all.

    k1 takes "low_high" bounds of the ratio, or one number u for (1/u, u); k2 and k3 take an upper bound of the divergence.
    Raises ConfigError on an unknown option, a missing or malformed threshold, or a count that does not fit.
    """
    names = [name.strip() for name in options.split(",") if name.strip()]
    if not set(names) <= set(ROLLOUT_RS):
        raise ConfigError(f"{_RS}={options} has an unknown rule; there are {', '.join(ROLLOUT_RS)}.")
    if thresholds is None:
        raise ConfigError(f"{_RS}={options} needs {_RS}_threshold: one number for each rule, or low_high for k1.")
    bounds = [part.strip() for part in str(thresholds).split(",")]
    if len(bounds) == 1:
        bounds *= len(names)
    if len(bounds) != len(names):
        raise ConfigError(
            f"{_RS}_threshold={thresholds} has {len(bounds)} entries for {len(names)} rules. Give one for each, or one for all."
        )
    return [_rejection(name, text) for name, text in zip(names, bounds, strict=True)]


def _rejection(option: str, text: str) -> Rejection:
    try:
        bounds = [float(part) for part in text.split("_")]
    except ValueError:
        bounds = []
    if option.endswith("k1"):
        if len(bounds) == 1 and bounds[0] > 0:
            bounds = sorted((bounds[0], 1 / bounds[0]))
        if len(bounds) == 2 and 0 < bounds[0] <= bounds[1]:
            return Rejection(option, -math.log(bounds[1]), -math.log(bounds[0]))  # of k1 = -log rho
        raise ConfigError(f"{_RS}_threshold={text} for {option} must be low_high with 0 < low <= high, or one number.")
    if len(bounds) == 1 and bounds[0] > 0:
        return Rejection(option, -math.inf, bounds[0])
    raise ConfigError(f"{_RS}_threshold={text} for {option} must be one number above 0, an upper bound.")
