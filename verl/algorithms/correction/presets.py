"""Named settings of `algorithm.rollout_correction`. No torch.

decoupled_*: three policies (sampler, old, current); bypass_*: the sampler is the old policy. is: importance weights
(tis: truncated); rs: rejection; k1: by the whole row's ratio, geo: by its geometric mean, k3: by its mean k3
divergence.
"""

from __future__ import annotations

from typing import Any

from verl.errors import ConfigError, nearest

_TOKEN_IS = {"rollout_is": "token", "rollout_is_threshold": 2.0}
_SEQ_IS = {"rollout_is": "sequence", "rollout_is_threshold": 2.0}
_K1_RS = {"rollout_rs": "seq_sum_k1", "rollout_rs_threshold": "0.5_2.0"}
_GEO_RS = {"rollout_rs": "seq_mean_k1", "rollout_rs_threshold": "0.999_1.001"}
_K3_RS = {"rollout_rs": "seq_mean_k3", "rollout_rs_threshold": "0.01"}
_PPO_CLIP = {"bypass_mode": True, "loss_type": "ppo_clip"}
_REINFORCE = {"bypass_mode": True, "loss_type": "reinforce"}

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
