"""Correction for the mismatch of sampling and training policy: importance weights and rejection.

log rho = log-prob under the training policy - log-prob under the sampler, at each token. Weights multiply the loss;
rejected tokens or sequences leave the response mask, and with it the denominators of everything computed from the
mask afterwards.
"""

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from verl.algorithms.correction.diagnostics import gap_metrics, rollout_gap_metrics, weight_metrics
from verl.algorithms.correction.rejection import rejection_mask
from verl.algorithms.correction.weights import importance_weights
from verl.data_proto.metrics import Metric
from verl.errors import ConfigError, ModelError, nearest

__all__ = [
    "CORRECTION_SETTINGS",
    "PRESETS",
    "importance_weights",
    "preset",
    "require_fresh",
    "rollout_correction",
    "rollout_gap_metrics",
]

# Named settings of `algorithm.rollout_correction`. decoupled_*: three policies (sampler, old, current); bypass_*: the sampler
# is the old policy. is: importance weights (tis: truncated); rs: rejection; k1: by the row's ratio, geo: by its
# geometric mean, k3: by its mean k3 divergence.
_TOKEN_IS = {"rollout_is": "token", "rollout_is_threshold": 2.0}
_SEQ_IS = {"rollout_is": "sequence", "rollout_is_threshold": 2.0}
_K1_RS = {"rollout_rs": "seq_sum_k1", "rollout_rs_threshold": "0.5_2.0"}
_GEO_RS = {"rollout_rs": "seq_mean_k1", "rollout_rs_threshold": "0.999_1.001"}
_K3_RS = {"rollout_rs": "seq_mean_k3", "rollout_rs_threshold": "0.01"}
_PPO_CLIP = {"bypass_mode": True, "loss_type": "ppo_clip"}
_REINFORCE = {"bypass_mode": True, "loss_type": "reinforce"}

# keyword arguments of `rollout_correction`, which have the names of their keys
CORRECTION_SETTINGS = (
    "rollout_is", "rollout_is_threshold", "rollout_is_batch_normalize", "rollout_rs", "rollout_rs_threshold"
)  # fmt: skip

PRESETS: dict[str, dict[str, Any]] = {
    "disabled": {},
    "decoupled_token_is": _TOKEN_IS,
    "decoupled_seq_is": _SEQ_IS,
    "decoupled_seq_is_rs": {**_SEQ_IS, **_K1_RS},
    "decoupled_k1_rs": _K1_RS,
    "decoupled_geo_rs": _GEO_RS,
    "decoupled_geo_rs_seq_tis": {**_GEO_RS, **_SEQ_IS},
    "decoupled_geo_rs_token_tis": {**_GEO_RS, **_TOKEN_IS},
    "decoupled_k3_rs": _K3_RS,
    "decoupled_k3_rs_seq_tis": {**_K3_RS, **_SEQ_IS},
    "decoupled_k3_rs_token_tis": {**_K3_RS, **_TOKEN_IS},
    "bypass_ppo_clip": _PPO_CLIP,
    "bypass_ppo_clip_k1_rs": {**_PPO_CLIP, **_K1_RS},
    "bypass_ppo_clip_geo_rs": {**_PPO_CLIP, **_GEO_RS},
    "bypass_ppo_clip_k3_rs": {**_PPO_CLIP, **_K3_RS},
    "bypass_pg_is": {**_REINFORCE, **_SEQ_IS},
    "bypass_pg_k1_rs": {**_REINFORCE, **_K1_RS},
    "bypass_pg_geo_rs": {**_REINFORCE, **_GEO_RS},
    "bypass_pg_geo_rs_seq_tis": {**_REINFORCE, **_GEO_RS, **_SEQ_IS},
    "bypass_pg_geo_rs_token_tis": {**_REINFORCE, **_GEO_RS, **_TOKEN_IS},
}


def preset(name: str, **overrides: object) -> dict[str, object]:
    """Settings of the preset `name`, updated by `overrides`. Raises ConfigError for an unknown preset."""
    if name not in PRESETS:
        hint = nearest(name, PRESETS) or "; there are " + ", ".join(PRESETS)
        raise ConfigError(f"There is no rollout correction preset {name!r}{hint}")
    return {**PRESETS[name], **overrides}


@dataclass(frozen=True)
class Correction:
    """Result of `rollout_correction`.

    weights: [batch, response], detached, 0 outside the given mask; None without `rollout_is`. response_mask: the given one
    without the rejected tokens, same dtype. metrics: named rollout_corr/*.
    """

    weights: Tensor | None
    response_mask: Tensor
    metrics: dict[str, Metric]


@torch.no_grad()
def rollout_correction(
    old_log_prob: Tensor,
    rollout_log_prob: Tensor,
    response_mask: Tensor,
    *,
    rollout_is: str | None = None,
    rollout_is_threshold: float | str = 2.0,
    rollout_rs: str | None = None,
    rollout_rs_threshold: float | str | None = None,
    rollout_is_batch_normalize: bool = False,
) -> Correction:
    """Weights, mask and diagnostics of one batch, [batch, response] throughout.

    `rollout_is` token or sequence: see `importance_weights`. `rollout_rs`, a comma list of ROLLOUT_RS with their
    thresholds: see `rejection_mask`. Weights are computed on the given mask and not set to 0 by rejection; the
    returned mask does that. Raises ConfigError on an unknown level, option or threshold.
    """
    mask = response_mask.bool()
    log_ratio = torch.where(mask, old_log_prob - rollout_log_prob, 0.0)
    metrics = gap_metrics(old_log_prob, rollout_log_prob, mask)
    weights = None
    if rollout_is is not None:
        weights = importance_weights(
            log_ratio, mask, rollout_is, rollout_is_threshold, batch_normalize=rollout_is_batch_normalize
        )
        metrics.update(weight_metrics(log_ratio, weights, mask, rollout_is, rollout_is_threshold))
    accepted = mask
    if rollout_rs is not None:
        accepted, rejection_metrics = rejection_mask(log_ratio, mask, rollout_rs, rollout_rs_threshold)
        metrics.update(rejection_metrics)
    named = {f"rollout_corr/{name}": metric for name, metric in metrics.items()}
    return Correction(weights, accepted.to(response_mask.dtype), named)


def require_fresh(weight_version: Tensor, version: int, max_age: int, name: Callable[[int], str]) -> None:
    """Raise ModelError for a sample of weights newer than `version`, or more than `max_age` versions older.

    `version`: of the weights that train now. weight_version [batch]: of each sample's oldest token. `name` is of the sample
    in a row.
    """
    age = version - weight_version
    wrong = ((age < 0) | (age > max_age)).nonzero().flatten().tolist()
    if not wrong:
        return
    row = wrong[0]
    allowed = f"version {version}" if max_age == 0 else f"versions {version - max_age} to {version}"
    raise ModelError(
        f"Sample {name(row)} and {len(wrong) - 1} others of {len(age)} were made by weights of version "
        f"{int(weight_version[row])}, but only {allowed} may train now; nothing was trained on them. The rollout engine has "
        "outdated weights: restart the run, which syncs them again."
    )
