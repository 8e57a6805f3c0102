"""Names that config values may take. The families' registries live in later layers; a test keeps both sides equal."""

from __future__ import annotations

PPO_PROGRAMS = ("ppo", "rejection_sampling")  # of `verl train`

ADV_ESTIMATORS = (
    "gae",
    "grpo",
    "grpo_vectorized",
    "gdpo",
    "grpo_passk",
    "reinforce_plus_plus",
    "reinforce_plus_plus_baseline",
    "remax",
    "rloo",
    "rloo_vectorized",
    "opo",
    "gpg",
    "optimal_token_baseline",
    "tir_optimal_token_baseline",
)
GROUP_ESTIMATORS = tuple(n for n in ADV_ESTIMATORS if n not in ("gae", "reinforce_plus_plus", "remax"))
STD_NORM_ESTIMATORS = ("grpo", "grpo_vectorized", "gdpo", "grpo_passk")
TOKEN_BASELINE_ESTIMATORS = ("optimal_token_baseline", "tir_optimal_token_baseline")

POLICY_LOSSES = (
    "vanilla",
    "dppo_tv",
    "dppo_kl",
    "gspo",
    "sapo",
    "gpg",
    "clip_cov",
    "kl_cov",
    "geo_mean",
    "dro",
    "cispo",
    "bypass_mode",
)
CLIPPING_LOSSES = ("vanilla", "dppo_tv", "dppo_kl", "gspo", "clip_cov", "geo_mean", "cispo")
DUAL_CLIPPING_LOSSES = ("vanilla", "dppo_tv", "dppo_kl")

_KL = ("kl", "k1", "abs", "mse", "k2", "low_var_kl", "k3")
KL_KINDS = (*_KL, *(name + "+" for name in _KL))

DISTILLATION_LOSSES = (*_KL, "forward_kl_topk", "jsd")

LOSS_AGG_MODES = ("token-mean", "token-sum", "seq-mean-token-sum", "seq-mean-token-sum-norm", "seq-mean-token-mean")

LOGGERS = (
    "console",
    "file",
    "tensorboard",
    "wandb",
    "mlflow",
    "swanlab",
    "vemlp_wandb",
    "clearml",
    "trackio",
    "rl_insight",
)

REWARD_MANAGERS = ("naive", "batch", "prime", "dapo", "gdpo", "remote", "rate_limited")

ROLLOUT_ENGINES = ("native", "hf", "vllm", "http", "sglang")
ROLLOUT_IS = ("token", "sequence")
ROLLOUT_RS = (
    *(f"token_{k}" for k in ("k1", "k2", "k3")),
    *(f"seq_sum_{k}" for k in ("k1", "k2", "k3")),
    *(f"seq_mean_{k}" for k in ("k1", "k2", "k3")),
    *(f"seq_max_{k}" for k in ("k2", "k3")),
)
SCORE_METRICS = ("reward", "score", "seq_reward", "seq_final_reward")  # filter_groups.metric for the score itself
